"use strict";

/* Causes: what another value of each axis costs beside the answer, under the reader's limits; the same over the whole
   part (analysis/rows/choice_costs.py); and where a step's time and the memory go. */
const Why = (() => {
  const by = (id) => document.getElementById(id);
  const AXIS_NAMES = { micro_batch_size: "micro-batch", zero_stage: "ZeRO", recompute_every: "recompute one in", activation_offload: "offloaded activations", cuda_graph: "CUDA graph", pp_schedule: "schedule", cp_kind: "cp kind", grad_reduce: "gradients reduced in", optimizer_states: "states in", master_weights: "master weights in", optimizer_offload: "offloaded states" };
  const empty = (...words) => element("p", { class: "empty" }, ...words);

  /**
   * @param {PageState} state
   * @param {Found} found
   */
  function show(state, found) {
    const { part } = state;
    by("why").hidden = by("choices").hidden = part.isPlan;
    if (part.isPlan) return;
    matrix("changes", found.best ? Answer.changes(part, found) : [], "No run differs in that alone");
    matrix("pairs", part.choices, "No pair");
    steps(part, found);
    memory(part, found);
  }

  /**
   * A matrix of axes by values: median ratio of pairs, their range as a bar on a logarithmic axis, and their number;
   * beside it the best run with the value, if the rows have one. Axes without a pair are listed below.
   * @param {string} id
   * @param {ChoiceRow[]} rows
   * @param {string} none What a value without a pair says.
   */
  function matrix(id, rows, none) {
    const known = rows.filter((row) => row.pairs), bare = rows.filter(({ axis }) => !known.some((row) => row.axis === axis));
    const reach = Math.max(Math.log(2), ...known.map((row) => Math.abs(Math.log(row.median))));
    const at = (ratio) => Math.min(100, Math.max(0, 50 + (50 * Math.log(ratio)) / reach));
    const plain = (text) => text.replaceAll("_", " "), name = (axis) => AXIS_NAMES[axis] ?? axis;
    const range = ({ pairs, low, high, tied }) => (pairs ? `${pairs > 1 ? `${Words.fixed(low, 2)} – ${Words.fixed(high, 2)}, ` : ""}n = ${pairs}${tied ? ", a tie" : ""}` : none.toLowerCase());
    const free = (row) => Words.fixed(1 - row.run.behind, 2);
    const cell = (row) => element("td", { class: "l" }, element("b", {}, plain(row.value)), row.pairs ? ` × ${Words.fixed(row.median, 2)}` : "",
      ...(row.pairs ? [element("span", { class: "axis" }, element("i", { class: `bar ${sign(row)}`, style: `left:${at(row.low)}%;width:${Math.max(0.6, at(row.high) - at(row.low))}%` }), element("i", { class: `dot ${sign(row)}`, style: `left:${at(row.median)}%` }))] : []),
      element("small", {}, range(row)), element("small", {}, row.run ? `best run with it × ${free(row)}` : ""));
    const line = (axis) => { const own = rows.filter((row) => row.axis === axis); return element("tr", {}, element("th", { scope: "row", class: "l" }, name(axis), element("small", {}, `against ${plain(own[0].first)}`)), ...own.map(cell)); };
    by(id).replaceChildren(
      element("table", {}, element("tbody", {}, ...[...new Set(known.map((row) => row.axis))].map(line))),
      bare.length || !rows.length ? element("p", { class: "note" }, rows.length ? `${none}${bare.some(({ run }) => run) ? " (in brackets the best run with it)" : ""}: ${bare.map((row) => `${name(row.axis)} ${plain(row.value)}${row.run ? ` (× ${free(row)})` : ""}`).join(", ")}.` : "No axis varies among the layouts that finished here.") : "");
  }

  /** Whether all pairs lose, all gain, or neither; a tie is neither. */
  const sign = ({ low, high, tied }) => (tied ? "even" : high < 1 ? "loss" : low > 1 ? "gain" : "even");

  const KINDS = [
    ["matmul", "breakdown_matmul_s"], ["attention", "breakdown_attention_s"], ["memory-bound", "breakdown_memory_bound_s"], ["exposed communication", "breakdown_comm_exposed_s"],
    ["bubble", "breakdown_bubble_s"], ["optimizer", "breakdown_optimizer_s"], ["launch gaps", "breakdown_launch_gaps_s"],
  ];
  const PARTS = [["parameters", "memory_parameters_bytes"], ["gradients", "memory_gradients_bytes"], ["optimizer", "memory_optimizer_bytes"], ["activations and rest", "memory_activations_bytes"]];

  /**
   * @param {Part} part
   * @param {Found} found
   */
  function steps(part, found) {
    const timed = found.list.filter(({ row }) => part.value("breakdown_step_time_s", row) !== null).slice(0, 4);
    if (!timed.length) return by("steps").replaceChildren(empty("These rows say how long a step took, not where its time went. ", element("code", {}, "measure.profile=true"), " records it on GPUs; matched pairs above say what a choice costs."));
    return by("steps").replaceChildren(...stacks(part, timed, KINDS, (row) => part.number("breakdown_step_time_s", row), (value) => `${Words.short(1e3 * value)} ms`));
  }

  /**
   * @param {Part} part
   * @param {Found} found
   */
  function memory(part, found) {
    const known = found.list.filter(({ row }) => PARTS.some(([, name]) => part.value(name, row) !== null)).slice(0, 4);
    const peak = found.best && part.memoryOf(found.best.place);
    if (!known.length) return by("memstack").replaceChildren(empty(peak ? `Only the peak was recorded: ${Words.memory(peak)} for the fastest. A row's Memory view splits it by the planner's closed form.` : "No memory was recorded here."));
    return by("memstack").replaceChildren(...stacks(part, known, PARTS, () => part.capacity, Words.memory));
  }

  /**
   * Stacked bars of up to four layouts with one legend; `whole(row)` is the value of a full bar, null: the largest sum.
   * @param {Part} part
   * @param {Layout[]} layouts
   * @param {string[][]} kinds
   * @param {(row: number) => number|null} whole
   * @param {(value: number) => string} write
   */
  function stacks(part, layouts, kinds, whole, write) {
    const sums = layouts.map(({ row }) => kinds.reduce((sum, [, name]) => sum + (part.number(name, row) ?? 0), 0));
    const full = Math.max(...layouts.map(({ row }, place) => whole(row) ?? sums[place]));
    const used = kinds.filter(([, name]) => layouts.some(({ row }) => part.value(name, row)));
    const colour = (place) => `var(--c${place + 1})`;
    const bars = layouts.map(({ row, place }, order) => element("div", { class: "stack" },
      element("div", { class: "nm" }, part.layoutName(place), element("span", {}, write(sums[order]))),
      element("div", { class: "b" }, ...used.map(([label, name], kind) => element("i", { style: `width:${(100 * (part.number(name, row) ?? 0)) / full}%;background:${colour(kind)}`, title: `${label}: ${write(part.number(name, row) ?? 0)}` })))));
    const first = layouts[0].row;
    const legend = element("div", { class: "legend" }, ...used.map(([label, name], kind) => element("span", {}, element("i", { class: "sw", style: `background:${colour(kind)}` }), `${label} ${Words.percent((part.number(name, first) ?? 0) / sums[0], 0)}`)));
    return [...bars, legend];
  }

  return { show };
})();
