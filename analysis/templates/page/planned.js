"use strict";

/* The answer of a plan before anything has run: layouts that should fit and their predictions. Predictions are marked
   as such, and there is no winner. */
const Planned = (() => {
  /**
   * Points of a cell that the plan would run and that fit the memory limit, by predicted throughput.
   * @param {PageState} state
   * @param {Cell} [cell]
   */
  function candidates(state, cell = state.cell) {
    const { part } = state, limit = state.query(cell).memory;
    const rows = cell.points.filter((row) => ["run", "cached"].includes(part.text("verdict", row)));
    const fits = rows.filter((row) => limit === null || (part.number("predicted_peak_bytes", row) ?? 0) <= limit);
    /** @type {(row: number) => number} */
    const rate = (row) => part.number("predicted_tokens_per_s_per_gpu", row) ?? -1;
    return fits.sort((a, b) => rate(b) - rate(a));
  }

  /**
   * @param {PageState} state
   * @param {HTMLElement} heading
   * @param {HTMLElement} box
   * @param {string} where
   */
  function show(state, heading, box, where) {
    const { part, cell } = state;
    heading.textContent = `Planned: ${where}`;
    const rows = candidates(state);
    const verdicts = new Map();
    for (const row of cell.points) verdicts.set(part.value("verdict", row), (verdicts.get(part.value("verdict", row)) ?? 0) + 1);
    const name = { invalid: "excluded by a rule", predicted_oom: "predicted not to fit", over_budget: "over the budget" };
    const left = [...verdicts].filter(([verdict]) => name[verdict]).map(([verdict, count]) => `${Words.fixed(count)} ${name[verdict]}`);
    const step = element("div", { class: "funnel" },
      element("div", {}, element("span", { class: "k" }, "Should fit"), element("br"), element("b", {}, Words.fixed(rows.length)), ` of ${Words.fixed(cell.points.length)}`, element("small", {}, left.join(", ") || "every point")));
    const words = rows.length ? "None of these points has run. The list shows the planner's predictions, which make no winner." : "No point of this plan is predicted to fit here.";
    box.replaceChildren(element("p", { class: "layout" }, rows.length ? `${Words.plural(rows.length, "layout")} to run` : "Nothing fits here"), step, element("p", { class: "callout" }, words));
  }

  /**
   * The 90 % interval of a predicted step time; a dash if the ledger has none.
   * @param {Part} part
   * @param {number} row
   */
  function between(part, row) {
    const low = part.number("predicted_step_time_low_s", row), high = part.number("predicted_step_time_high_s", row);
    return low === null || high === null ? "–" : `${Words.short(low)} to ${Words.short(high)}`;
  }

  /**
   * The first ten points by predicted throughput, as rows of the table below the answer.
   * @param {PageState} state
   */
  function table(state) {
    const { part } = state, all = candidates(state), rows = all.slice(0, 10);
    const head = ["Layout", "Predicted tokens/s/GPU", "Predicted step, s", "90 % of it, s", "Predicted GiB", "GPU-hours"];
    const cells = rows.map((row) => [
      { text: part.value("layout", row), row },
      { text: Words.short(part.number("predicted_tokens_per_s_per_gpu", row)) },
      { text: Words.short(part.number("predicted_step_time_s", row)) },
      { text: between(part, row) },
      { text: Words.gib(part.number("predicted_peak_bytes", row)) },
      { text: Words.short(part.number("expected_gpu_hours", row)) },
    ]);
    return { head, cells, narrow: [0, 1, 4], title: rows.length ? `${Words.fixed(rows.length)} of ${Words.fixed(all.length)} by predicted throughput: a prediction, not a ranking` : "" };
  }

  return { show, table, candidates };
})();
