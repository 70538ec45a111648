"use strict";

/* The answer for one model on one number of devices under the reader's limits: a port of analysis/rows/answer.py, which
   explains each step; a test compares both in every cell. This file does not use the DOM. */
const Answer = (() => {
  const UNTIMED = 0.05;
  const ANY = /** @type {"any"} */ ("any");
  const LIKE = ["tokens_per_step", "precision"];
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
      return has(part, place, query.only);
    });
    const asked = { ...query.only, ...(query.batch === null ? {} : { tokens_per_step: String(query.batch) }) };
    const usual = usualGroup(part, cell.layouts, asked);
    const left = fit.filter((place) => usual && has(part, place, asked) && has(part, place, usual));
    const list = toldApart(part, left);
    const faster = list.length ? Math.max(...fit.filter((place) => !left.includes(place)).map((place) => part.rate(place)), 0) : 0;
    return {
      query, cell, list,
      points: cell.points.length, outOfMemory: count((end) => end === "oom"), failed: count((end) => end !== "ok" && end !== "oom"),
      finished: cell.layouts.length, fits: fit.length,
      batch: query.batch === ANY ? null : query.batch ?? (usual ? Number(usual.tokens_per_step) : null),
      best: list[0] ?? null,
      ties: list.filter((layout) => layout.tied),
      fasterAt: list.length && faster > list[0].rate ? faster : null,
    };
  }

  /**
   * Whether a layout has these values, as texts.
   * @param {Part} part
   * @param {number} place
   * @param {Record<string, string>} values
   */
  function has(part, place, values) {
    return Object.entries(values).every(([name, value]) => value === ANY || text(part, name, place) === value);
  }

  const text = (part, name, place) => String(part.value(name, part.row(place)) ?? "");

  /**
   * The values of LIKE that are not asked for and that most of the layouts asked for have; null without layouts.
   * @param {Part} part
   * @param {number[]} places
   * @param {Record<string, string>} asked
   */
  function usualGroup(part, places, asked) {
    const free = LIKE.filter((name) => !(name in asked));
    /** @type {Map<string, {count: number, values: Record<string, string>}>} */
    const groups = new Map();
    for (const place of places) {
      const values = Object.fromEntries(free.map((name) => [name, text(part, name, place)]));
      if (values.tokens_per_step === "" || !has(part, place, asked)) continue;
      const key = JSON.stringify(values);
      groups.set(key, { count: (groups.get(key)?.count ?? 0) + 1, values });
    }
    const less = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    const [first] = [...groups.values()].sort((a, b) => b.count - a.count || Number(a.values.tokens_per_step ?? 0) - Number(b.values.tokens_per_step ?? 0)
      || less(a.values.precision, b.values.precision) || less(b.values.engine_version, a.values.engine_version));
    return first?.values ?? null;
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
   * The answer's layouts that agree with its best in LIKE.
   * @param {Part} part
   * @param {Found} found
   */
  function likeBest(part, found) {
    return found.list.filter(({ place }) => LIKE.every((name) => text(part, name, place) === text(part, name, found.best.place)));
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

  return { find, usualGroup, LIKE, ruleCosts, bestAtEachValue, UNTIMED, ANY, FILTERS };
})();
