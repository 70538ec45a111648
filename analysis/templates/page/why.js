"use strict";

/* Causes: the cost of each rule, the best run at each value of each axis, the effect of one choice by itself, and where
   a step's time and the memory go. The first two follow the reader's limits; matched pairs cover the whole part
   (analysis/rows/choice_costs.py). */
const Why = (() => {
  const by = (id) => document.getElementById(id);
  const AXIS_NAMES = { micro_batch_size: "micro-batch", num_microbatches: "micro-batches", zero_stage: "ZeRO", recompute: "recompute", pp_schedule: "schedule" };
  const empty = (...words) => element("p", { class: "empty" }, ...words);

  /**
   * @param {PageState} state
   * @param {Found} found
   */
  function show(state, found) {
    const { part } = state;
    by("why").hidden = by("choices").hidden = part.isPlan;
    if (part.isPlan) return;
    rules(state, found);
    profile(part, found);
    pairs(part);
    steps(part, found);
    memory(part, found);
  }

  /**
   * @param {PageState} state
   * @param {Found} found
   */
  function rules(state, found) {
    const { part, cell } = state, costs = Answer.ruleCosts(part, found);
    const best = found.best;
    by("rules-note").textContent = best ? `Best layout of ${cell.workload} on ${cell.size} ${part.noun} that keeps the rule, against the best of all (${Words.short(best.rate)} tokens/s), in its precision.` : "";
    const paid = costs.filter(({ best: kept }) => kept.behind > 0).sort((a, b) => b.best.behind - a.best.behind);
    const free = costs.filter(({ best: kept }) => kept.behind === 0);
    const widest = Math.max(...paid.map(({ best: kept }) => kept.behind), 0.01);
    const line = ({ name, count, best: kept }) => element("div", { class: "rule" },
      element("span", {}, name), element("span", {}, element("i", { class: kept.tied ? "hb z" : "hb", style: `width:${(100 * kept.behind) / widest}%` })),
      element("span", { class: "v" }, `−${Words.percent(kept.behind)}`),
      element("span", { class: "t" }, `${part.layoutName(kept.place)} · best of ${count}${kept.tied ? " · a tie" : ""}`));
    by("rules").replaceChildren(...(costs.length ? paid.map(line) : [empty("No rule divides these layouts: too few of them finished here.")]),
      ...(free.length ? [element("p", { class: "free" }, element("b", {}, "Free: "), `${free.map(({ name }) => name).join(", ")}. The fastest layout keeps ${free.length === 1 ? "this rule" : "these rules"} already.`)] : []));
  }

  /**
   * @param {Part} part
   * @param {Found} found
   */
  function profile(part, found) {
    const table = Answer.bestAtEachValue(part, found), most = Math.max(...table.map(({ values }) => values.length), 1);
    const box = by("profile");
    if (!table.length) return box.replaceChildren(empty("No axis varies among the layouts that are left."));
    box.style.gridTemplateColumns = `max-content repeat(${most}, minmax(min-content, max-content))`;
    const cells = table.flatMap(({ axis, values }) => [
      element("div", { class: "rl" }, AXIS_NAMES[axis] ?? axis),
      ...values.map(({ value, count, best }) => element("div", { class: "c", style: `--share:${Math.round(100 * (1 - best.behind))}%`, title: `${part.layoutName(best.place)}, best of ${count}` }, element("b", {}, String(value).replaceAll("_", " ")), element("small", {}, best.behind ? `−${Words.percent(best.behind, best.behind < 0.1 ? 1 : 0)}` : "best"))),
      ...Array.from({ length: most - values.length }, () => element("div", {})),
    ]);
    return box.replaceChildren(...cells);
  }

  /**
   * The matrix of axes by values: median ratio of pairs, their range as a bar on a logarithmic axis, and their number.
   * @param {Part} part
   */
  function pairs(part) {
    const rows = part.choices ?? [], known = rows.filter((row) => row.pairs);
    if (!known.length) return by("pairs").replaceChildren(empty("No pair of runs agrees in everything but one choice. A grid that varies one axis at a time has them."));
    const reach = Math.max(Math.log(2), ...known.map((row) => Math.abs(Math.log(row.median))));
    const at = (ratio) => Math.min(100, Math.max(0, 50 + (50 * Math.log(ratio)) / reach));
    const cell = (row) => element("td", { class: "l" }, element("b", {}, row.value.replaceAll("_", " ")), row.pairs ? ` × ${Words.fixed(row.median, 2)}` : "",
      ...(row.pairs ? [element("span", { class: "axis" }, element("i", { class: `bar ${sign(row)}`, style: `left:${at(row.low)}%;width:${Math.max(0.6, at(row.high) - at(row.low))}%` }), element("i", { class: `dot ${sign(row)}`, style: `left:${at(row.median)}%` }))] : []),
      element("small", {}, row.pairs ? `${Words.fixed(row.low, 2)} – ${Words.fixed(row.high, 2)}, n = ${row.pairs}` : "no pair"));
    const line = (axis) => { const own = rows.filter((row) => row.axis === axis); return element("tr", {}, element("th", { scope: "row", class: "l" }, AXIS_NAMES[axis] ?? axis, element("small", {}, `against ${own[0].first.replaceAll("_", " ")}`)), ...own.map(cell)); };
    return by("pairs").replaceChildren(element("table", {}, element("tbody", {}, ...[...new Set(rows.map((row) => row.axis))].map(line))));
  }

  /** Whether all pairs lose, all gain, or neither. */
  const sign = ({ low, high }) => (high < 1 ? "loss" : low > 1 ? "gain" : "even");

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
