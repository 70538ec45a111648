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
      || less(a.values.precision, b.values.precision));
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

  /**
   * What each value of each axis costs beside the best layout: ratios of throughput of the runs that differ from it in
   * that axis, and in what makes room for it, alone, by the rules of analysis/rows/choice_costs.py. `run` is the best
   * layout with the value, other choices free.
   * @param {Part} part
   * @param {Found} found
   * @returns {ChoiceRow[]}
   */
  function changes(part, { best, cell, list, ties }) {
    const { axes, same, codes } = part.settings, settings = [...same, ...Object.keys(codes)];
    const value = (name, place) => part.value(name, part.row(place));
    const key = (name, place) => codes[name]?.[place] ?? value(name, place);
    const agrees = (names, place) => names.every((name) => key(name, place) === key(name, best.place));
    return axes.flatMap(([axis, needs, ...free]) => {
      const own = value(axis, best.place), fixed = settings.filter((name) => name !== axis && !free.includes(name));
      if (own === null || (needs && value(needs, best.place) === 1)) return [];
      const places = cell.layouts.filter((place) => !needs || value(needs, place) !== 1);
      const others = [...new Set(places.map((place) => value(axis, place)))].filter((other) => other !== null && other !== own);
      return others.sort((a, b) => (a < b ? -1 : 1)).map((other) => {
        const alone = cell.layouts.filter((place) => value(axis, place) === other && agrees(fixed, place));
        const ratios = alone.map((place) => part.rate(place) / best.rate).sort((a, b) => a - b), middle = (ratios.length - 1) / 2;
        return {
          axis, first: Words.setting(own), value: Words.setting(other), pairs: ratios.length, low: ratios[0], high: ratios[ratios.length - 1],
          median: (ratios[Math.floor(middle)] + ratios[Math.ceil(middle)]) / 2,
          tied: alone.length > 0 && alone.every((place) => ties.some((tie) => tie.place === place)),
          run: list.find(({ place }) => value(axis, place) === other && agrees(LIKE.filter((name) => name !== axis), place)),
        };
      });
    });
  }

  return { find, usualGroup, changes, UNTIMED, ANY, FILTERS, LIKE };
})();
