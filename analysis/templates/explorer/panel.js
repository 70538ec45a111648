"use strict";

/* All that is known of one row. What the row does not say is left out or said to be missing, never filled in. */
const Panel = (() => {
  const CONFIGURATION = [
    "model", "num_params", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size", "world_size",
    "dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero_stage", "micro_batch_size", "num_microbatches", "global_batch_size",
    "seq_len", "recompute", "recompute_every", "pp_schedule", "virtual_stages", "pp_split", "cp_kind", "sequence_parallel", "precision", "attention", "compile", "seed",
  ];
  const RESULT = ["tokens_per_s_per_gpu", "mfu_palm", "mfu_causal", "hfu", "published_mfu", "step_time_s", "step_time_min_s", "step_time_max_s", "timed_steps", "power_w", "temperature_c", "throttle_reasons"];
  const MEASURED_TIME = [["forward_backward_s", "forward and backward"], ["reduce_exposed_s", "waiting for gradients"], ["pipeline_idle_s", "pipeline idle"], ["optimizer_s", "optimizer"]];
  const REHEARSED_TIME = [["compute_time_s", "compute, slowest stage"], ["communication_time_s", "communication, modelled"]];
  const WALL_TIME = [["spawn_s", "spawn"], ["rendezvous_s", "rendezvous"], ["build_s", "build"], ["warmup_s", "warm-up"], ["timed_s", "timed steps"], ["teardown_s", "teardown"]];
  const MEMORY = [["memory_parameters_bytes", "parameters"], ["memory_gradients_bytes", "gradients"], ["memory_optimizer_bytes", "optimizer"], ["memory_activations_bytes", "activations and rest"]];
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];

  class View {
    /** `on` has open(row), close(). */
    constructor(root, data, columns, on) {
      Object.assign(this, { root, data, columns, on });
    }

    show(row) {
      const { columns } = this;
      const raw = (name) => columns.get(name)?.value(row) ?? null;
      this.raw = raw;
      this.text = (name) => columns.get(name)?.text(row) ?? Columns.UNKNOWN;
      this.row = row;
      const outcome = raw("outcome");
      const verdict = raw("verdict");
      const planned = verdict !== null; // a point of a plan: nothing of it has run
      const [word, kind] = planned ? [verdict.replaceAll("_", " "), verdict === "run" || verdict === "cached" ? "good" : "bad"] : [this.data.outcomes[outcome] ?? outcome, outcome === "ok" ? "good" : "bad"];
      this.root.replaceChildren(
        element("header", {},
          element("div", {},
            element("h2", { id: "panel-title" }, `${this.text("workload")}, ${this.text("layout")}`),
            element("p", { class: "quiet" }, raw("cohort")),
            element("p", {}, element("span", { class: `badge ${kind}` }, word))),
          element("button", { type: "button", class: "plain close", "aria-label": "Close", onclick: () => this.on.close() }, "✕")),
        ...[planned ? this.verdict() : this.outcome(outcome), this.result(), this.time(), this.memory(), this.predicted(), this.configuration(), this.command(), this.others(), this.everything()].filter(Boolean),
      );
      this.root.hidden = false;
      this.root.scrollTop = 0;
    }

    section(name, title, ...parts) {
      return element("section", { "data-part": name }, element("h3", {}, title), ...parts);
    }

    /** Name and value of the columns that the row has. */
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
      const step = this.raw("step_time_s");
      const parts = [];
      if (step !== null) {
        const chosen = [MEASURED_TIME, REHEARSED_TIME].find((names) => names.some(([name]) => this.raw(name) !== null));
        if (!chosen) parts.push(element("p", { class: "quiet" }, `One step took ${this.text("step_time_s")} s. How it divides was not recorded.`));
        else {
          const known = chosen.filter(([name]) => this.raw(name) !== null).map(([name, label]) => [label, this.raw(name)]);
          const rest = step - known.reduce((sum, [, value]) => sum + value, 0);
          // Means over ranks need not add up to the slowest rank's step; what is left is said, not shared out.
          if (rest > 0.001 * step) known.push(["not in any of these", rest]);
          parts.push(this.bars(known, writeSeconds, step, "of the step"));
        }
      }
      const wall = WALL_TIME.filter(([name]) => this.raw(name) !== null).map(([name, label]) => [label, this.raw(name)]);
      if (wall.length) parts.push(element("h4", {}, "Wall time of the attempt"), this.bars(wall, writeSeconds, wall.reduce((sum, [, value]) => sum + value, 0), "of the attempt"));
      return parts.length ? this.section("time", "Time of a step", ...parts) : null;
    }

    memory() {
      const [allocated, reserved] = [this.raw("peak_allocated_bytes"), this.raw("peak_reserved_bytes")];
      if (allocated === null && reserved === null) return null;
      const known = MEMORY.filter(([name]) => this.raw(name) !== null).map(([name, label]) => [label, this.raw(name)]);
      const room = this.raw("device_memory_bytes");
      const total = known.reduce((sum, [, value]) => sum + value, 0);
      const parts = [this.list(["peak_allocated_bytes", "peak_reserved_bytes", "device_memory_bytes", "allocator_retries"])];
      if (known.length) {
        if (room !== null && room > total) known.push(["left on the device", room - total, "var(--soft)"]);
        parts.push(this.bars(known, writeBytes, room ?? total, room === null ? "of the peak" : "of the device"));
      } else parts.push(element("p", { class: "quiet" }, "What the peak is made of was not recorded."));
      return this.section("memory", "Memory", ...parts);
    }

    /** One stacked bar and its legend. Entries are [label, value, colour?]; shares are of `total`. */
    bars(entries, write, total, of) {
      const sum = entries.reduce((all, [, value]) => all + Math.max(0, value), 0) || 1;
      const colours = entries.map(([, , colour], index) => colour ?? COLOURS[index % COLOURS.length]);
      const bar = element("div", { class: "bar", "aria-hidden": "true" }, ...entries.map(([, value], index) => element("span", { style: `width:${(100 * Math.max(0, value)) / sum}%;background:${colours[index]}` })));
      const rows = entries.map(([label, value], index) =>
        element("li", {}, element("span", { class: "patch", style: `background:${colours[index]}`, "aria-hidden": "true" }), element("span", { class: "what" }, label), element("span", { class: "amount" }, write(value)), element("span", { class: "share quiet", title: of }, total > 0 ? `${((100 * value) / total).toFixed(1)} %` : "")),
      );
      return element("div", { class: "bars" }, bar, element("ul", {}, ...rows));
    }

    predicted() {
      const found = this.raw("peak_allocated_bytes") === null ? "peak_reserved_bytes" : "peak_allocated_bytes";
      const rows = [["peak memory", "predicted_peak_bytes", found], ["step time", "predicted_step_time_s", "step_time_s"]].filter(([, planned]) => this.raw(planned) !== null);
      if (!rows.length) return null;
      const cell = (name) => (this.raw(name) === null ? Columns.UNKNOWN : `${this.text(name)} ${this.columns.get(name).unit}`);
      const change = (planned, name) => (this.raw(name) ? `${((this.raw(planned) / this.raw(name) - 1) * 100).toFixed(1)} %` : Columns.UNKNOWN);
      const head = ["", "predicted", "found", "off by"].map((text) => element("th", { scope: "col" }, text));
      const body = rows.map(([label, planned, name]) => element("tr", {}, element("th", { scope: "row" }, label), ...[cell(planned), cell(name), change(planned, name)].map((text) => element("td", {}, text))));
      return this.section("predicted", "Predicted and found", element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
    }

    /** What the plan says of a point before it runs, and what it would cost. */
    verdict() {
      const list = this.list(["verdict", "rule", "detail", "predicted_tokens_per_s_per_gpu", "limit_bytes", "expected_gpu_hours", "worst_gpu_hours", "cached_attempt", "cached_sweep"]);
      return this.section("verdict", "What the plan says", list, element("p", { class: "quiet" }, "Nothing of this point has run: all numbers are predictions."));
    }

    outcome(outcome) {
      const log = this.data.logs[this.row];
      const evidence = this.raw("evidence");
      if (outcome === "ok" && evidence === null) return null;
      const parts = [this.list(["phase", "phase_step", "failed_rank", "will_retry", "teardown_hung", "repeat_of"])];
      if (evidence !== null) parts.push(element("h4", {}, "Evidence"), element("pre", { tabindex: "0" }, evidence));
      if (log) parts.push(element("h4", {}, `End of ${log.name}`), element("pre", { tabindex: "0", class: "log" }, log.text));
      else if (outcome !== "ok") parts.push(element("p", { class: "quiet" }, "No log of it lies beside the results (or the page had no room for more)."));
      return this.section("outcome", "What happened", ...parts);
    }

    command() {
      const made = Rerun.command(this.raw, this.data.engine);
      if (made.missing) return this.section("command", "Run it again", element("p", { class: "quiet" }, made.missing));
      const line = Rerun.line(made.words);
      const code = element("pre", { tabindex: "0", class: "command" }, line);
      const copy = element("button", { type: "button", class: "plain", onclick: () => copyText(line, code, copy) }, "Copy");
      const sweep = this.raw("command");
      return this.section("command", "Run it again", code, copy, ...made.notes.map((note) => element("p", { class: "warning" }, note)),
        ...(sweep === null ? [] : [element("details", {}, element("summary", {}, "The sweep that it was part of"), element("pre", { tabindex: "0" }, sweep))]));
    }

    /** The other rows of the same experiment: repeats, retries, rehearsals. */
    others() {
      const ids = this.columns.get("experiment_id");
      const own = ids.value(this.row);
      const same = [];
      for (let row = 0; row < this.data.rows && same.length < 20; row++) if (row !== this.row && ids.value(row) === own) same.push(row);
      if (!same.length) return null;
      const name = (row) => [this.columns.get("sweep")?.text(row), this.columns.get("method")?.text(row), this.columns.get("outcome")?.text(row), this.columns.get("tokens_per_s_per_gpu")?.value(row) != null ? `${this.columns.get("tokens_per_s_per_gpu").text(row)} tokens/s/GPU` : ""].filter(Boolean).join(", ");
      return this.section("others", "Other rows of this experiment", element("ul", { class: "plainlist" }, ...same.map((row) => element("li", {}, element("button", { type: "button", class: "link", onclick: () => this.on.open(row) }, name(row))))));
    }

    everything() {
      const known = [...this.columns.values()].filter((column) => column.value(this.row) !== null);
      const rows = known.map((column) => element("tr", {}, element("th", { scope: "row", title: column.description }, column.name), element("td", {}, column.kind === "time" ? column.text(this.row) : String(column.value(this.row))), element("td", { class: "quiet" }, column.kind === "time" ? "UTC" : column.rawUnit)));
      return element("details", { "data-part": "everything" }, element("summary", {}, `All ${known.length} columns`), element("div", { class: "scroll", tabindex: "0" }, element("table", {}, element("tbody", {}, ...rows))));
    }
  }

  const inUnit = (value, units) => {
    const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1);
    return `${Columns.writeNumber(value / size)} ${unit}`;
  };
  const writeSeconds = (value) => inUnit(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
  const writeBytes = (value) => inUnit(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);

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
