"use strict";

/* All known values of one row. Missing values are left out or named as missing, never filled in. */
const Panel = (() => {
  const CONFIGURATION = [
    "model", "num_params", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size", "world_size",
    "dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "routing", "routing_imbalance", "capacity_factor", "zero_stage", "micro_batch_size", "num_microbatches", "global_batch_size",
    "seq_len", "recompute", "recompute_every", "activation_offload", "pp_schedule", "virtual_stages", "pp_split", "pp_stages", "pad_vocab_to", "cp_kind", "sequence_parallel", "gradient_accumulation_fusion", "precision", "attention", "recurrence", "compile", "cuda_graph", "documents", "document_balance", "attention_imbalance", ...Object.keys(UPDATE_FIELDS), "seed",
  ];
  const RESULT = ["tokens_per_s_per_gpu", "mfu_palm", "mfu_causal", "hfu", "published_mfu", "step_time_s", "step_time_min_s", "step_time_max_s", "timed_steps", "power_w", "temperature_c", "throttle_reasons"];
  const MEASURED_TIME = [["forward_backward_s", "forward and backward"], ["reduce_exposed_s", "waiting for gradients"], ["pipeline_idle_s", "pipeline idle"], ["optimizer_s", "optimizer"]];
  const REHEARSED_TIME = [["compute_time_s", "compute, slowest stage"], ["communication_time_s", "communication, modelled"]];
  const WALL_TIME = [["spawn_s", "spawn"], ["rendezvous_s", "rendezvous"], ["build_s", "build"], ["warmup_s", "warm-up"], ["timed_s", "timed steps"], ["teardown_s", "teardown"]];
  const MEMORY = [["memory_parameters_bytes", "parameters"], ["memory_gradients_bytes", "gradients"], ["memory_optimizer_bytes", "optimizer"], ["memory_activations_bytes", "activations and rest"]];
  /** Parts of a profiled step, by kind of device work. */
  const KINDS = [["breakdown_matmul_s", "matrix products"], ["breakdown_attention_s", "attention"], ["breakdown_memory_bound_s", "other kernels"], ["breakdown_comm_exposed_s", "exposed communication"], ["breakdown_bubble_s", "waiting for stages"], ["breakdown_optimizer_s", "optimizer"], ["breakdown_launch_gaps_s", "nothing to run"]];
  const ENVIRONMENT = [
    "device_name", "hosts", "nodes", "cluster", "launcher", "scheduler_job", "git_commit", "git_dirty", "ultrasweep_version", "engine", "engine_version", "measurement_version",
    "python_version", "torch_version", "cuda_version", "nccl_version", "triton_version", "driver_version", "nccl_environment", "started_at", "network_regime",
  ];

  class View {
    /** Number of the shown row. @type {number} */
    row;
    /** Value of a column in that row. @type {Read} */
    raw;
    /** Value of a column in that row as shown to people. @type {(name: string) => string} */
    text;

    /**
     * @param {HTMLElement} root
     * @param {RunsData} data
     * @param {ColumnMap} columns
     * @param {{open: (row: number) => void}} on
     */
    constructor(root, data, columns, on) {
      this.root = root;
      this.data = data;
      this.columns = columns;
      this.on = on;
    }

    /** Value of a column of numbers. @param {string} name */
    number(name) {
      return /** @type {number|null} */ (this.raw(name));
    }

    /**
     * Label and value of those given columns that the row has.
     * @param {string[][]} columns Name and label.
     * @returns {[string, number, string?][]}
     */
    known(columns) {
      return columns.filter(([name]) => this.raw(name) !== null).map(([name, label]) => [label, this.number(name)]);
    }

    show(row) {
      const { columns } = this;
      /** @type {Read} */
      const raw = (name) => columns.get(name)?.value(row) ?? null;
      this.raw = raw;
      this.text = (name) => columns.get(name)?.text(row) ?? Columns.UNKNOWN;
      this.row = row;
      const planned = raw("verdict") !== null; // a point of a plan: it has not run
      const parts = [planned ? this.verdict() : this.outcome(raw("outcome")), this.result(), this.command(), this.time(), this.memory(), this.predicted(), this.configuration(), this.environment(), this.config(), this.others(), this.everything()];
      this.root.replaceChildren(...parts.filter(Boolean));
    }

    section(name, title, ...parts) {
      return element("section", { "data-part": name }, element("h3", {}, title), ...parts);
    }

    /** Name and value of those given columns that the row has. */
    list(names) {
      const items = names.filter((name) => this.raw(name) !== null).map((name) => {
        const column = this.columns.get(name);
        return element("div", { "data-column": name }, element("dt", { title: column.description }, column.label), element("dd", {}, `${column.text(this.row)} ${column.unit}`.trim()));
      });
      return items.length ? element("dl", {}, ...items) : null;
    }

    result() {
      const list = this.list(RESULT);
      return list && this.raw("step_time_s") !== null ? this.section("result", "Result", list) : null;
    }

    configuration() {
      return this.section("configuration", "Configuration", this.list(CONFIGURATION));
    }

    time() {
      const step = this.number("step_time_s");
      const parts = [];
      if (step !== null) {
        const chosen = [MEASURED_TIME, REHEARSED_TIME].find((names) => names.some(([name]) => this.raw(name) !== null));
        if (!chosen) parts.push(element("p", { class: "quiet" }, `One step took ${this.text("step_time_s")} s. How it divides was not recorded.`));
        else {
          const known = this.known(chosen);
          const rest = step - known.reduce((sum, [, value]) => sum + value, 0);
          // Means over ranks need not add up to the slowest rank's step; the difference is shown, not distributed.
          if (rest > 0.001 * step) known.push(["not in any of these", rest]);
          parts.push(Bars.stacked(known, Bars.seconds, step, "of the step"));
        }
      }
      const wall = this.known(WALL_TIME);
      if (wall.length) parts.push(element("h4", {}, "Wall time of the attempt"), Bars.stacked(wall, Bars.seconds, wall.reduce((sum, [, value]) => sum + value, 0), "of the attempt"));
      const kinds = this.known(KINDS);
      if (kinds.length) parts.push(element("h4", {}, "One profiled step, by kind"), Bars.stacked(kinds, Bars.seconds, this.number("breakdown_step_time_s"), "of the profiled step"));
      if (this.raw("trace_file") !== null) parts.push(this.trace());
      return parts.length ? this.section("time", "Time of a step", ...parts) : null;
    }

    /** Location of the trace of the profiled step; a link if the page knows the folder. */
    trace() {
      const file = String(this.raw("trace_file"));
      const href = this.data.traces?.[this.row];
      const name = href ? element("a", { href, download: true }, file) : element("code", {}, `${this.text("sweep")}/${file}`);
      return element("p", { class: "trace" }, "Trace of that step on rank 0, for ui.perfetto.dev: ", name);
    }

    environment() {
      const list = this.list(ENVIRONMENT);
      return list && this.section("environment", "Environment and versions", list);
    }

    /** The whole experiment, as in the row's `config_json`. */
    config() {
      const made = RowExperiment.of(this.raw, this.data.widget);
      if (made.missing || !made.exact) return null;
      const code = element("pre", { tabindex: "0", class: "config", "aria-label": "config_json" }, JSON.stringify(made.config, null, 1));
      const copy = element("button", { type: "button", class: "plain", onclick: () => copyText(code.textContent, code, copy) }, "Copy");
      return element("details", { "data-part": "config" }, element("summary", {}, "Whole configuration (config_json)"), code, copy);
    }

    memory() {
      const [allocated, reserved] = [this.raw("peak_allocated_bytes"), this.raw("peak_reserved_bytes")];
      if (allocated === null && reserved === null) return null;
      const known = this.known(MEMORY);
      const room = this.number("device_memory_bytes");
      const total = known.reduce((sum, [, value]) => sum + value, 0);
      /** @type {HTMLElement[]} */
      const parts = [this.list(["peak_allocated_bytes", "peak_reserved_bytes", "device_memory_bytes", "allocator_retries"])];
      if (known.length) {
        if (room !== null && room > total) known.push(["left on the device", room - total, "var(--soft)"]);
        parts.push(Bars.stacked(known, Bars.bytes, room ?? total, room === null ? "of the peak" : "of the device"));
      } else parts.push(element("p", { class: "quiet" }, "What the peak is made of was not recorded."));
      return this.section("memory", "Memory", ...parts);
    }

    predicted() {
      const found = this.raw("peak_allocated_bytes") === null ? "peak_reserved_bytes" : "peak_allocated_bytes";
      const rows = [["peak memory", "predicted_peak_bytes", found], ["step time", "predicted_step_time_s", "step_time_s"]].filter(([, planned]) => this.raw(planned) !== null);
      if (!rows.length) return null;
      const cell = (name) => (this.raw(name) === null ? Columns.UNKNOWN : `${this.text(name)} ${this.columns.get(name).unit}`);
      const change = (planned, name) => (this.raw(name) ? `${((this.number(planned) / this.number(name) - 1) * 100).toFixed(1)} %` : Columns.UNKNOWN);
      const head = ["", "predicted", "found", "off by"].map((text) => (text ? element("th", { scope: "col" }, text) : element("td", {})));
      const body = rows.map(([label, planned, name]) => element("tr", {}, element("th", { scope: "row" }, label), ...[cell(planned), cell(name), change(planned, name)].map((text) => element("td", {}, text))));
      const interval = this.interval();
      return this.section("predicted", "Predicted and found", element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)), ...(interval === null ? [] : [element("p", { class: "quiet" }, interval)]));
    }

    /**
     * The interval predicted for the step time, and whether the measured one lies in, below or above it; null without
     * one.
     */
    interval() {
      const [low, high] = [this.number("predicted_step_time_low_s"), this.number("predicted_step_time_high_s")];
      if (low === null || high === null) return null;
      const said = `90 % interval of the predicted step time: ${this.text("predicted_step_time_low_s")} to ${this.text("predicted_step_time_high_s")}\u00a0s`;
      const found = this.number("step_time_s");
      if (found === null || this.raw("method") !== "measured") return `${said}.`;
      return `${said}; the measured one lies ${found < low ? "below" : found > high ? "above" : "inside"}.`;
    }

    /** The plan's verdict on a point before it runs, and its expected cost. */
    verdict() {
      const list = this.list(["verdict", "rule", "detail", "predicted_tokens_per_s_per_gpu", "limit_bytes", "expected_gpu_hours", "worst_gpu_hours", "cached_attempt", "cached_sweep"]);
      return this.section("verdict", "What the plan says", list, element("p", { class: "quiet" }, "Nothing of this point has run: all numbers are predictions."));
    }

    outcome(outcome) {
      const log = this.data.logs[this.row];
      const evidence = /** @type {string|null} */ (this.raw("evidence"));
      if (outcome === "ok" && evidence === null) return null;
      /** @type {HTMLElement[]} */
      const parts = [this.list(["phase", "phase_step", "failed_rank", "will_retry", "teardown_hung", "repeat_of"])];
      if (evidence !== null) parts.push(element("h4", {}, "Evidence"), element("pre", { tabindex: "0" }, evidence));
      if (log) parts.push(element("h4", {}, `End of ${log.name}`), element("pre", { tabindex: "0", class: "log" }, log.text));
      else if (outcome !== "ok") parts.push(element("p", { class: "quiet" }, "No log of it lies beside the results (or the page had no room for more)."));
      return this.section("outcome", "What happened", ...parts);
    }

    command() {
      const made = Rerun.anywhere(this.raw, this.data);
      if (made.missing) return this.section("command", "Run it again", element("p", { class: "quiet" }, made.missing));
      const line = Rerun.line(made.words);
      const code = element("pre", { tabindex: "0", class: "command" }, line);
      const copy = element("button", { type: "button", class: "plain", onclick: () => copyText(line, code, copy) }, "Copy");
      const sweep = /** @type {string|null} */ (this.raw("command"));
      return this.section("command", "Run it again", code, element("p", {}, copy), ...made.notes.map((note) => element("p", { class: "warning" }, note)),
        ...(sweep === null ? [] : [element("details", {}, element("summary", {}, "The sweep that it was part of"), element("pre", { tabindex: "0" }, sweep))]));
    }

    /** The other rows of the same experiment: repeats, retries, rehearsals. */
    others() {
      const ids = this.columns.get("experiment_id");
      const own = ids.value(this.row);
      const same = [];
      for (let row = 0; row < this.data.rows && same.length < 20; row++) if (row !== this.row && ids.value(row) === own) same.push(row);
      if (!same.length) return null;
      const name = (row) => [this.columns.get("sweep")?.text(row), this.columns.get("method")?.text(row), this.columns.get("outcome")?.text(row), this.columns.get("tokens_per_s_per_gpu")?.value(row) != null ? `${this.columns.get("tokens_per_s_per_gpu").text(row)} ${this.columns.get("tokens_per_s_per_gpu").label}` : ""].filter(Boolean).join(", ");
      return this.section("others", "Other rows of this experiment", element("ul", { class: "plainlist" }, ...same.map((row) => element("li", {}, element("button", { type: "button", class: "link", onclick: () => this.on.open(row) }, name(row))))));
    }

    everything() {
      const known = [...this.columns.values()].filter((column) => column.value(this.row) !== null);
      const rows = known.map((column) => element("tr", {}, element("th", { scope: "row", title: column.description }, column.name), element("td", {}, column.kind === "time" ? column.text(this.row) : String(column.value(this.row))), element("td", { class: "quiet" }, column.kind === "time" ? "UTC" : column.rawUnit)));
      return element("details", { "data-part": "everything" }, element("summary", {}, `All ${known.length} columns`), element("div", { class: "scroll", tabindex: "0" }, element("table", {}, element("tbody", {}, ...rows))));
    }
  }

  async function copyText(text, node, button) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(node);
      button.textContent = "Selected: copy it with Ctrl-C";
    }
  }

  return { View };
})();
