"use strict";

/* A row's full experiment (`config_json`), rebuilt from its columns and the page's model shapes. */
const RowExperiment = (() => {
  const FIELDS = [
    "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "routing", "routing_imbalance", "capacity_factor", "micro_batch_size", "global_batch_size", "seq_len", "zero_stage", "recompute", "recompute_every",
    "pp_schedule", "virtual_stages", "pp_split", "pp_stages", "pad_vocab_to", "cp_kind", "precision", "attention", "recurrence", "compile", "cuda_graph", "documents", "document_balance", "activation_offload", ...Object.keys(UPDATE_FIELDS), "seed", "engine", "engine_version",
  ];
  const SHAPE = ["num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"];
  /** Values for engines older than these choices. */
  const USUAL = { pp_split: "even", pp_stages: null, pad_vocab_to: null, cp_kind: "ring", recompute_every: 1, etp: 1, routing: "balanced", routing_imbalance: 1, capacity_factor: null, attention: "auto", compile: "none", cuda_graph: "none", documents: null, document_balance: "none", activation_offload: "none", recurrence: "torch", ...UPDATE_FIELDS, seed: 42 };
  /** Fields that may be null in an experiment. */
  const NULLABLE = ["capacity_factor", "pp_stages", "pad_vocab_to", "documents"];
  const TRUTH = { yes: true, no: false };

  /**
   * The row's shape: the page's shape of that name and those sizes, otherwise a dense one of the row's sizes; null if a
   * size is unknown.
   */
  function model(read, models) {
    const same = (shape) => SHAPE.every((name) => read(name) === null || read(name) === shape[name]);
    const name = read("model");
    const known = models.find((shape) => shape.name === name && same(shape)) ?? models.find((shape) => shape.name === `${name} (of the rows)` && same(shape));
    if (known) return { known: true, shape: { ...known, name } };
    if (SHAPE.some((field) => read(field) === null)) return null;
    const sizes = Object.fromEntries(SHAPE.map((field) => [field, read(field)]));
    return { known: false, shape: { name, ...sizes, tie_embeddings: TRUTH[read("tie_embeddings")] ?? false, qk_norm: false, moe: null, mla: null } };
  }

  /**
   * @param {Read} read The row's value of a column.
   * @param {Widget} widget `data.widget`: shapes and choices.
   * @returns {{experiment?: Experiment, config?: object, exact?: boolean, missing?: string}} `missing`: the reason if
   *   there is none; `experiment` has every field
   *   that the closed forms read; `config` only the row's values; `exact`: whether the page has its full shape.
   */
  function of(read, widget) {
    if (!widget) return { missing: "This page has no shapes of models." };
    if (widget.listed.some((name) => name === read("model"))) return { missing: "Its model is a list of layers, which the forms of this page do not have." };
    const shape = model(read, widget.models);
    if (!shape) return { missing: "The row does not say the shape of its model." };
    const experiment = /** @type {Experiment} */ ({ model: shape.shape });
    const config = { model: shape.shape };
    for (const name of FIELDS) {
      const value = read(name) ?? USUAL[name] ?? null;
      if (value === null && !NULLABLE.includes(name)) return { missing: `The row does not say its ${name}.` };
      experiment[name] = value;
      if (read(name) !== null || NULLABLE.includes(name)) config[name] = value;
    }
    const sharded = TRUTH[read("sequence_parallel")] ?? null;
    experiment.sequence_parallel = sharded ?? true;
    if (sharded !== null) config.sequence_parallel = sharded;
    experiment.gradient_accumulation_fusion = config.gradient_accumulation_fusion = TRUTH[read("gradient_accumulation_fusion")] ?? false;
    return { experiment, config: sorted(config), exact: shape.known };
  }

  /** The fields with their names in the order of `config_json`. */
  const sorted = (fields) => Object.fromEntries(Object.keys(fields).sort().map((name) => [name, fields[name] !== null && typeof fields[name] === "object" ? sorted(fields[name]) : fields[name]]));

  return { of };
})();
