"use strict";

/* A stacked bar with its legend, labelled in seconds or bytes. */
const Bars = (() => {
  const COLOURS = 8;

  const inUnit = (value, units) => {
    const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1);
    return `${Columns.writeNumber(value / size)} ${unit}`;
  };
  const seconds = (value) => inUnit(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
  const bytes = (value) => inUnit(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);

  /**
   * @param {[string, number, string?][]} entries Label, value, colour.
   * @param {(value: number) => string} write
   * @param {number} total Total for the shares.
   * @param {string} of The total in words: "of the step".
   */
  function stacked(entries, write, total, of) {
    const sum = entries.reduce((all, [, value]) => all + Math.max(0, value), 0) || 1;
    const colours = entries.map(([, , colour], index) => colour ?? `var(--c${(index % COLOURS) + 1})`);
    const bar = element("div", { class: "bar", "aria-hidden": "true" }, ...entries.map(([, value], index) => element("span", { style: `width:${(100 * Math.max(0, value)) / sum}%;background:${colours[index]}` })));
    const rows = entries.map(([label, value], index) =>
      element("li", {}, element("span", { class: "patch", style: `background:${colours[index]}`, "aria-hidden": "true" }), element("span", { class: "what" }, label), element("span", { class: "amount" }, write(value)), element("span", { class: "share quiet", title: of }, total > 0 ? `${((100 * value) / total).toFixed(1)} %` : "")),
    );
    return element("div", { class: "bars" }, bar, element("ul", {}, ...rows));
  }

  return { bytes, seconds, stacked };
})();
