"use strict";

/* Cost of training on each number of devices, by the fastest layout there: days against GPU-hours, or against the price
   if one was given; and the energy of the devices: by their measured power, or at most by the power limit of the device's
   file where none was measured. */
const Cost = (() => {
  const by = (id) => document.getElementById(id);
  /** @typedef {{cell: Cell, best: Layout, hours: number, days: number, paid: number}} Point */
  const MJ_PER_MWH = 3.6e12; // millijoules
  const WH_PER_MWH = 1e6;

  /**
   * Energy in MWh that a layout's devices take for the tokens, by the power that was measured; null: it was not.
   * @param {PageState} state
   * @param {Layout} layout
   */
  function energy(state, { row }) {
    const each = state.part.number("energy_per_token_mj", row);
    return each === null ? null : (each * state.tokens) / MJ_PER_MWH;
  }

  /**
   * Energy in MWh as a text: by the measured power, or at most by the limit of the devices.
   * @param {PageState} state
   * @param {Point} point
   */
  function written(state, { best, hours }) {
    const measured = energy(state, best), limit = state.part.powerLimit;
    if (measured !== null) return Words.short(measured);
    return limit === null ? Words.UNKNOWN : `≤ ${Words.short((limit * hours) / WH_PER_MWH)}`;
  }

  /**
   * The layouts of the chosen cell for which none is both faster and takes less energy, fastest first; nothing if no
   * power was measured there.
   * @param {PageState} state
   * @param {Found} found
   */
  function frontier(state, found) {
    let least = Infinity;
    const kept = found.list.filter((layout) => {
      const taken = energy(state, layout);
      if (taken === null || taken >= least) return false;
      least = taken;
      return true;
    });
    if (!kept.length) return "";
    const days = (layout) => state.part.hours(layout.place, state.tokens) / state.cell.size / 24;
    const told = kept.slice(0, 5).map((layout) => `${state.part.layoutName(layout.place)} (${Words.days(days(layout))} days, ${Words.short(energy(state, layout))} MWh)`);
    return element("p", { class: "note", id: "frontier" }, `Time against energy on ${state.cell.size} GPUs, nothing is better in both: ${told.join("; ")}. Energy is of the devices alone, by the power measured in the timed steps.`);
  }
  const [WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM] = [520, 246, 64, 20, 24, 44];

  /**
   * @param {PageState} state
   * @param {(cell: Cell) => Found} found
   */
  function show(state, found) {
    const { part } = state;
    const priced = part.noun === "GPUs" && part.method !== "rehearsed_fake" && !part.isPlan;
    by("cost").hidden = !priced;
    if (!priced) return;
    const cells = part.sizes.map((size) => part.at(state.cell.workload, size)).filter((cell) => cell && found(cell).best);
    /** @type {Point[]} */
    const points = cells.map((cell) => {
      const { best } = found(cell);
      const hours = part.hours(best.place, state.tokens);
      return { cell, best, hours, days: hours / cell.size / 24, paid: state.price ? hours * state.price : hours };
    });
    const box = by("costbody");
    if (!points.length) return void box.replaceChildren(element("p", { class: "empty" }, "No run of this model finished under these limits."));
    const cheapest = points.reduce((a, b) => (b.paid < a.paid ? b : a)), soonest = points.reduce((a, b) => (b.days < a.days ? b : a));
    const write = (value) => (state.price ? Words.money(value) : `${Words.fixed(value)} GPU-hours`);
    const lead = `${state.cell.workload}, ${state.trillions} T tokens: cheapest on ${cheapest.cell.size} GPUs (${write(cheapest.paid)}, ${Words.days(cheapest.days)} days)`;
    const soon = soonest === cheapest ? ", and soonest there too." : `; soonest on ${soonest.cell.size}: ${Words.days(soonest.days)} days for ${Words.fixed(soonest.paid / cheapest.paid, 2)} times as much.`;
    const unmeasured = points.some((point) => energy(state, point.best) === null), bound = unmeasured && part.powerLimit !== null;
    const energetic = bound || points.some((point) => energy(state, point.best) !== null);
    const line = (point) => element("tr", { class: point.cell === state.cell ? "tie" : "" },
      ...[["", point.cell.size], ["l lay", part.layoutName(point.best.place)], ["", Words.days(point.days)], ["", Words.fixed(point.hours)], ...(energetic ? [["", written(state, point)]] : []), ...(state.price ? [["", Words.money(point.paid)]] : []), ["", point === cheapest ? Words.UNKNOWN : `× ${Words.fixed(point.paid / cheapest.paid, 2)}`]].map(([kind, text]) => element("td", { class: kind }, String(text))));
    const head = ["GPUs", "Layout", "Days", "GPU-hours", ...(energetic ? ["MWh"] : []), ...(state.price ? ["Cost"] : []), "Relative"];
    box.replaceChildren(element("p", { class: "lead" }, lead + soon), element("div", { class: "two" },
      points.length > 1 ? element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Chart of cost" }, chart(state, points)) : element("p", { class: "empty" }, "One number of GPUs: there is nothing to compare."),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of cost" }, element("table", {}, element("thead", {}, element("tr", {}, ...head.map((name, place) => element("th", { scope: "col", class: place === 1 ? "l" : "" }, name)))), element("tbody", {}, ...points.map(line))),
        element("p", { class: "note" }, `At the speed of the timed steps; no restart, evaluation or checkpoint is in it.${bound ? ` MWh with ≤ are at most, by the power limit of ${part.device}, ${part.powerLimit} W: no power was measured there.` : ""}${state.price ? "" : " Give a price above to see money."}`), frontier(state, found(state.cell)))));
  }

  /**
   * Round numbers up to `most`, three to six of them.
   * @param {number} most
   */
  function round(most) {
    const size = 10 ** Math.floor(Math.log10(most)), step = [2, 1, 0.5, 0.2].find((part) => most / (part * size) >= 3) * size;
    return Array.from({ length: Math.floor(most / step) }, (_, place) => (place + 1) * step);
  }

  /**
   * @param {PageState} state
   * @param {Point[]} points
   */
  function chart(state, points) {
    const days = points.map((point) => point.days), most = Math.max(...points.map((point) => point.paid)) * 1.1;
    const [low, high] = [Math.min(...days) / 1.25, Math.max(...days) * 1.25];
    const x = (value) => LEFT + ((WIDE - LEFT - RIGHT) * Math.log(value / low)) / Math.log(high / low);
    const y = (value) => HIGH - BOTTOM - ((HIGH - TOP - BOTTOM) * value) / most;
    const svg = (tag, attributes, ...children) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      node.append(...children);
      return node;
    };
    const unit = state.price ? "$" : "GPU-hours", digits = (value) => (value >= 1e6 ? `${Words.fixed(value / 1e6, 1)} M` : value >= 1e3 ? `${Words.fixed(value / 1e3, value < 1e4 ? 1 : 0)} k` : Words.fixed(value, value < 10 ? 1 : 0));
    const levels = round(most), ticks = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 100000].filter((value) => value > low && value < high);
    return svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `Days against ${unit} over the number of GPUs; the table beside it has the numbers` },
      ...levels.map((value) => svg("text", { class: "mut", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, digits(value))),
      svg("text", { class: "mut", x: 0, y: 12 }, `${unit}, of each number of GPUs`),
      ...ticks.map((value) => svg("text", { class: "mut", x: x(value), y: HIGH - 24, "text-anchor": "middle" }, Words.fixed(value))),
      svg("text", { class: "mut", x: (LEFT + WIDE) / 2, y: HIGH - 6, "text-anchor": "middle" }, "days (log)"),
      ...points.map((point) => svg("g", {}, svg("circle", { cx: x(point.days), cy: y(point.paid), r: point.cell === state.cell ? 6 : 4, fill: "var(--accent)" }), svg("text", { x: x(point.days), y: y(point.paid) - 10, "text-anchor": "middle", "font-weight": point.cell === state.cell ? 700 : 400 }, String(point.cell.size)))));
  }

  return { show };
})();
