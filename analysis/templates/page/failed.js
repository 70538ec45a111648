"use strict";

/* Outcomes of every model and size. A click shows the rows of an outcome among all runs. */
const Failed = (() => {
  const by = (id) => document.getElementById(id);

  /**
   * @param {PageState} state
   * @param {Act} act
   */
  function show(state, act) {
    const { part } = state;
    by("failed").hidden = part.isPlan;
    if (part.isPlan) return;
    const rows = part.workloads.filter((workload) => state.minor || !part.minor.has(workload));
    const grid = by("outcomes");
    grid.style.gridTemplateColumns = `minmax(40px, max-content) repeat(${part.sizes.length}, minmax(0, 1fr))`;
    grid.replaceChildren(element("div", {}), ...part.sizes.map((size) => element("div", { class: "oc v" }, String(size))));
    for (const workload of rows) {
      grid.append(element("div", { class: "rl" }, workload));
      for (const size of part.sizes) grid.append(cellOf(part, part.at(workload, size), act));
    }
  }

  /**
   * @param {Part} part
   * @param {Cell|undefined} cell
   * @param {Act} act
   */
  function cellOf(part, cell, act) {
    if (!cell || !(cell.points.length + cell.waiting)) return element("div", { class: "oc v" }, "·");
    const outcome = (row) => part.value("outcome", row);
    const [ok, oom] = ["ok", "oom"].map((name) => cell.points.filter((row) => outcome(row) === name).length);
    const other = cell.points.length - ok - oom, all = cell.points.length + cell.waiting;
    /** @type {[number, string][]} */
    const shares = [[ok, "--ok"], [oom, "--oom"], [other, "--unk"], [cell.waiting, "--rule"]];
    const bar = element("span", { class: "b" }, ...shares.map(([count, colour]) => element("i", { style: `width:${(100 * count) / all}%;background:var(${colour})` })));
    const said = `${cell.workload} on ${cell.size}: ${ok} finished, ${oom} out of memory, ${other} failed otherwise${cell.waiting ? `, ${cell.waiting} not run` : ""}`;
    return element("button", { type: "button", class: "oc", "aria-label": said, title: said, onclick: () => act.failures(cell) }, bar, element("span", { class: "long" }, `${ok} · ${oom} · ${other}`), element("span", { class: "brief" }, String(ok)));
  }

  return { show };
})();
