"use strict";

/* The answer for one model on one number of devices under the reader's limits: a port of analysis/rows/answer.py, which
   explains each step; a test compares both in every cell. This file does not use the DOM. */
const Answer = (() => {
  const UNTIMED = 0.05;
  const ANY = /** @type {"any"} */ ("any");
  const FILTERS = ["network_regime", "engine_version", "precision"];

  /**
   * @param {Part} part
   * @param {Query} query
   */
  function find(part, query) {
    /** @type {Cell} */
    const cell = part.at(query.workload, query.size) ?? { workload: query.workload, size: query.size, points: [], layouts: [], waiting: 0 };
    const outcome = (row) => part.value("outcome", row);
    const count = (test) => cell.points.reduce((sum, row) => sum + (test(outcome(row)) ? 1 : 0), 0);
    const fit = cell.layouts.filter((place) => {
      const memory = part.memoryOf(place);
      if (query.memory !== null && memory !== null && memory > query.memory) return false;
      return Object.entries(query.only).every(([name, value]) => String(part.value(name, part.row(place))) === value);
    });
    const usual = usualBatch(part, cell.layouts);
    const wanted = query.batch ?? usual;
    const tokens = (place) => part.number("tokens_per_step", part.row(place));
    const left = wanted === ANY ? fit : fit.filter((place) => wanted !== null && tokens(place) === wanted);
    const list = toldApart(part, left);
    const faster = list.length ? Math.max(...fit.filter((place) => !left.includes(place)).map((place) => part.rate(place)), 0) : 0;
    return {
      query, cell, list, usual,
      points: cell.points.length, outOfMemory: count((end) => end === "oom"), failed: count((end) => end !== "ok" && end !== "oom"),
      finished: cell.layouts.length, fits: fit.length,
      batch: wanted === ANY ? null : wanted,
      best: list[0] ?? null,
      ties: list.filter((layout) => layout.tied),
      fasterAt: list.length && faster > list[0].rate ? faster : null,
    };
  }

  /**
   * The number of tokens per step that most layouts have, the smallest of several; null if it is unknown.
   * @param {Part} part
   * @param {number[]} places
   */
  function usualBatch(part, places) {
    /** @type {Map<number, number>} */
    const counts = new Map();
    for (const place of places) {
      const tokens = part.number("tokens_per_step", part.row(place));
      if (tokens !== null) counts.set(tokens, (counts.get(tokens) ?? 0) + 1);
    }
    const [usual] = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0])[0] ?? [null];
    return usual;
  }

  /**
   * Layouts of one cell, best first, with ties marked.
   * @param {Part} part
   * @param {number[]} places
   */
  function toldApart(part, places) {
    /** @type {Layout[]} */
    const layouts = places.map((place) => ({
      place, row: part.row(place), rate: part.rate(place),
      noise: part.ranked.noise[place], freedom: part.ranked.freedom[place], repeats: part.ranked.repeats[place],
    }));
    layouts.sort((a, b) => b.rate - a.rate || a.place - b.place);
    const within = layouts.length ? Noise.within(layouts) : [];
    layouts.forEach((layout, order) => {
      layout.behind = 1 - layout.rate / layouts[0].rate;
      layout.unknown = within[order] === null;
      layout.tied = within[order] ?? layout.behind <= UNTIMED;
    });
    return layouts;
  }

  const is = (name, value) => (part, row) => part.value(name, row) === value;
  /** @type {[string, (part: Part, row: number) => boolean][]} */
  const RULES = [
    ["data parallelism alone", (part, row) => ["tp", "cp", "pp", "ep"].every((axis) => (part.number(axis, row) ?? 1) === 1)],
    ["no tensor parallelism", is("tp", 1)],
    ["no pipeline", is("pp", 1)],
    ["no context parallelism", is("cp", 1)],
    ["ZeRO 0", is("zero_stage", 0)],
    ["ZeRO 3", is("zero_stage", 3)],
    ["micro-batch 1", is("micro_batch_size", 1)],
    ["no recomputation", is("recompute", "none")],
    ["not compiled", is("compile", "none")],
  ];

  /**
   * The answer's layouts in the precision of its best.
   * @param {Part} part
   * @param {Found} found
   */
  function likeBest(part, found) {
    const precision = (layout) => part.value("precision", layout.row);
    return found.list.filter((layout) => precision(layout) === precision(found.best));
  }

  /**
   * Costs of rules: [{name, count, best}] for rules that some but not all layouts like the best follow.
   * @param {Part} part
   * @param {Found} found
   */
  function ruleCosts(part, found) {
    const list = likeBest(part, found);
    /** @type {[string, Layout[]][]} */
    const rules = RULES.map(([name, keeps]) => [name, list.filter(({ row }) => keeps(part, row))]);
    if (part.capacity !== null && list.some(({ place }) => part.memoryOf(place) !== null)) {
      rules.push(["half the memory", list.filter(({ place }) => (part.memoryOf(place) ?? Infinity) <= part.capacity / 2)]);
    }
    return rules.filter(([, kept]) => kept.length > 0 && kept.length < list.length).map(([name, kept]) => ({ name, count: kept.length, best: kept[0] }));
  }

  const AXES = ["tp", "pp", "cp", "ep", "dp", "micro_batch_size", "num_microbatches", "zero_stage", "recompute", "pp_schedule"];

  /**
   * Best layouts by axis: [{axis, values: [{value, count, best}]}] for the axes that vary among layouts like the best.
   * @param {Part} part
   * @param {Found} found
   */
  function bestAtEachValue(part, found) {
    const table = [];
    for (const axis of AXES) {
      /** @type {Map<Value, {value: Value, count: number, best: Layout}>} */
      const groups = new Map();
      for (const layout of likeBest(part, found)) {
        const value = part.value(axis, layout.row);
        if (value === null) continue;
        const group = groups.get(value);
        if (group) group.count++;
        else groups.set(value, { value, count: 1, best: layout });
      }
      if (groups.size > 1) table.push({ axis, values: [...groups.values()].sort((a, b) => (a.value < b.value ? -1 : 1)) });
    }
    return table;
  }

  return { find, ruleCosts, bestAtEachValue, UNTIMED, ANY, FILTERS };
})();
