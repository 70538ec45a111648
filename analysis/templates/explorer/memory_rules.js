/* The planner's rules on a layout, evaluated from data in the page. This file does not use the DOM.

   The rules, i.e. conditions and messages, are those of workloads/rules/layout_rules.py; analysis/explorer/rule_data.py
   writes them as JSON (data.widget.rules). An expression is a number, a name, or a list of an operation and its
   operands; see as_data in workloads/spec/expressions.py. A test compares every message with the planner's on random
   layouts. An experiment is the dict of workloads.spec.experiment.to_dict, a cluster an entry of
   analysis.explorer.model_data. */
"use strict";
const MemoryRules = (() => {
  const gcd = (...values) => values.reduce((a, b) => { while (b) [a, b] = [b, a % b]; return a; });

  /** Every divisor, smallest first. @param {number} value */
  function divisors(value) {
    const low = [], high = [];
    for (let d = 1; d * d <= value; d += 1) {
      if (value % d) continue;
      low.push(d);
      if (d * d < value) high.unshift(value / d);
    }
    return [...low, ...high];
  }

  /** Operations by sign or name, on the values of the operands. Numbers are whole. */
  const OPERATIONS = {
    "+": (a, b) => a + b, "-": (a, b) => (b === undefined ? -a : a - b), "*": (a, b) => a * b, "/": (a, b) => a / b, "//": (a, b) => Math.floor(a / b),
    "%": (a, b) => a % b, "==": (a, b) => a === b, "!=": (a, b) => a !== b,
    "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
    in: (part, all) => all.includes(part), "not in": (part, all) => !all.includes(part),
    not: (a) => !isTrue(a), list: (...members) => members, gcd, divisors,
  };
  /** Operations by sign, on the unevaluated operands, some of which may have no value. */
  const LAZY = {
    text: ([text]) => text,
    and: (operands, names) => operands.every((operand) => isTrue(evaluate(operand, names))),
    or: (operands, names) => operands.some((operand) => isTrue(evaluate(operand, names))),
    if: ([test, then, otherwise], names) => evaluate(isTrue(evaluate(test, names)) ? then : otherwise, names),
  };
  /** Truth as in Python: an empty list is false. @param {number} value */
  const isTrue = (value) => (Array.isArray(value) ? value.length > 0 : Boolean(value));

  function evaluate(expression, names) {
    if (Array.isArray(expression)) {
      const [sign, ...operands] = expression;
      if (LAZY[sign]) return LAZY[sign](operands, names);
      if (!OPERATIONS[sign]) throw new Error(`rules: this page does not know the operation ${sign}`);
      return OPERATIONS[sign](...operands.map((operand) => evaluate(operand, names)));
    }
    if (typeof expression !== "string") return expression;
    if (!(expression in names)) throw new Error(`rules: ${expression} is not the name of anything`);
    return names[expression];
  }

  /** The message of a rule, with its expressions evaluated. */
  function filled(message, names) {
    const shown = (value) => (Array.isArray(value) ? value.join(", ") : String(value));
    return message.map((part, i) => (i % 2 ? shown(evaluate(part, names)) : part)).join("");
  }

  /** Names about the stages that are written out; 0 without any. @param {string|null|undefined} text */
  function written(text) {
    if (!text) return { stages_written: 0, layers_written: 0, modules_written: 0, empty_stage: 0 };
    const { stages, num_layers, multi_token_modules, empty_stage } = ClosedForms.written_stages(text);
    return { stages_written: stages.length, layers_written: num_layers, modules_written: multi_token_modules, empty_stage };
  }

  /** Names about recomputation by stage. @param {Experiment} e */
  function recomputed(e) {
    const [recompute_by_stage, recompute_stages, recompute_beyond, recompute_one_by_one] = ClosedForms.recompute_values(e);
    return { recompute_by_stage, recompute_stages, recompute_beyond, recompute_one_by_one };
  }

  /**
   * Names that the rules may read (rules.names_of); without a cluster, rules of scope "cluster" cannot be evaluated.
   * @param {Experiment} e
   * @param {ClusterAbout} cluster
   */
  function namesOf(e, cluster, stated) {
    const { model } = e, { mla } = model, { dp, num_microbatches, world_size } = py.made(ClosedForms.Experiment, e);
    /** @type {Record<string, unknown>} */
    const names = {
      ...model, ...e, model: model.name,
      dp, world_size, num_microbatches,
      has_experts: Boolean(model.moe), has_capacity: (e.capacity_factor ?? null) !== null, has_latent_attention: Boolean(model.mla),
      num_experts: model.moe ? model.moe.num_experts : 0,
      experts_per_token: model.moe ? model.moe.experts_per_token : 0,
      expert_hidden_size: model.moe ? model.moe.expert_hidden_size : 0,
      ffn_hidden_size: !model.moe || model.moe.num_dense_layers > 0 ? model.ffn_hidden_size : 0,
      shared_hidden_size: model.moe ? model.moe.num_shared_experts * model.moe.expert_hidden_size : 0,
      query_size: mla ? mla.qk_nope_head_dim + mla.qk_rope_head_dim : model.head_dim,
      rope_size: mla ? mla.qk_rope_head_dim : model.head_dim,
      value_size: mla ? mla.v_head_dim : model.head_dim,
      query_latent: mla ? mla.q_lora_rank : 0,
      latent: mla ? mla.kv_lora_rank : 0,
      pp_stages: e.pp_stages ?? null, pad_vocab_to: e.pad_vocab_to ?? null, cuda_graph: e.cuda_graph ?? "none",
      gradient_accumulation_fusion: e.gradient_accumulation_fusion ?? false, documents: e.documents ?? null, recurrence: e.recurrence ?? "torch",
      grad_reduce: e.grad_reduce ?? "fp32", optimizer: e.optimizer ?? "adamw", optimizer_states: e.optimizer_states ?? "fp32",
      master_weights: e.master_weights ?? "fp32", optimizer_offload: e.optimizer_offload ?? 0,
      activation_offload: e.activation_offload ?? "none",
      ...written(e.pp_stages),
      ...recomputed(py.made(ClosedForms.Experiment, e)),
      // models with a list of layers have no rows
      recurrent_heads: 0, recurrent_key: 0, has_layer_list: false, copies_in_layers: false, local_attention: false,
      special_attention: false, kind_columns: 0, longest_window: 0, biased_outputs: 0, modules_elsewhere: 0, mtp_modules: 0,
      numbers_describe: true,
      ...(cluster && {
        cluster: cluster.name, backend: cluster.backend, device: cluster.device, precisions: cluster.precisions,
        devices_per_node: cluster.devices_per_node, joined_devices: cluster.joined_devices,
      }),
    };
    for (const [name, expression] of stated.derived) names[name] = evaluate(expression, names);
    names.lacking = stated.lacking.filter(({ broken }) => isTrue(evaluate(broken, names)))
      .map(({ message }) => filled(message, names));
    return names;
  }

  /**
   * Every rule that the experiment violates on this cluster (null: on any cluster): name, scope and message.
   * @param {Experiment} e
   * @param {ClusterAbout|null} cluster
   */
  function violations(stated, e, cluster) {
    const names = namesOf(e, cluster, stated);
    return stated.rules
      .filter(({ scope, broken }) => (cluster || scope !== "cluster") && isTrue(evaluate(broken, names)))
      .map(({ rule, scope, message }) => ({ rule, scope, message: filled(message, names) }));
  }

  /** The first error of the constructors of workloads.spec.experiment, as one sentence, or null. */
  function refusal({ refusals }, e) {
    const say = (sentence, values) => sentence.replace(/\{(\w+)\}/g, (_, name) => values[name]);
    const uncounted = (label, holder, fields) => {
      const field = fields.find((name) => !Number.isSafeInteger(holder[name]) || holder[name] < 1);
      return field && say(refusals.not_a_count, { label, field, value: holder[field] });
    };
    const model = e.model, label = `model ${model.name}`;
    const size = uncounted(label, model, refusals.model_sizes);
    if (size) return size;
    if (model.num_heads % model.num_kv_heads) return say(refusals.heads_do_not_divide, { ...model, label });
    const parts = { has_moe: Boolean(model.moe), has_mla: Boolean(model.mla), has_layers: Boolean(model.layers) };
    const names = { ...model, ...model.moe, ...model.mla, ...parts };
    const broken = refusals.relations.filter((relation) => isTrue(evaluate(relation.broken, names)));
    if (broken.length) return `${label}: ${broken.map(({ message }) => filled(message, names)).join("; ")}`;
    return uncounted(`experiment on ${model.name}`, e, refusals.counts) ?? null;
  }

  return { refusal, violations };
})();
