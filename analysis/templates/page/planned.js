"use strict";

/* What has not run: the predicted winners of a plan, and the points that a half-finished sweep still has to run. Every
   number here is a prediction and is marked as such; measured rows replace points of this list one by one. */
const Planned = (() => {
  /**
   * A point of the list, from the rows of a plan or from the packed list of a half-finished sweep; `row`: the plan's.
   * @typedef {WaitingPoint & {row?: number}} Prediction
   */

  /**
   * Points of a plan's cell that the plan would run and that fit the memory limit, by predicted throughput.
   * @param {PageState} state
   * @param {Cell} [cell]
   */
  function candidates(state, cell = state.cell) {
    const { part } = state, limit = state.query(cell).memory;
    const rows = able(part, cell);
    const fits = rows.filter((row) => limit === null || (part.number("predicted_peak_bytes", row) ?? 0) <= limit);
    /** @type {(row: number) => number} */
    const rate = (row) => part.number("predicted_tokens_per_s_per_gpu", row) ?? -1;
    return fits.sort((a, b) => rate(b) - rate(a));
  }

  const able = (part, cell) => cell.points.filter((row) => ["run", "cached"].includes(part.text("verdict", row)));

  /**
   * @param {Part} part
   * @param {number} row
   * @returns {Prediction}
   */
  function prediction(part, row) {
    const value = (name) => part.number(name, row), tokens = value("tokens_per_step") / value("world_size");
    const ends = ["predicted_step_time_high_s", "predicted_step_time_low_s"].map((name) => (value(name) ? tokens / value(name) : null));
    return { row, layout: part.layoutName(null, row), rate: value("predicted_tokens_per_s_per_gpu"), low: ends[0], high: ends[1], peak: value("predicted_peak_bytes"), tight: false, hours: value("expected_gpu_hours") };
  }

  /**
   * What is predicted of a cell, the fastest first, at most ten: of a plan, points that fit; of a half-finished sweep,
   * points that it has still to run.
   * @param {PageState} state
   * @param {Cell} cell
   * @returns {Prediction[]}
   */
  function fastest(state, cell) {
    const { part } = state;
    if (part.isPlan) return candidates(state, cell).slice(0, 10).map((row) => prediction(part, row));
    return cell.next?.first.some(({ rate }) => rate !== null) ? cell.next.first : [];
  }

  /** "659 to 1,240", the 90 % interval of predicted tokens/s; a dash if there is none. @param {{low: number|null, high: number|null}} point */
  const between = ({ low, high }) => (low === null || high === null ? Words.UNKNOWN : `${Words.short(low)} to ${Words.short(high)}`);

  const NO_BASIS = "No earlier measurement of this cluster went into these predictions: they are closed forms of the cluster file alone.";
  const basis = (text) => (text ? `Predictions use ${text.replace(/^.*?\b(?=step times)/, "")}.` : NO_BASIS);

  /**
   * The answer of a plan: its predicted winner, what fits, what it would cost to measure, and the command.
   * @param {PageState} state
   * @param {HTMLElement} heading
   * @param {HTMLElement} box
   * @param {string} where
   * @param {string|null} command
   */
  function show(state, heading, box, where, command) {
    const { part, cell } = state, rows = candidates(state), able_ = able(part, cell), unit = part.noun === "GPUs" ? "GPU" : "process";
    heading.textContent = rows.length ? `Predicted fastest for ${where}` : where;
    const best = rows.length ? prediction(part, rows[0]) : null;
    const verdicts = new Map();
    for (const row of cell.points) verdicts.set(part.value("verdict", row), (verdicts.get(part.value("verdict", row)) ?? 0) + 1);
    const name = { invalid: "excluded by a rule", predicted_oom: "predicted not to fit", over_budget: "over the budget" };
    const left = [...verdicts].filter(([verdict]) => name[verdict]).map(([verdict, count]) => `${Words.fixed(count)} ${name[verdict]}`);
    const above = able_.length - rows.length;
    if (above) left.push(`${Words.fixed(above)} above the memory limit${state.memory === state.usualMemory ? ", within the plan's margin: they run, and may not fit" : ""}`);
    const steps = [Finder.step("1 Should fit", rows.length, cell.points.length, left.join(", ") || "every point")];
    if (best && best.low !== null) {
      const close = rows.filter((row) => prediction(part, row).high >= best.rate).length;
      steps.push(Finder.step("2 May be as fast", close, rows.length, "90 % interval reaches the prediction of the first"));
    }
    const run = able_.filter((row) => part.text("verdict", row) === "run"), hours = sum(run.map((row) => part.number("expected_gpu_hours", row)));
    const price = hours === null ? Words.UNKNOWN : state.price ? Words.money(hours * state.price) : `${Words.short(hours)} ${unit}-h`;
    steps.push(element("div", {}, element("span", { class: "k" }, "3 To measure"), element("br"), element("b", {}, price), element("small", {}, `expected for the ${Words.plural(run.length, "point")} to run`)));
    const funnel = element("div", { class: "funnel" }, ...steps);
    if (!best) return void box.replaceChildren(element("p", { class: "layout" }, "Nothing fits here"), funnel, Finder.callout(false, "No point of this plan is predicted to fit here."));
    const stats = [[Words.short(best.rate), `tokens/s/${unit}, predicted`], [between(best), "90 % of it"], [Words.memory(best.peak), part.capacity === null ? "predicted peak" : `predicted of ${Words.gib(part.capacity)} GiB`]];
    if (part.noun === "GPUs" && best.rate) {
      const needed = state.tokens / best.rate / 3600;
      stats.push([`${Words.days(needed / cell.size / 24)} days`, `for ${state.trillions} T tokens`], state.price ? [Words.money(needed * state.price), `${Words.fixed(needed)} GPU-hours`] : [Words.fixed(needed), "GPU-hours; no price given"]);
    }
    box.replaceChildren(
      Finder.layoutLine(part, rows[0]), Finder.definitions(stats), funnel,
      Finder.callout(false, Finder.strong("Not measured."), ` None of these points has run. ${basis(part.text("predicted_with", rows[0]))}`),
      ...(command ? [Finder.commandLine({ words: null, text: command, notes: ["It runs the whole plan, the points that tell most first; budget.gpu_hours=N stops after N device-hours."] }, "Command that runs this plan")] : []));
    return undefined;
  }

  /** @param {(number|null)[]} values */
  const sum = (values) => (values.includes(null) ? null : values.reduce((a, b) => a + b, 0));

  /**
   * The first ten predictions: of a plan, its fastest; of a half-finished sweep, the points that it has still to run.
   * @param {PageState} state
   * @returns {{points: Prediction[], title: string, basis: string, rest: string}}
   */
  function table(state) {
    const { part, cell } = state, first = fastest(state, cell);
    if (!first.length) return { points: [], title: "", basis: "", rest: "" };
    if (part.isPlan) return { points: first, title: `${Words.fixed(first.length)} of ${Words.fixed(candidates(state).length)} by predicted throughput: a prediction, not a ranking`, basis: "", rest: "" };
    const { points, hours, tight } = cell.next, unit = part.noun === "GPUs" ? "GPU" : "process";
    const price = hours === null ? "" : `; all are expected to take ${Words.short(hours)} ${unit}-hours${state.price ? `, ${Words.money(hours * state.price)}` : ""}`;
    const title = `To run next: ${first.length} of ${Words.plural(points, "point")} without a result, by predicted throughput`;
    return { points: first, title, basis: [basis(cell.next.basis), cell.next.corrected].filter(Boolean).join(" "), rest: `${tight ? `${Words.fixed(tight)} of them may not fit` : "All should fit"}${price}.` };
  }

  /**
   * The list as a table. An interval is a bar; the thin line is the fastest measured layout, if there is one.
   * @param {PageState} state
   * @param {number|null} measured
   * @param {(row: number) => void} open
   */
  function list(state, measured, open) {
    const { points, basis: used, rest } = table(state);
    const unit = state.part.noun === "GPUs" ? "GPU" : "process";
    const most = Math.max(measured ?? 0, ...points.map(({ high, rate }) => high ?? rate ?? 0));
    const share = (value) => `${(100 * value) / most}%`;
    const bar = ({ rate, low, high }) => element("span", { class: "trk", title: between({ low, high }) },
      ...(low === null || high === null ? [] : [element("i", { class: "span", style: `left:${share(low)};width:${share(high - low)}` })]),
      ...(rate === null ? [] : [element("i", { class: "dot g", style: `left:${share(rate)}` })]),
      ...(measured ? [element("i", { class: "mark", style: `left:${share(measured)}` })] : []));
    const head = [["l", "Layout"], ["", `Predicted tokens/s/${unit}`], ["track hide", element("span", { class: "scale" }, element("span", {}, "0"), element("span", {}, "90 % of it"), element("span", {}, Words.short(most)))], ["hide", "90 % of it"], ["", "Predicted GiB"], ["hide", `${unit}-hours`]];
    const line = (point) => element("tr", {}, ...[
      ["l", point.row === undefined ? element("span", { class: "lay" }, point.layout) : element("button", { type: "button", class: "open lay", onclick: () => open(point.row) }, point.layout), point.tight ? element("span", { class: "tag" }, "may not fit") : ""],
      ["", Words.short(point.rate)], ["track hide", bar(point)], ["hide", between(point)], ["", Words.gib(point.peak)], ["hide", Words.short(point.hours)],
    ].map(([kind, ...content]) => element("td", { class: kind }, ...content)));
    if (!points.length) return [];
    const notes = [rest, measured ? "The thin line is the fastest that was measured." : "", used].filter(Boolean).join(" ");
    return [element("table", {}, element("thead", {}, element("tr", {}, ...head.map(([kind, text]) => element("th", { scope: "col", class: kind }, text)))), element("tbody", {}, ...points.map(line))), ...(notes ? [element("p", { class: "note" }, notes)] : [])];
  }

  return { show, table, list, candidates, fastest };
})();
