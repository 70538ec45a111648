/* The pipeline view: a schedule drawn as the engine executes it, and its idle time.

   Times have no unit, only their ratio matters; for a run that measured its own they are seconds. The actions and their
   times come from the planner (ClosedForms), measured times from pipeline_measured.js. */
"use strict";
const Pipeline = (() => {
  const { INTERLEAVED, SPLIT_BACKWARD, V_SHAPED, microbatches_in_flight, schedule_actions, stage_at } = ClosedForms;
  const ROW = 34, BAR = 26, LEFT = 4, TOP = 6, AXIS = 22;
  const SVG = "http://www.w3.org/2000/svg";
  /** Name of each schedule, and what a rank does. */
  const NAMES = {
    gpipe: ["GPipe", "Each rank runs all forwards, then all backwards (arXiv:1811.06965)."],
    "1f1b": ["1F1B", "Each rank alternates one forward and one backward as soon as it can (arXiv:2006.09503)."],
    interleaved_1f1b: ["Interleaved 1F1B",
      "1F1B with several chunks of the model a rank: rank r has stages r, r + p, and so on (arXiv:2104.04473)."],
    interleaved_zero_bubble: ["Interleaved zero bubble",
      "The same with split backwards: weights' gradients fill the waiting at the end (ZB, arXiv:2401.10241)."],
    zero_bubble_v: ["ZB-V",
      "Two chunks a rank in a V, rank r has stages r and 2p − 1 − r; split backwards (arXiv:2401.10241, 6)."],
    dualpipe_v: ["DualPipeV",
      "The same V in pairs of a forward and a backward, which follow each other here (arXiv:2412.19437)."],
  };
  const schedules = ClosedForms._SCHEDULES.keys().filter((name) => name !== "none");
  const KINDS = { F: "forward", B: "backward", I: "backward, input's gradient", W: "backward, weights' gradient" };
  /** Largest number of actions drawn; more are illegible and slow. */
  const MOST_ACTIONS = 30000;
  /** [field, label, smallest, largest, step, initial value] */
  /** @type {[string, string, number, number, number, number][]} */
  const FIELDS = [
    ["ranks", "Pipeline ranks p", 1, 64, 1, 4],
    ["microbatches", "Micro-batches m", 1, 1024, 1, 8],
    ["chunks", "Model chunks a rank v", 1, 8, 1, 1],
    ["forward", "Time of a forward", 0.1, 10, 0.1, 1],
    ["backward", "Time of a backward", 0.1, 10, 0.1, 2],
    ["weights", "Weights' gradient, % of a backward", 5, 95, 1, 50],
    ["p2p", "Time between ranks (p2p)", 0, 5, 0.1, 0],
  ];
  /** The smallest and largest number of chunks of a rank. */
  function chunkLimits(schedule) {
    if (V_SHAPED.includes(schedule)) return [2, 2];
    if (!INTERLEAVED.includes(schedule)) return [1, 1];
    return [schedule === "interleaved_1f1b" ? 2 : 1, 8];
  }
  const field = ([name, label, least, most, step, value]) => {
    const limits = `min="${least}" max="${most}" step="${step}" value="${value}"`;
    return `
    <div class="w-field">
      <label for="runs-p-${name}">${label}</label>
      <input type="range" data-of="${name}" ${limits} aria-label="${label}, slider">
      <input type="number" id="runs-p-${name}" name="${name}" ${limits} inputmode="decimal" required>
    </div>`;
  };
  const option = (name) =>
    `<option value="${name}" ${name === "1f1b" ? "selected" : ""}>${NAMES[name][0]}</option>`;
  const swatch = ([kind, name]) => `<span data-kind="${kind}"><svg width="26" height="16" aria-hidden="true">
      <rect class="g-${kind}" width="26" height="16"/></svg> ${name}</span>`;
  const PAGE = `
    <div class="widget pipeline">
      <form class="w-controls w-row" aria-label="Pipeline">
        <fieldset><legend>Pipeline</legend>
          <div class="w-field w-choice"><label for="runs-p-schedule">Schedule</label>
            <select id="runs-p-schedule" name="schedule">
              ${schedules.map(option).join("")}
            </select></div>
          <p class="quiet" id="runs-p-meaning"></p>
          ${FIELDS.slice(0, 3).map(field).join("")}
        </fieldset>
        <fieldset><legend>Times of a rank</legend>${FIELDS.slice(3).map(field).join("")}</fieldset>
      </form>
      <div class="w-result">
        <p class="warning" id="runs-p-wrong" role="status" hidden></p>
        <div id="runs-p-answer">
          <dl class="w-facts" aria-live="polite">
            <div><dt>Idle over working time</dt><dd id="runs-p-bubble"></dd></div>
            <div><dt><span id="runs-p-formula"></span> = <span id="runs-p-fraction"></span></dt><dd id="runs-p-closed"></dd></div>
            <div><dt>Idle share of the step</dt><dd id="runs-p-share"></dd></div>
            <div><dt>Whole step</dt><dd id="runs-p-total"></dd></div>
          </dl>
          <p class="quiet" id="runs-p-remark"></p>
          <div id="runs-p-measured" hidden></div>
          <p class="w-legend">${Object.entries(KINDS).map(swatch).join("")}
            <span><svg width="26" height="16" aria-hidden="true"><rect fill="url(#runs-p-idle)" width="26" height="16"/>
              </svg> idle</span>
            <span id="runs-p-lighter">lighter: later chunks of a rank</span>
            <label class="w-check"><input type="checkbox" id="runs-p-fit"> Whole step at once</label></p>
          <div class="w-chart"><svg id="runs-p-labels" width="58" aria-hidden="true"></svg>
            <div class="w-scroll" id="runs-p-scroll"><svg id="runs-p-chart" tabindex="0" role="application"
              aria-label="Schedule: arrow keys step through the actions" aria-describedby="runs-p-now"></svg></div></div>
          <p class="quiet">Left and right: this rank's actions. Up and down: the next rank's. Or point at one.</p>
          <p class="w-now" id="runs-p-now" role="status"></p>
          <div class="w-scroll"><table class="w-table"><caption>Each rank</caption><thead><tr>
            <th scope="col">Rank</th>
            <th scope="col" class="n">Idle time</th><th scope="col" class="n">Idle share</th>
            <th scope="col" class="n">Most micro-batches in flight</th>
            <th scope="col" class="n">In flight at the chosen action</th>
            <th scope="col" class="n">Most that wait for weights' gradients</th></tr></thead>
            <tbody id="runs-p-table"></tbody></table></div>
        </div>
      </div>
      <svg width="0" height="0" class="w-patterns" aria-hidden="true"><defs>
        <g id="runs-p-hatches"></g>
        <pattern id="runs-p-idle" width="5" height="5" patternUnits="userSpaceOnUse">
          <rect width="5" height="5" class="g-idle"/><circle cx="2.5" cy="2.5" r="0.8" class="g-dot"/></pattern>
      </defs></svg>
    </div>`;

  /** A chunk's colour: lighter the later it is. */
  function colour(kind, chunk, chunks) {
    const part = 100 - (60 * chunk) / Math.max(1, chunks - 1);
    return `color-mix(in srgb, var(--${kind}) ${part}%, white)`;
  }
  const hatch = (chunk, chunks) => `
    <pattern id="runs-p-hatch-${chunk}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
      <rect width="6" height="6" style="fill: ${colour("backward", chunk, chunks)}"/>
      <line x1="0" y1="0" x2="0" y2="6" class="g-hatch"/></pattern>`;
  const VARIABLES = { F: "forward", I: "input", W: "weight" };

  /** A number without the rounding noise of sums of tenths: 4.8 for 4.800000001. */
  const plain = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  function draw(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  /** A round distance between ticks, so that about `count` ticks fit. */
  function tickStep(total, count) {
    const rough = total / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  }

  /**
   * @param {Element} root
   * @param {?PipelineRun} run Initial inputs and measured times: see `PipelineMeasured.of`.
   */
  function mount(root, run = null) {
    root.innerHTML = PAGE;
    /** @type {(name: string) => HTMLElement} */
    const at = (name) => root.querySelector(`#runs-p-${name}`);
    const form = root.querySelector("form"), chart = at("chart");
    /** @type {(name: string) => HTMLInputElement} */
    const input = (name) => /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
    /** @type {(name: string) => HTMLInputElement|null} */
    const sliderOf = (name) => form.querySelector(`[data-of=${name}]`);
    const fit = /** @type {HTMLInputElement} */ (at("fit"));
    /** @type {ReturnType<typeof compute>|null} */
    let found = null;
    /** @type {SVGElement[][]} */
    let bars = [];
    let chosen = [0, 0];

    /** The inputs, or a sentence on the invalid one. @returns {PipelineInputs|{wrong: string}} */
    function read() {
      const given = /** @type {PipelineInputs} */ ({ schedule: input("schedule").value });
      for (const [name, label, first, last, step] of FIELDS) {
        const value = input(name).valueAsNumber, whole = step === 1;
        const [least, most] = name === "chunks" ? chunkLimits(given.schedule) : [first, last];
        if (!(value >= least && value <= most) || (whole && !Number.isInteger(value))) {
          return { wrong: `${label}: ${whole ? "a whole number" : "a number"} from ${least} to ${most}` };
        }
        given[name] = value;
      }
      const kinds = SPLIT_BACKWARD.includes(given.schedule) ? 3 : 2;
      const actions = kinds * given.ranks * given.microbatches * given.chunks;
      if (actions > MOST_ACTIONS) {
        const [shown, most] = [actions, MOST_ACTIONS].map((count) => count.toLocaleString("en"));
        return { wrong: `${shown} actions are too many to draw; at most ${most}` };
      }
      return given;
    }

    /** @param {PipelineInputs} given */
    function compute(given) {
      const { schedule, ranks: p, microbatches: m, chunks: v } = given;
      const each = (time) => Array.from({ length: p }, () => Array(v).fill(time / v));
      const weights = (given.backward * given.weights) / 100;
      const lengths = {
        F: each(given.forward), B: each(given.backward), I: each(given.backward - weights), W: each(weights),
      };
      const actions = lengths.F.map((_, rank) => schedule_actions(schedule, rank, p, m, v));
      const run = ClosedForms.simulate(actions, lengths.F, lengths.B, given.p2p, schedule, lengths.I, lengths.W);
      return {
        ...given, ...run, lengths,
        spans: actions.map((_, rank) => run.spans.filter((span) => span.rank === rank)),
        busy: m * (given.forward + given.backward),
        meanIdle: py.sum(run.idle_s) / p,
        inFlight: actions.map((own) => microbatches_in_flight(own) / v),
        waiting: actions.map((own) => Math.max(...ClosedForms.held(own).map((one) => py.sum(one.for_weights))) / v),
      };
    }

    /**
     * (p − 1) / (v m) is the idle share of 1F1B and GPipe with v = 1, and of interleaved 1F1B; other schedules show
     * 1F1B's.
     */
    function showFacts() {
      const { schedule, ranks: p, microbatches: m, total_s: total, busy, meanIdle } = found;
      const split = SPLIT_BACKWARD.includes(schedule), v = split ? 1 : found.chunks, closed = (p - 1) / (v * m);
      at("bubble").textContent = percent(meanIdle / busy);
      at("formula").textContent = split ? "1F1B: (p − 1) / m" : v > 1 ? "(p − 1) / (v m)" : "(p − 1) / m";
      at("fraction").textContent = `${p - 1}\u00a0/\u00a0${v * m}`;
      at("closed").textContent = percent(closed);
      at("share").textContent = percent(meanIdle / total);
      at("total").textContent = plain(total);
      at("meaning").textContent = NAMES[schedule][1];
      at("remark").textContent = remark(split, Math.abs(meanIdle / busy - closed) < 1e-9);
      at("lighter").hidden = found.chunks === 1;
      for (const kind of Object.keys(KINDS)) {
        const drawn = found.spans.some((own) => own.some((span) => span.action.kind === kind));
        /** @type {HTMLElement} */
        const key = root.querySelector(`[data-kind=${kind}]`);
        key.hidden = !drawn;
      }
    }

    function remark(split, alike) {
      if (split) return "The closed form is 1F1B's with free sending: what this schedule is set against.";
      if (alike) return "The simulation and the closed form agree: ranks are equal, sending takes no time.";
      return found.p2p > 0
        ? "The closed form leaves out the time between ranks; the simulation waits for it."
        : "The closed form is that of a number of micro-batches that p divides.";
    }

    function showRanks(inFlightNow) {
      at("table").replaceChildren(...found.spans.map((_, rank) => {
        const row = document.createElement("tr"), head = document.createElement("th");
        head.scope = "row";
        head.textContent = String(rank);
        row.append(head);
        const idle = Math.abs(found.idle_s[rank]);
        const cells = [plain(idle), percent(idle / found.total_s), plain(found.inFlight[rank]), plain(inFlightNow[rank]),
          plain(found.waiting[rank])];
        for (const text of cells) {
          const cell = document.createElement("td");
          cell.className = "n";
          cell.textContent = text;
          row.append(cell);
        }
        return row;
      }));
    }

    function drawChart() {
      const { spans, total_s: total } = found, room = at("scroll").clientWidth - LEFT - 2;
      const { chunks, lengths } = found, kinds = new Set(spans.flat().map((span) => span.action.kind));
      const shortest = Math.min(...[...kinds].map((kind) => lengths[kind][0][0]));
      const numbered = 8 + 7 * String(found.microbatches - 1).length; // wide enough for every micro-batch's number
      const scale = fit.checked ? room / total : Math.max(room / total, (numbered + 2) / shortest);
      const width = LEFT + total * scale + 2, height = TOP + spans.length * ROW + AXIS;
      chart.setAttribute("width", String(width));
      chart.setAttribute("height", String(height));
      const x = (time) => LEFT + time * scale;
      const parts = [], labels = [];
      at("hatches").innerHTML = Array.from({ length: chunks }, (_, chunk) => hatch(chunk, chunks)).join("");
      bars = spans.map((own, rank) => {
        const y = TOP + rank * ROW, middle = y + BAR / 2;
        labels.push(draw("text", { x: 52, y: middle, class: "g-label", "text-anchor": "end" }, `rank ${rank}`));
        parts.push(draw("rect", { x: LEFT, y, width: total * scale, height: BAR, fill: "url(#runs-p-idle)" }));
        return own.map(({ action, start_s: start, end_s: end }, index) => {
          const { kind, chunk } = action, width = (end - start) * scale;
          const fill = kind === "B" ? `url(#runs-p-hatch-${chunk})` : colour(VARIABLES[kind], chunk, chunks);
          const names = { "data-rank": rank, "data-index": index, class: `g-${kind}`, style: `fill: ${fill}` };
          const bar = draw("rect", { ...names, x: x(start), y, width, height: BAR });
          parts.push(bar);
          if (width >= numbered) {
            parts.push(draw("text", { x: x(start) + width / 2, y: middle, class: "g-number" }, action.microbatch));
          }
          return bar;
        });
      });
      const base = TOP + spans.length * ROW - ROW + BAR + 4, step = tickStep(total, (total * scale) / 70);
      for (let i = 0; i * step <= total * (1 + 1e-9); i += 1) {
        parts.push(draw("line", { x1: x(i * step), x2: x(i * step), y1: base, y2: base + 5, class: "g-tick" }));
        const anchor = x(i * step) > width - 16 ? "end" : "middle";
        const place = { x: x(i * step), y: base + 16, "text-anchor": anchor };
        parts.push(draw("text", { ...place, class: "g-label" }, plain(i * step)));
      }
      parts.push(draw("rect", { class: "g-chosen", height: BAR }));
      labels.push(draw("text", { x: 52, y: base + 16, class: "g-label", "text-anchor": "end" }, "time"));
      chart.replaceChildren(...parts);
      at("labels").setAttribute("height", String(height));
      at("labels").replaceChildren(...labels);
    }

    /**
     * Show one action: outlined in the chart, described below it, and in the table what is in flight when it starts.
     */
    function choose(rank, index, scroll) {
      chosen = [rank, index];
      const { action, start_s: start, end_s: end } = found.spans[rank][index], before = index ? found.spans[rank][index - 1].end_s : 0;
      const box = bars[rank][index], outline = chart.lastElementChild;
      for (const name of ["x", "y", "width"]) outline.setAttribute(name, box.getAttribute(name));
      const waited = start - before > 1e-9 ? `, after ${plain(start - before)} idle` : "";
      const stage = stage_at(found.schedule, rank, action.chunk, found.ranks);
      const where = found.chunks > 1 ? ` in chunk ${action.chunk} (stage ${stage})` : "";
      at("now").textContent = `Rank ${rank}: ${KINDS[action.kind]} of micro-batch ${action.microbatch}${where}, ` +
        `from ${plain(start)} to ${plain(end)}${waited}.`;
      const tiny = 1e-9 * found.total_s; // sums of tenths differ in their last bits
      showRanks(found.spans.map((own) => own.reduce((held, span) => {
        if (span.action.kind === "W") return held;
        if (span.action.kind === "F") return held + (span.start_s <= start + tiny ? 1 : 0);
        return held - (span.end_s <= start + tiny ? 1 : 0);
      }, 0) / found.chunks));
      if (!scroll) return;
      const view = at("scroll"), left = Number(box.getAttribute("x")), right = left + Number(box.getAttribute("width"));
      if (left < view.scrollLeft) view.scrollLeft = left - LEFT;
      else if (right > view.scrollLeft + view.clientWidth) view.scrollLeft = right - view.clientWidth + LEFT;
    }

    /** The action of another rank that is nearest in time. */
    function nearest(rank, time) {
      const distances = found.spans[rank].map((span) => Math.abs(span.start_s - time));
      return distances.indexOf(Math.min(...distances));
    }
    function step(event) {
      const [rank, index] = chosen, last = found.spans[rank].length - 1;
      const up = event.key === "ArrowUp" ? -1 : event.key === "ArrowDown" ? 1 : 0;
      const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
      if (!up && to === undefined) return;
      event.preventDefault();
      if (up && found.spans[rank + up]) choose(rank + up, nearest(rank + up, found.spans[rank][index].start_s), true);
      else if (!up && to >= 0 && to <= last) choose(rank, to, true);
    }

    const control = (name) => [input(name), sliderOf(name)];
    /** Clamp the number of chunks to the schedule's limits, and disable inputs without effect. */
    function follow() {
      const schedule = input("schedule").value, [least, most] = chunkLimits(schedule);
      const chunks = Math.min(most, Math.max(least, input("chunks").valueAsNumber || least));
      for (const field of control("chunks")) {
        Object.assign(field, { min: least, max: most, disabled: least === most });
        field.value = String(chunks);
      }
      for (const field of control("weights")) field.disabled = !SPLIT_BACKWARD.includes(schedule);
    }

    function update() {
      const given = read();
      const wrong = "wrong" in given ? given.wrong : "";
      at("wrong").hidden = !wrong;
      at("wrong").textContent = wrong;
      at("answer").hidden = Boolean(wrong);
      if ("wrong" in given) return;
      found = compute(given);
      showFacts();
      PipelineMeasured.show(at("measured"), run, found);
      drawChart();
      const rank = Math.min(chosen[0], found.ranks - 1);
      choose(rank, Math.min(chosen[1], found.spans[rank].length - 1), false);
    }

    form.addEventListener("input", (event) => {
      const edited = /** @type {HTMLInputElement} */ (event.target);
      const { of } = edited.dataset, name = of ?? edited.name;
      if (of) input(of).value = edited.value;
      const slider = sliderOf(name);
      if (slider && !of) slider.value = edited.value;
      if (name === "schedule") follow();
      update();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    fit.addEventListener("change", update);
    chart.addEventListener("keydown", step);
    for (const kind of ["pointermove", "pointerdown"]) {
      chart.addEventListener(kind, (event) => {
        /** @type {SVGElement|null} */
        const bar = /** @type {Element} */ (event.target).closest("[data-rank]");
        if (bar) choose(Number(bar.dataset.rank), Number(bar.dataset.index), false);
      });
    }
    new ResizeObserver(() => found && at("scroll").clientWidth && update()).observe(at("scroll"));
    function begin() {
      for (const [name, value] of Object.entries(run.fields)) {
        input(name).value = String(value);
        const slider = sliderOf(name);
        if (slider) slider.value = String(value);
      }
    }

    if (run) begin();
    follow();
    update();
  }

  return { mount };
})();
