/* Peak memory of each step of a run as the allocator reported it, with the device's and the planner's memory. */
"use strict";
const MemorySteps = (() => {
  const SVG = "http://www.w3.org/2000/svg", HEIGHT = 150, WIDTH = 640, LEFT = 52, BASE = 126, MOST = 60;
  /**
   * The highest of each group of `size` steps; null for unknown steps.
   * @type {(steps: (number|null)[], size: number) => (number|null)[]}
   */
  const highestOf = (steps, size) => Array.from({ length: Math.ceil(steps.length / size) }, (_, bar) => {
    const known = steps.slice(bar * size, (bar + 1) * size).filter((value) => value !== null);
    return known.length ? Math.max(...known) : null;
  });
  const gib = (mib) => `${(mib / 1024).toFixed(1)} GiB`;

  function draw(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  /**
   * The figure; null for a row without stored steps.
   * @param {RowSeries|undefined} series
   * @param {Read} read The row's value of a column.
   */
  function of(series, read) {
    const allocated = series?.allocated ?? [], reserved = series?.reserved ?? [];
    const known = allocated.filter((value) => value !== null);
    if (!known.length) return null;
    const size = Math.ceil(allocated.length / MOST), bars = highestOf(allocated, size), pale = highestOf(reserved, size);
    /** @type {(name: string) => number|null} */
    const mib = (name) => (read(name) === null ? null : Number(read(name)) / 2 ** 20);
    const device = mib("device_memory_bytes"), predicted = mib("predicted_peak_bytes");
    const most = Math.max(...known, ...reserved.map((value) => value ?? 0), device ?? 0, predicted ?? 0);
    const y = (value) => BASE - (value / most) * (BASE - 12), slot = (WIDTH - LEFT) / bars.length;
    const parts = [draw("line", { x1: LEFT, x2: WIDTH, y1: BASE, y2: BASE, class: "g-tick" })];
    const every = Math.ceil(bars.length / 15);
    bars.forEach((value, bar) => {
      const place = { x: LEFT + bar * slot + slot * 0.14, width: slot * 0.72 };
      if (pale[bar]) parts.push(draw("rect", { ...place, y: y(pale[bar]), height: BASE - y(pale[bar]), class: "m-reserved" }));
      if (value !== null) parts.push(draw("rect", { ...place, y: y(value), height: BASE - y(value), class: "m-allocated" }));
      if (bar % every === 0) parts.push(draw("text", { x: LEFT + (bar + 0.5) * slot, y: BASE + 14, class: "g-label", "text-anchor": "middle" }, String(bar * size)));
    });
    for (const [value, kind] of [[device, "device"], [predicted, "predicted"]]) {
      if (value === null) continue;
      parts.push(draw("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: `m-${kind}` }));
    }
    for (const share of [0, 0.5, 1]) parts.push(draw("text", { x: LEFT - 6, y: y(share * most), class: "g-label", "text-anchor": "end" }, `${((share * most) / 1024).toFixed(0)} GiB`));
    const chart = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "m-steps", role: "img", "aria-label": "Peak memory of each step" });
    chart.append(...parts);
    const highest = Math.max(...known), at = allocated.indexOf(highest);
    const steps = allocated.length === 1 ? "1 step" : `${allocated.length} steps`;
    const each = size > 1 ? `; a bar is the highest of ${size} steps` : "";
    const first = allocated[0] === null ? "" : ` went from ${gib(allocated[0])} in the first to`;
    const mostReserved = reserved.some((value) => value !== null) ? `; reserved (pale) to ${gib(Math.max(...reserved.map((value) => value ?? 0)))}` : "";
    const lines = [predicted === null ? "" : `dashed: the planner's peak, ${gib(predicted)}`, device === null ? "" : `line: the device's, ${gib(device)}`].filter(Boolean);
    return element("div", { "data-part": "steps" },
      element("h4", {}, "Peak of each step, of the rank that holds most"), chart,
      element("p", { class: "quiet" }, `Over ${steps}, warm-up included, allocated memory${first || " reached"} at most ${gib(highest)} in step ${at}${mostReserved}${each}.${lines.length ? ` ${lines.join("; ")[0].toUpperCase()}${lines.join("; ").slice(1)}.` : ""}`));
  }

  return { of };
})();
