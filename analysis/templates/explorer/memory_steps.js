/* Peak memory of each step of a run, as the allocator told it, beside the device's and the planner's. */
"use strict";
const MemorySteps = (() => {
  const SVG = "http://www.w3.org/2000/svg", HEIGHT = 150, WIDTH = 640, LEFT = 52, BASE = 126, MOST = 60;
  const gib = (mib) => `${(mib / 1024).toFixed(1)} GiB`;

  function draw(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  /**
   * The figure; null for a row whose steps were not kept.
   * @param {RowSeries|undefined} series
   * @param {Read} read The row's value of a column.
   */
  function of(series, read) {
    const allocated = (series?.allocated ?? []).slice(0, MOST), reserved = (series?.reserved ?? []).slice(0, MOST);
    if (!allocated.length) return null;
    /** @type {(name: string) => number|null} */
    const mib = (name) => (read(name) === null ? null : Number(read(name)) / 2 ** 20);
    const device = mib("device_memory_bytes"), predicted = mib("predicted_peak_bytes");
    const most = Math.max(...allocated, ...reserved, device ?? 0, predicted ?? 0);
    const y = (value) => BASE - (value / most) * (BASE - 12), slot = (WIDTH - LEFT) / allocated.length;
    const parts = [draw("line", { x1: LEFT, x2: WIDTH, y1: BASE, y2: BASE, class: "g-tick" })];
    const every = Math.ceil(allocated.length / 15);
    allocated.forEach((value, step) => {
      const place = { x: LEFT + step * slot + slot * 0.14, width: slot * 0.72 };
      if (reserved[step]) parts.push(draw("rect", { ...place, y: y(reserved[step]), height: BASE - y(reserved[step]), class: "m-reserved" }));
      parts.push(draw("rect", { ...place, y: y(value), height: BASE - y(value), class: "m-allocated" }));
      if (step % every === 0) parts.push(draw("text", { x: LEFT + (step + 0.5) * slot, y: BASE + 14, class: "g-label", "text-anchor": "middle" }, String(step)));
    });
    for (const [value, kind] of [[device, "device"], [predicted, "predicted"]]) {
      if (value === null) continue;
      parts.push(draw("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: `m-${kind}` }));
    }
    for (const share of [0, 0.5, 1]) parts.push(draw("text", { x: LEFT - 6, y: y(share * most), class: "g-label", "text-anchor": "end" }, `${((share * most) / 1024).toFixed(0)} GiB`));
    const chart = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "m-steps", role: "img", "aria-label": "Peak memory of each step" });
    chart.append(...parts);
    const highest = Math.max(...allocated), at = allocated.indexOf(highest);
    const steps = allocated.length === 1 ? "1 step" : `${allocated.length} steps`;
    const lines = [predicted === null ? "" : `dashed: the planner's peak, ${gib(predicted)}`, device === null ? "" : `line: the device's, ${gib(device)}`].filter(Boolean);
    return element("div", { "data-part": "steps" },
      element("h4", {}, "Peak of each step, of the rank that holds most"), chart,
      element("p", { class: "quiet" }, `Over ${steps}, warm-up included, allocated memory went from ${gib(allocated[0])} in the first to at most ${gib(highest)} in step ${at}${reserved.length ? `; reserved (pale) to ${gib(Math.max(...reserved))}` : ""}.${lines.length ? ` ${lines.join("; ")[0].toUpperCase()}${lines.join("; ").slice(1)}.` : ""}`));
  }

  return { of };
})();
