/* Measured times of a run's pipeline, compared with the simulated schedule. */
"use strict";
const PipelineMeasured = (() => {
  const plain = (seconds) => `${Columns.writeNumber(seconds)} s`;

  /**
   * Initial state of the pipeline view for a row; null for a row without a pipeline.
   * @param {Read} read The row's value of a column.
   * @param {RowSeries} [series] The row's lists.
   * @returns {?PipelineRun} `times` in seconds, mean over ranks; null if nothing was measured.
   */
  function of(read, series) {
    /** @type {(name: string) => number|null} */
    const number = (name) => /** @type {number|null} */ (read(name));
    const schedule = String(read("pp_schedule"));
    if (!(number("pp") > 1) || !ClosedForms._SCHEDULES.has(schedule) || read("num_microbatches") === null) return null;
    const fields = {
      schedule, ranks: number("pp"), microbatches: number("num_microbatches"), chunks: number("virtual_stages") ?? 1,
    };
    const [work, idle] = [number("forward_backward_s"), number("pipeline_idle_s")];
    const profiled = number("breakdown_bubble_s") !== null ? number("breakdown_bubble_s") / number("breakdown_step_time_s") : null;
    return { fields, times: work === null || idle === null ? null : { work, idle, slowest: number("slowest_forward_backward_s"), profiled }, stages: stagesOf(series, fields) };
  }

  /**
   * Seconds of one micro-batch and of a step on each stage; null if a stage's work is unknown.
   * @param {RowSeries|undefined} series
   * @param {PipelineRun["fields"]} fields
   * @returns {PipelineRun["stages"]}
   */
  function stagesOf(series, fields) {
    const whole = (list) => (list?.length === fields.ranks && list.every((value) => value !== null) ? list : null);
    const [work, idle, forward, backward] = [whole(series?.work), whole(series?.idle), whole(series?.forward), whole(series?.backward)];
    if (!work || !idle) return null;
    const measured = forward !== null && backward !== null;
    const each = work.map((seconds) => seconds / fields.microbatches);
    return {
      work, idle, measured,
      forward: measured ? forward : each.map((seconds) => seconds / 3),
      backward: measured ? backward : each.map((seconds) => (2 * seconds) / 3),
    };
  }

  /**
   * Waiting of each stage in seconds when the schedule runs with the stage's own times and free messages.
   * @param {PipelineRun["fields"]} fields
   * @param {NonNullable<PipelineRun["stages"]>} stages
   */
  function waitsOf(fields, stages) {
    const { schedule, ranks, microbatches, chunks } = fields;
    const split = (list, share = 1) => list.map((seconds) => Array(chunks).fill((share * seconds) / chunks));
    const lengths = { F: split(stages.forward), B: split(stages.backward), I: split(stages.backward, 0.5), W: split(stages.backward, 0.5) };
    const actions = stages.work.map((_, rank) => ClosedForms.schedule_actions(schedule, rank, ranks, microbatches, chunks));
    return ClosedForms.simulate(actions, lengths.F, lengths.B, 0, schedule, lengths.I, lengths.W).idle_s;
  }

  /**
   * Times that `waitsOf` assumes to be equal, because no run times them separately.
   * @param {PipelineRun["fields"]} fields
   */
  function takenAsEqual({ schedule, chunks }) {
    const halves = ClosedForms.SPLIT_BACKWARD.includes(schedule)
      ? " Where the schedule splits a backward, the gradients of inputs and those of weights take half of it each: a run times them together." : "";
    return `${chunks > 1 ? " A rank's chunks take equal times." : ""}${halves}`;
  }

  /** @param {PipelineRun} run @returns {Node[]} */
  function stageTable(run) {
    const { fields, stages } = run;
    if (!stages) return [];
    const waits = waitsOf(fields, stages);
    const cell = (seconds) => element("td", { class: "n" }, Columns.writeNumber(seconds));
    const rows = stages.work.map((work, rank) => element("tr", {},
      element("th", { scope: "row" }, String(rank)),
      ...(stages.measured ? [cell(stages.forward[rank]), cell(stages.backward[rank])] : []),
      cell(work), cell(stages.idle[rank]), cell(Math.max(0, waits[rank]))));
    const heads = [...(stages.measured ? ["Forward of a micro-batch, s", "Its backward, s"] : []), "At work, s", "Waiting, s", "Waiting, simulated, s"];
    const head = element("tr", {}, element("th", { scope: "col" }, "Rank"), ...heads.map((text) => element("th", { scope: "col", class: "n" }, text)));
    const how = stages.measured
      ? "Simulated with these forwards and backwards; messages take no time."
      : "Simulated with each rank's measured work in equal micro-batches, a third of each forward: the two were not recorded apart. Messages take no time.";
    return [
      element("div", { class: "w-scroll" }, element("table", { class: "w-table", "data-part": "stages" }, element("caption", {}, "Each rank of the run"), element("thead", {}, head), element("tbody", {}, ...rows))),
      element("p", { class: "quiet" }, `${how}${takenAsEqual(fields)}`),
    ];
  }

  function bar(name, parts, most) {
    const shown = parts.map(([value, kind]) => element("span", { class: `w-${kind}`, style: `width:${(100 * value) / most}%` }));
    const said = parts.map(([value, , word]) => `${plain(value)} ${word}`).join(", ");
    return element("div", { class: "w-pair" }, element("span", {}, name), element("span", { class: "w-track", "aria-hidden": "true" }, ...shown), element("span", { class: "quiet" }, said));
  }

  /**
   * Show the run's times over those of the simulation `found`, as long as it has the run's layout.
   * @param {HTMLElement} root
   * @param {?PipelineRun} run
   * @param {PipelineInputs & {busy: number, meanIdle: number}} found
   */
  function show(root, run, found) {
    root.hidden = !run;
    if (!run) return;
    const { fields, times } = run;
    if (!times) {
      root.replaceChildren(element("p", { class: "quiet" }, "This run did not measure how long its stages worked and waited: only the simulation is shown."));
      return;
    }
    if (Object.entries(fields).some(([name, value]) => found[name] !== value)) {
      root.replaceChildren(element("p", { class: "quiet" }, "The run's own times are shown beside the run's own schedule."));
      return;
    }
    const second = times.work / found.busy; // scaled so that the simulated work of a rank equals the measured one
    const idle = found.meanIdle * second;
    const most = Math.max(times.work + times.idle, times.work + idle, times.slowest ?? 0);
    const share = (waiting) => `${((100 * waiting) / (waiting + times.work)).toFixed(1)} %`;
    const rows = [
      bar("Measured", [[times.work, "work", "at work"], [times.idle, "wait", "waiting"]], most),
      bar("Simulated", [[times.work, "work", "at work"], [idle, "wait", "waiting"]], most),
    ];
    if (times.slowest !== null) rows.splice(1, 0, bar("Slowest rank", [[times.slowest, "work", "at work"]], most));
    const profiled = times.profiled === null ? "" : ` In its profiled step ${(100 * times.profiled).toFixed(1)} % was waiting.`;
    root.replaceChildren(
      element("h4", {}, "Measured over simulated, mean over ranks"), ...rows,
      element("p", { class: "quiet" }, `Waiting takes ${share(times.idle)} of both in the run and ${share(idle)} in the simulation, whose stages are equal and whose forward takes half of a backward.${profiled}`),
      ...stageTable(run),
    );
  }

  return { of, show };
})();
