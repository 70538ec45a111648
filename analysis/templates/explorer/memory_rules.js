/* Structural rules of a layout, with the planner's own sentences, for the page. No DOM here.

A port of workloads/rules.py and of what workloads.experiment refuses; a test compares every sentence on random layouts.
An experiment is the plain dict of workloads.experiment.to_dict, a cluster an entry of analysis.explorer.models. */
"use strict";
const MemoryRules = (() => {
  const { dataParallel, div, numMicrobatches, V_SHAPED, worldSize } = ModelCosts;
  const RUNNABLE_SCHEDULES = ["none", "gpipe", "1f1b"];
  const SIZES = [
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size",
  ];
  const DEGREES = [
    "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "micro_batch_size", "global_batch_size", "seq_len",
    "virtual_stages",
  ];

  /** What workloads.experiment's constructors refuse: one sentence, or null. */
  function refusal(e) {
    const wanting = (label, holder, fields) => {
      const field = fields.find((name) => !Number.isSafeInteger(holder[name]) || holder[name] < 1);
      return field && `${label}: ${field}=${holder[field]} must be a whole number of at least 1`;
    };
    const model = e.model, label = `model ${model.name}`;
    const size = wanting(label, model, SIZES);
    if (size) return size;
    if (model.num_heads % model.num_kv_heads) {
      return `${label}: num_kv_heads=${model.num_kv_heads} must divide num_heads=${model.num_heads}`;
    }
    return wanting(`experiment on ${model.name}`, e, DEGREES) ?? null;
  }

  const gcd = (...values) => values.reduce((a, b) => { while (b) [a, b] = [b, a % b]; return a; });

  /** rules._may_be */
  function mayBe(axis, value) {
    const low = [], high = [];
    for (let d = 1; d * d <= value; d += 1) {
      if (value % d) continue;
      low.push(d);
      if (d * d < value) high.unshift(value / d);
    }
    return `${axis} may be one of ${[...low, ...high].join(", ")}`;
  }

  /** rules._batch */
  function* batch(e) {
    const dp = dataParallel(e), round = dp * e.micro_batch_size, rest = e.global_batch_size % round;
    if (!rest) return;
    const below = e.global_batch_size - rest;
    const work = [below, below + round].filter((size) => size).join(" or ");
    yield ["global_batch",
      `global_batch_size=${e.global_batch_size} is not a multiple of dp*micro_batch_size = ${dp}*` +
      `${e.micro_batch_size} = ${round}; ${work} would be`];
  }

  /** rules._pipeline */
  function* pipeline(e) {
    const layers = e.model.num_layers, chunks = e.pp * e.virtual_stages;
    if (chunks > layers) {
      const what = e.virtual_stages === 1 ? `pp=${e.pp}`
        : `pp*virtual_stages = ${e.pp}*${e.virtual_stages} = ${chunks}`;
      yield ["pp_layers", `${what} stages need as many layers, ${e.model.name} has ${layers}; use at most that many`];
    }
    if ((e.pp === 1) !== (e.pp_schedule === "none")) {
      yield ["pp_schedule", `pp_schedule=${e.pp_schedule} with pp=${e.pp}; it is none exactly when pp is 1`];
      return;
    }
    const interleaved = e.pp_schedule === "interleaved_1f1b";
    const needed = interleaved ? "2 or more" : V_SHAPED.includes(e.pp_schedule) ? "2" : "1";
    if (interleaved ? e.virtual_stages < 2 : e.virtual_stages !== Number(needed)) {
      yield ["virtual_stages",
        `pp_schedule=${e.pp_schedule} with virtual_stages=${e.virtual_stages}; it needs ${needed}`];
    }
    if (interleaved && numMicrobatches(e) % e.pp) {
      yield ["interleaved_microbatches",
        `interleaved_1f1b runs micro-batches in rounds of pp=${e.pp}; num_microbatches=${numMicrobatches(e)} is ` +
        "not a multiple of it"];
    }
  }

  /** rules._tensor */
  function* tensor(e) {
    const { tp, model } = e;
    if (tp === 1) return;
    const split = {};
    for (const name of ["num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"]) split[name] = model[name];
    if (model.moe) split.expert_hidden_size = model.moe.expert_hidden_size;
    const tokens = div(e.micro_batch_size * e.seq_len, e.cp);
    const uneven = Object.keys(split).filter((field) => split[field] % tp);
    const works = mayBe("tp", gcd(...Object.values(split)));
    for (const field of uneven) {
      yield [`tp_${field}`, `tp=${tp} does not divide ${field}=${split[field]} of ${model.name}; ${works}`];
    }
    if (e.sequence_parallel && tokens % tp) {
      yield ["sequence_parallel",
        `sequence parallelism splits micro_batch_size*seq_len/cp = ${e.micro_batch_size}*${e.seq_len}/${e.cp} = ` +
        `${tokens} tokens over tp=${tp} ranks; ${mayBe("tp", gcd(tokens, ...Object.values(split)))}`];
    }
  }

  /** rules._context */
  function* context(e) {
    const part = 2 * e.cp;
    if (e.cp === 1 || e.seq_len % part === 0) return;
    yield ["cp_seq_len",
      `cp=${e.cp} balances causal attention by cutting a sequence into 2*cp = ${part} equal parts; seq_len=` +
      `${e.seq_len} is not a multiple of ${part}, ${div(e.seq_len, part) * part + part} would be`];
  }

  /** rules._experts */
  function* experts(e) {
    if (e.ep === 1) return;
    if (!e.model.moe) {
      yield ["ep_model", `ep=${e.ep}, but ${e.model.name} has no experts; ep must be 1`];
      return;
    }
    const count = e.model.moe.num_experts, dp = dataParallel(e), ranks = dp * e.cp;
    if (count % e.ep) {
      yield ["ep_num_experts",
        `ep=${e.ep} does not divide num_experts=${count} of ${e.model.name}; ${mayBe("ep", count)}`];
    }
    if (ranks % e.ep) {
      yield ["ep_ranks",
        `ep=${e.ep} borrows ranks from dp*cp = ${dp}*${e.cp} = ${ranks} and does not divide it; ${mayBe("ep", ranks)}`];
    }
  }

  /** rules._zero */
  function* zero(e) {
    if (e.zero_stage === 0 && e.dp_shard > 1) {
      yield ["zero_shards",
        `zero_stage=0 shards nothing, but dp_shard=${e.dp_shard}; use dp_replicate=${dataParallel(e)} with dp_shard=1`];
    }
    if (e.zero_stage > 0 && e.dp_shard === 1) {
      yield ["zero_shards",
        `zero_stage=${e.zero_stage} with dp_shard=1 has nothing to shard over; use zero_stage=0`];
    }
    if (e.zero_stage === 3 && V_SHAPED.includes(e.pp_schedule)) {
      yield ["zero3_zero_bubble",
        `zero_stage=3 with pp_schedule=${e.pp_schedule}: splitting the backward loses gradients of weights ` +
        "that are freed in between; use zero_stage 0, 1 or 2"];
    }
  }

  /** rules._device, for a cluster that has a device. */
  function* device(e, cluster) {
    const most = cluster.devices_per_node;
    if (cluster.single_node && worldSize(e) > most) {
      yield ["single_node",
        `${worldSize(e)} ranks (dp*cp*tp*pp = ${dataParallel(e)}*${e.cp}*${e.tp}*${e.pp}) on cluster ` +
        `${cluster.name}, which is one node of ${most}; at most ${most}`];
    }
    if (e.attention === "cudnn" && cluster.backend !== "cuda") {
      yield ["attention", `attention=cudnn needs CUDA devices, cluster ${cluster.name} has ${cluster.backend}`];
    }
    const flash = ["cudnn", "flash"].includes(e.attention), wide = ["fp32", "fp64"].includes(e.precision);
    if (flash && wide && cluster.backend === "cuda") {
      yield ["attention",
        `attention=${e.attention} has no ${e.precision} kernels on CUDA; use attention=efficient, math or auto`];
    }
    const rates = cluster.precisions;
    if (rates.length && e.precision.startsWith("fp8") && !rates.includes("fp8")) {
      yield ["precision",
        `precision=${e.precision}, but ${cluster.device} has no fp8 matrix products; it has ${rates.join(", ")}`];
    }
  }

  /** rules._engine */
  function* engine(e) {
    const missing = [];
    if (e.cp > 1) missing.push(`cp=${e.cp} (use 1)`);
    if (e.ep > 1) missing.push(`ep=${e.ep} (use 1)`);
    if (e.model.moe) missing.push(`routed experts (${e.model.name})`);
    if (e.model.mla) missing.push(`latent attention (${e.model.name})`);
    if (e.precision.startsWith("fp8")) missing.push(`precision=${e.precision} (use bf16)`);
    if (!RUNNABLE_SCHEDULES.includes(e.pp_schedule)) missing.push(`pp_schedule=${e.pp_schedule} (use 1f1b or gpipe)`);
    if (missing.length) {
      yield ["engine_support", `engine version ${e.engine_version} cannot run ${missing.join(", ")} yet`];
    }
  }

  /** rules.violations: every rule that the experiment breaks on this cluster, or with null on any. */
  function violations(e, cluster) {
    const checks = [batch, pipeline, tensor, context, experts, zero, ...(cluster ? [device] : []), engine];
    return checks.flatMap((check) => [...check(e, cluster)].map(([rule, message]) => ({ rule, message })));
  }

  return { refusal, violations };
})();
