/* The inputs of the memory view: their fields, their HTML, and the experiment that they describe. */
"use strict";
const MemoryForm = (() => {
  const POWERS = (most) => Array.from({ length: Math.log2(most) + 1 }, (_, i) => 2 ** i);
  /** @typedef {[string, string, number[]]} Field field, label, what the slider steps through; the box takes any whole number */
  /** @type {Field[]} */
  const SHAPE = [
    ["num_layers", "Layers", [1, 2, 4, 8, 16, 24, 28, 32, 36, 48, 61, 64, 80, 96, 126]],
    ["hidden_size", "Hidden size", [128, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384]],
    ["num_heads", "Heads", [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128]],
    ["num_kv_heads", "Key/value heads", [1, 2, 4, 8, 16, 32, 64, 128]],
    ["head_dim", "Head size", [16, 32, 64, 80, 96, 128, 192, 256]],
    ["ffn_hidden_size", "Feed-forward size", [384, 1024, 2048, 4096, 8192, 11008, 14336, 18432, 28672, 53248]],
    ["vocab_size", "Vocabulary", [1024, 32000, 49152, 100352, 128256, 131072, 151936, 256000]],
  ];
  /** @type {Field[]} */
  const EXPERTS = [
    ["num_experts", "Experts", POWERS(512)],
    ["experts_per_token", "Experts a token visits", [1, 2, 4, 6, 8, 16]],
    ["expert_hidden_size", "Expert feed-forward size", [96, 384, 768, 1024, 1536, 2048, 4096, 8192, 14336]],
    ["num_shared_experts", "Shared experts", [0, 1, 2, 4]],
    ["num_dense_layers", "Dense layers first", [0, 1, 2, 3, 4, 8]],
  ];
  /** Fields without a control, with the defaults of `MoESpec`. */
  const ROUTED = { gate: "softmax", normalize_weights: true, weight_scale: 1, balance: "none", balance_coefficient: 0 };
  const NEW_EXPERTS = {
    num_experts: 8, experts_per_token: 2, expert_hidden_size: 4096, num_shared_experts: 0, num_dense_layers: 0,
  };
  /** @type {Field[]} */
  const LAYOUT = [
    ["dp_replicate", "dp_replicate: replicas", POWERS(512)],
    ["dp_shard", "dp_shard: ranks that ZeRO shards over", POWERS(512)],
    ["tp", "tp: tensor parallel", POWERS(32)],
    ["cp", "cp: context parallel", POWERS(32)],
    ["pp", "pp: pipeline stages", POWERS(64)],
    ["ep", "ep: expert parallel, borrows dp and cp ranks", POWERS(64)],
  ];
  /** @type {Field[]} */
  const BATCH = [
    ["micro_batch_size", "Micro-batch, sequences", POWERS(64)],
    ["num_microbatches", "Micro-batches a step", POWERS(256)],
    ["seq_len", "Sequence length, tokens", POWERS(2 ** 20).slice(8)],
  ];
  const DEFAULTS = {
    model: "llama8b", dp_replicate: 1, dp_shard: 4, tp: 1, cp: 1, pp: 1, ep: 1, micro_batch_size: 2,
    num_microbatches: 4, seq_len: 4096, zero_stage: 2, recompute: "none", recompute_every: 1, pp_schedule: "1f1b", virtual_stages: 2,
    pp_split: "balanced", cp_kind: "ring", precision: "bf16", attention: "auto", compile: "none",
    sequence_parallel: true, etp: 1, routing: "balanced", routing_imbalance: 1, capacity_factor: "",
  };
  const WORDS = {
    zero_stage: {
      0: "0: nothing sharded", 1: "1: optimizer state", 2: "2: and gradients", 3: "3: and parameters",
    },
    recompute: { none: "none", selective: "selective: norm+rope+swiglu", full: "full: every block again" },
    routing: { balanced: "balanced: forced", skewed: "skewed: forced", learned: "learned: the router's choice" },
    pp_split: { balanced: "balanced: the head counts", even: "even", ends_count: "even, embedding and head count as layers" },
  };
  /** @type {Field} */
  const EVERY = ["recompute_every", "Recompute one layer in", [1, 2, 3, 4, 6, 8, 16]];
  /** @type {Field} */
  const CHUNKS = ["virtual_stages", "Model chunks a rank", [2, 3, 4, 5, 6, 8]];
  /** @type {Field} */
  const EXPERT_TP = ["etp", "etp: tensor parallel inside experts, 1 or tp", POWERS(32)];
  const V_SHAPED = ClosedForms.V_SHAPED;

  /** @param {Field} field */
  const numberField = ([name, label, steps]) => `
    <div class="w-field">
      <label for="runs-m-${name}">${label}</label>
      <input type="range" id="runs-m-${name}-slider" data-of="${name}" min="0" max="${steps.length - 1}" step="1"
        aria-label="${label}, slider">
      <input type="number" id="runs-m-${name}" name="${name}" min="0" step="1" inputmode="numeric" required>
    </div>`;
  const choiceField = (name, label, options) => `
    <div class="w-field w-choice">
      <label for="runs-m-${name}">${label}</label>
      <select id="runs-m-${name}" name="${name}">
        ${options.map((o) => `<option value="${o}">${WORDS[name]?.[o] ?? o}</option>`).join("")}
      </select>
    </div>`;
  /** Input for a number with a fraction, without a slider. */
  const decimalField = (name, label, least) => `
    <div class="w-field w-choice">
      <label for="runs-m-${name}">${label}</label>
      <input type="number" id="runs-m-${name}" name="${name}" min="${least}" step="any" inputmode="decimal">
    </div>`;
  const checkField = (name, label) =>
    `<label class="w-check"><input type="checkbox" id="runs-m-${name}" name="${name}"> ${label}</label>`;
  const group = (title, fields) => `<fieldset><legend>${title}</legend>${fields}</fieldset>`;

  /** HTML of the whole form; model names are added later as text, because users may choose them. */
  function html(choices) {
    const schedules = choices.pp_schedule.filter((name) => name !== "none");
    return [
      group("Model", `
        ${choiceField("model", "Shape", [])}
        <p class="quiet" id="runs-m-parameters"></p>
        <details><summary>Change its shape</summary>
          ${SHAPE.map(numberField).join("")}
          ${checkField("tie_embeddings", "Input and output embedding are one matrix")}
          ${checkField("qk_norm", "Norms on queries and keys")}
          ${checkField("moe", "Routed experts")}
          <div id="runs-m-experts">${EXPERTS.map(numberField).join("")}</div>
          <p class="quiet" id="runs-m-latent">Latent attention with this shape's ranks stays.</p>
        </details>`),
      group("Layout", LAYOUT.map(numberField).join("")),
      group("Batch", BATCH.map(numberField).join("")),
      group("Routing", `
        ${numberField(EXPERT_TP)}
        ${choiceField("routing", "Tokens choose experts", choices.routing)}
        ${decimalField("routing_imbalance", "Fullest expert over the mean", 1)}
        ${decimalField("capacity_factor", "Most copies of an expert over the mean; empty: all", 0)}`).replace("<fieldset", '<fieldset id="runs-m-routing-group"'),
      group("Memory for time", `
        ${choiceField("zero_stage", "ZeRO stage", [0, 1, 2, 3])}
        ${choiceField("recompute", "Recompute", choices.recompute)}
        ${numberField(EVERY)}
        ${choiceField("pp_schedule", "Pipeline schedule", schedules)}
        ${numberField(CHUNKS)}
        ${choiceField("pp_split", "Layers on the pipeline's ranks", choices.pp_split)}
        ${choiceField("cp_kind", "Context parallelism", choices.cp_kind)}
        ${choiceField("precision", "Precision", choices.precision)}
        ${choiceField("attention", "Attention", choices.attention)}
        ${choiceField("compile", "Compiled", choices.compile)}
        ${checkField("sequence_parallel", "Sequence parallelism beside tp")}`),
    ].join("");
  }

  /**
   * Build the form in `form`. Every edit calls `changed(experiment, complaint)`, also an invalid one. The complaint is
   * null, or a sentence about a number that no field of an experiment accepts, which the rules do not cover. The inputs
   * begin with the experiment `start`, if there is one.
   */
  function build(form, widget, changed, start = null) {
    form.innerHTML = html(widget.choices);
    const field = (name) => form.elements[name];
    const sliders = Object.fromEntries(
      [...SHAPE, ...EXPERTS, ...LAYOUT, ...BATCH, EVERY, CHUNKS, EXPERT_TP].map(
        ([name, , steps]) => [name, { element: form.querySelector(`[data-of=${name}]`), steps }]));
    let model = null; // the shape as given, including edits
    const kept = { pp_stages: null, pad_vocab_to: null, cuda_graph: "auto", gradient_accumulation_fusion: null, documents: null, document_balance: "none", activation_offload: "none", recurrence: "torch", ...UPDATE_FIELDS }; // of the experiment at the start: they have no controls
    /** Whether products add gradients to their sums unless asked not to, as `fuses_by_default` of the engine says. */
    const fuses = (e) => e.zero_stage <= 1 && e.compile === "none";
    const ofStages = new Set(["model", "num_layers", "pp", "pp_schedule", "virtual_stages", "pp_split"]);
    for (const known of widget.models) field("model").add(new Option(known.name, known.name));

    /** Move the slider of `name` to its number, or to the nearest step. */
    function follow(name) {
      const { element, steps } = sliders[name], value = Number(field(name).value);
      const distances = steps.map((step) => Math.abs(step - value));
      element.value = distances.indexOf(Math.min(...distances));
      element.setAttribute("aria-valuetext", field(name).value);
    }
    function put(name, value) {
      const choice = field(name);
      choice.value = value;
      if (choice.options && choice.value !== String(value)) { // words of stages, which are not in the list
        choice.add(new Option(value, value));
        choice.value = value;
      }
      if (sliders[name]) follow(name);
    }

    function showShape() {
      for (const [name] of SHAPE) put(name, model[name]);
      field("tie_embeddings").checked = model.tie_embeddings;
      field("qk_norm").checked = model.qk_norm;
      field("moe").checked = model.moe !== null;
      for (const [name] of EXPERTS) put(name, (model.moe ?? NEW_EXPERTS)[name]);
    }
    function pick(name) {
      const own = [...field("model").options].find((option) => option.value === "custom");
      if (own) own.remove();
      field("model").value = name;
      model = structuredClone(widget.models.find((known) => known.name === name));
      showShape();
    }
    function readShape() {
      const counts = Object.fromEntries(EXPERTS.map(([name]) => [name, whole(name)]));
      const moe = field("moe").checked ? { ...ROUTED, ...model.moe, ...counts } : null;
      const sizes = Object.fromEntries(SHAPE.map(([name]) => [name, whole(name)]));
      const flags = { tie_embeddings: field("tie_embeddings").checked, qk_norm: field("qk_norm").checked };
      if (model.name !== "custom") {
        field("model").add(new Option(`custom, from ${model.name}`, "custom"));
        field("model").value = "custom";
      }
      model = { ...model, ...sizes, ...flags, moe, name: "custom" };
    }
    const whole = (name) => (field(name).value === "" ? NaN : Number(field(name).value));

    /**
     * The experiment that the controls describe. Fields without effect get their canonical value, as in
     * Experiment.canonical.
     */
    function experiment() {
      const e = { model, ...widget.engine, seed: 42 };
      for (const [name] of LAYOUT) e[name] = whole(name);
      for (const name of ["micro_batch_size", "seq_len", "zero_stage"]) e[name] = whole(name);
      for (const name of ["recompute", "precision", "attention", "compile"]) e[name] = field(name).value;
      e.recompute_every = e.recompute === "none" ? 1 : whole("recompute_every");
      e.global_batch_size = e.dp_replicate * e.dp_shard * e.micro_batch_size * whole("num_microbatches");
      e.pp_schedule = e.pp === 1 ? "none" : field("pp_schedule").value;
      const interleaved = e.pp_schedule.startsWith("interleaved");
      e.virtual_stages = interleaved ? whole("virtual_stages") : V_SHAPED.includes(e.pp_schedule) ? 2 : 1;
      e.pp_split = e.pp === 1 ? "balanced" : field("pp_split").value;
      Object.assign(e, kept, e.pp === 1 ? { pp_stages: null } : {});
      e.gradient_accumulation_fusion = kept.gradient_accumulation_fusion ?? fuses(e);
      e.cp_kind = e.cp === 1 ? "ring" : field("cp_kind").value;
      const experts = model.moe !== null;
      e.etp = experts ? whole("etp") : 1;
      e.routing = experts ? field("routing").value : "balanced";
      e.routing_imbalance = e.routing === "balanced" ? 1 : whole("routing_imbalance");
      e.capacity_factor = e.routing !== "learned" || field("capacity_factor").value === "" ? null : whole("capacity_factor");
      e.sequence_parallel = e.tp === 1 || field("sequence_parallel").checked;
      return e;
    }

    function complaint(e) {
      const asked = [BATCH[1], ...(model.moe === null ? [] : EXPERTS)];
      const wrong = asked.find(([name, , steps]) => !Number.isSafeInteger(whole(name)) || whole(name) < steps[0]);
      if (wrong) return `${wrong[1]}: must be a whole number of at least ${wrong[2][0]}`;
      if (!Number.isSafeInteger(e.etp) || e.etp < 1) return `${EXPERT_TP[1]}: must be a whole number of at least 1`;
      if (!(e.routing_imbalance >= 1)) return "Fullest expert over the mean: must be a number of at least 1";
      return e.capacity_factor === null || e.capacity_factor > 0 ? null : "Most copies of an expert over the mean: must be a number above 0, or empty";
    }

    /** Disable controls without effect. */
    function enable(e) {
      const off = {
        pp_schedule: e.pp === 1,
        recompute_every: e.recompute === "none",
        virtual_stages: !e.pp_schedule.startsWith("interleaved"),
        pp_split: e.pp === 1,
        cp_kind: e.cp === 1,
        sequence_parallel: e.tp === 1,
        ep: model.moe === null && e.ep === 1,
        routing_imbalance: e.routing === "balanced",
        capacity_factor: e.routing !== "learned",
      };
      for (const [name, disabled] of Object.entries(off)) {
        field(name).disabled = disabled;
        if (sliders[name]) sliders[name].element.disabled = disabled;
      }
      form.querySelector("#runs-m-experts").hidden = model.moe === null;
      form.querySelector("#runs-m-routing-group").hidden = model.moe === null;
      form.querySelector("#runs-m-latent").hidden = model.mla === null;
    }
    function tell() {
      const e = experiment();
      enable(e);
      changed(e, complaint(e));
    }

    function begin(e) {
      const known = widget.models.find((shape) => JSON.stringify({ ...shape, name: "" }) === JSON.stringify({ ...e.model, name: "" }));
      if (known) pick(known.name);
      else {
        model = structuredClone(e.model);
        showShape();
        readShape();
      }
      for (const name of [...LAYOUT.map(([layout]) => layout), "micro_batch_size", "seq_len", "zero_stage", "recompute", "recompute_every", "precision", "attention", "compile"]) put(name, e[name]);
      put("num_microbatches", e.global_batch_size / (e.dp_replicate * e.dp_shard * e.micro_batch_size));
      if (e.pp > 1) for (const name of ["pp_schedule", "pp_split"]) put(name, e[name]);
      if (e.virtual_stages > 1) put("virtual_stages", e.virtual_stages);
      if (e.cp > 1) put("cp_kind", e.cp_kind);
      for (const name of Object.keys(kept)) kept[name] = e[name] ?? null;
      if (e.gradient_accumulation_fusion === fuses(e)) kept.gradient_accumulation_fusion = null;
      for (const name of ["etp", "routing", "routing_imbalance"]) put(name, e[name]);
      put("capacity_factor", e.capacity_factor ?? "");
      field("sequence_parallel").checked = e.sequence_parallel;
    }

    const ofShape = new Set([...SHAPE, ...EXPERTS].map(([name]) => name).concat("tie_embeddings", "qk_norm", "moe"));
    form.addEventListener("input", (event) => {
      const of = event.target.dataset.of, name = of ?? event.target.name;
      if (of) field(of).value = sliders[of].steps[Number(event.target.value)];
      if (sliders[name]) follow(name);
      if (ofStages.has(name)) kept.pp_stages = null;
      if (name === "model") pick(event.target.value);
      else if (ofShape.has(name)) readShape();
      tell();
    });
    form.addEventListener("submit", (event) => event.preventDefault());

    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (typeof value === "boolean") field(name).checked = value;
      else if (name !== "model") put(name, value);
    }
    pick(widget.models.some((known) => known.name === DEFAULTS.model) ? DEFAULTS.model : widget.models[0].name);
    if (start) begin(start);
    tell();
  }

  return { build };
})();
