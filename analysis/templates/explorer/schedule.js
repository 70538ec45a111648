/* The pipeline tab: a schedule drawn as the engine executes it, and what its idle time comes to.

Times have no unit: only their ratio matters. The actions and their times come from pipeline_model.js. */
"use strict";
const initPipeline = (() => {
  const ROW = 34, BAR = 26, LEFT = 4, TOP = 6, AXIS = 22;
  const SVG = "http://www.w3.org/2000/svg";
  /** Name, and what a stage does. */
  const NAMES = {
    "1f1b": ["1F1B", "Each stage alternates one forward and one backward as soon as it can (arXiv:2006.09503)."],
    gpipe: ["GPipe", "Each stage runs all forwards, then all backwards (arXiv:1811.06965)."],
  };
  const KINDS = { F: "forward", B: "backward" };
  /** [field, label, smallest, largest, step, at first] */
  const FIELDS = [
    ["stages", "Stages p", 1, 32, 1, 4],
    ["microbatches", "Micro-batches m", 1, 128, 1, 8],
    ["forward", "Time of a forward", 0.1, 10, 0.1, 1],
    ["backward", "Time of a backward", 0.1, 10, 0.1, 2],
    ["p2p", "Time between stages (p2p)", 0, 5, 0.1, 0],
  ];
  const field = ([name, label, least, most, step, value]) => {
    const limits = `min="${least}" max="${most}" step="${step}" value="${value}"`;
    return `
    <div class="w-field">
      <label for="p-${name}">${label}</label>
      <input type="range" data-of="${name}" ${limits} aria-label="${label}, slider">
      <input type="number" id="p-${name}" name="${name}" ${limits} inputmode="decimal" required>
    </div>`;
  };
  const schedules = Object.keys(PipelineModel.SCHEDULES).filter((name) => name !== "none").sort();
  const PAGE = `
    <div class="widget pipeline">
      <form class="w-controls w-row" aria-label="Pipeline">
        <fieldset><legend>Pipeline</legend>
          <div class="w-field w-choice"><label for="p-schedule">Schedule</label>
            <select id="p-schedule" name="schedule">
              ${schedules.map((name) => `<option value="${name}">${NAMES[name][0]}</option>`).join("")}
            </select></div>
          <p class="quiet" id="p-meaning"></p>
          ${FIELDS.slice(0, 2).map(field).join("")}
        </fieldset>
        <fieldset><legend>Times</legend>${FIELDS.slice(2).map(field).join("")}</fieldset>
      </form>
      <div class="w-result">
        <p class="warning" id="p-wrong" role="status" hidden></p>
        <div id="p-answer">
          <dl class="w-facts" aria-live="polite">
            <div><dt>Idle over working time</dt><dd id="p-bubble"></dd></div>
            <div><dt>(p − 1) / m = <span id="p-fraction"></span></dt><dd id="p-closed"></dd></div>
            <div><dt>Idle share of the step</dt><dd id="p-share"></dd></div>
            <div><dt>Whole step</dt><dd id="p-total"></dd></div>
          </dl>
          <p class="quiet" id="p-remark"></p>
          <p class="w-legend"><span><svg width="26" height="16" aria-hidden="true">
              <rect class="g-F" width="26" height="16"/></svg> forward</span>
            <span><svg width="26" height="16" aria-hidden="true"><rect class="g-B" width="26" height="16"/>
              </svg> backward</span>
            <span><svg width="26" height="16" aria-hidden="true"><rect fill="url(#p-idle)" width="26" height="16"/>
              </svg> idle</span>
            <label class="w-check"><input type="checkbox" id="p-fit"> Whole step at once</label></p>
          <div class="w-chart"><svg id="p-labels" width="58" aria-hidden="true"></svg>
            <div class="w-scroll" id="p-scroll"><svg id="p-chart" tabindex="0" role="application"
              aria-label="Schedule: arrow keys step through the actions" aria-describedby="p-now"></svg></div></div>
          <p class="quiet">Left and right: this stage's actions. Up and down: the next stage's. Or point at one.</p>
          <p class="w-now" id="p-now" role="status"></p>
          <div class="w-scroll"><table class="w-table"><caption>Each stage</caption><thead><tr>
            <th scope="col">Stage</th>
            <th scope="col" class="n">Idle time</th><th scope="col" class="n">Idle share</th>
            <th scope="col" class="n">Most micro-batches in flight</th>
            <th scope="col" class="n">In flight at the chosen action</th></tr></thead>
            <tbody id="p-table"></tbody></table></div>
        </div>
      </div>
      <svg width="0" height="0" class="w-patterns" aria-hidden="true"><defs>
        <pattern id="p-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
          <rect width="6" height="6" class="g-ground"/><line x1="0" y1="0" x2="0" y2="6" class="g-hatch"/></pattern>
        <pattern id="p-idle" width="5" height="5" patternUnits="userSpaceOnUse">
          <rect width="5" height="5" class="g-idle"/><circle cx="2.5" cy="2.5" r="0.8" class="g-dot"/></pattern>
      </defs></svg>
    </div>`;

  /** Without the noise of sums of tenths: 4.800000001 is 4.8. */
  const plain = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  function draw(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  /** A round distance between ticks, so that about `count` of them fit. */
  function tickStep(total, count) {
    const rough = total / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  }

  return function initPipeline(root) {
    root.innerHTML = PAGE;
    const at = (name) => root.querySelector(`#p-${name}`);
    const form = root.querySelector("form"), chart = at("chart");
    let found = null, bars = [], chosen = [0, 0];

    /** The inputs, or the sentence that says which of them makes no sense. */
    function read() {
      const given = { schedule: form.elements.schedule.value };
      for (const [name, label, least, most, step] of FIELDS) {
        const value = form.elements[name].valueAsNumber, whole = step === 1;
        if (!(value >= least && value <= most) || (whole && !Number.isInteger(value))) {
          return { wrong: `${label}: ${whole ? "a whole number" : "a number"} from ${least} to ${most}` };
        }
        given[name] = value;
      }
      return given;
    }

    function compute(given) {
      const p = given.stages, m = given.microbatches;
      const each = (time) => Array(p).fill(time);
      const actions = each(null).map((_, stage) => PipelineModel.scheduleActions(given.schedule, stage, p, m));
      const run = PipelineModel.simulate(actions, each(given.forward), each(given.backward), given.p2p);
      const busy = m * (given.forward + given.backward), idle = run.idle.reduce((a, b) => a + b, 0) / p;
      return { ...given, ...run, busy, meanIdle: idle, inFlight: actions.map(PipelineModel.microbatchesInFlight) };
    }

    function showFacts() {
      const { stages: p, microbatches: m, total, busy, meanIdle } = found;
      at("bubble").textContent = percent(meanIdle / busy);
      at("fraction").textContent = `${p - 1}\u00a0/\u00a0${m}`;
      at("closed").textContent = percent((p - 1) / m);
      at("share").textContent = percent(meanIdle / total);
      at("total").textContent = plain(total);
      const alike = Math.abs(meanIdle / busy - (p - 1) / m) < 1e-9;
      at("meaning").textContent = NAMES[found.schedule][1];
      at("remark").textContent = alike
        ? "The simulation and the closed form, (p − 1) / m, agree: stages are equal, sending takes no time."
        : "The closed form, (p − 1) / m, leaves out the time between stages; the simulation waits for it.";
    }

    function showStages(inFlightNow) {
      at("table").replaceChildren(...found.spans.map((_, stage) => {
        const row = document.createElement("tr"), head = document.createElement("th");
        head.scope = "row";
        head.textContent = stage;
        row.append(head);
        const idle = found.idle[stage];
        for (const text of [plain(Math.abs(idle)), percent(Math.abs(idle) / found.total), found.inFlight[stage],
          inFlightNow[stage]]) {
          const cell = document.createElement("td");
          cell.className = "n";
          cell.textContent = text;
          row.append(cell);
        }
        return row;
      }));
    }

    function drawChart() {
      const { spans, total } = found, room = at("scroll").clientWidth - LEFT - 2;
      const shortest = Math.min(found.forward, found.backward);
      const numbered = 8 + 7 * String(found.microbatches - 1).length; // wide enough for every micro-batch's number
      const scale = at("fit").checked ? room / total : Math.max(room / total, (numbered + 2) / shortest);
      const width = LEFT + total * scale + 2, height = TOP + spans.length * ROW + AXIS;
      chart.setAttribute("width", width);
      chart.setAttribute("height", height);
      const x = (time) => LEFT + time * scale;
      const parts = [], labels = [];
      bars = spans.map((own, stage) => {
        const y = TOP + stage * ROW, middle = y + BAR / 2;
        labels.push(draw("text", { x: 52, y: middle, class: "g-label", "text-anchor": "end" }, `stage ${stage}`));
        parts.push(draw("rect", { x: LEFT, y, width: total * scale, height: BAR, fill: "url(#p-idle)" }));
        return own.map(({ action, start, end }, index) => {
          const width = (end - start) * scale, names = { "data-stage": stage, "data-index": index };
          const bar = draw("rect", { ...names, class: `g-${action.kind}`, x: x(start), y, width, height: BAR });
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
      at("labels").setAttribute("height", height);
      at("labels").replaceChildren(...labels);
    }

    /** Shows one action: outlined in the chart, in words below it, and in the table what is in flight as it starts. */
    function choose(stage, index, scroll) {
      chosen = [stage, index];
      const { action, start, end } = found.spans[stage][index], before = index ? found.spans[stage][index - 1].end : 0;
      const box = bars[stage][index], outline = chart.lastChild;
      for (const name of ["x", "y", "width"]) outline.setAttribute(name, box.getAttribute(name));
      const waited = start - before > 1e-9 ? `, after ${plain(start - before)} idle` : "";
      at("now").textContent = `Stage ${stage}: ${KINDS[action.kind]} of micro-batch ${action.microbatch}, ` +
        `from ${plain(start)} to ${plain(end)}${waited}.`;
      const tiny = 1e-9 * found.total; // sums of tenths differ in their last bits
      showStages(found.spans.map((own) => own.reduce((held, span) => {
        if (span.action.kind === "F") return held + (span.start <= start + tiny ? 1 : 0);
        return held - (span.end <= start + tiny ? 1 : 0);
      }, 0)));
      if (!scroll) return;
      const view = at("scroll"), left = Number(box.getAttribute("x")), right = left + Number(box.getAttribute("width"));
      if (left < view.scrollLeft) view.scrollLeft = left - LEFT;
      else if (right > view.scrollLeft + view.clientWidth) view.scrollLeft = right - view.clientWidth + LEFT;
    }

    /** The action of another stage that is nearest in time. */
    function nearest(stage, time) {
      const distances = found.spans[stage].map((span) => Math.abs(span.start - time));
      return distances.indexOf(Math.min(...distances));
    }
    function step(event) {
      const [stage, index] = chosen, last = found.spans[stage].length - 1;
      const up = event.key === "ArrowUp" ? -1 : event.key === "ArrowDown" ? 1 : 0;
      const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
      if (!up && to === undefined) return;
      event.preventDefault();
      if (up && found.spans[stage + up]) choose(stage + up, nearest(stage + up, found.spans[stage][index].start), true);
      else if (!up && to >= 0 && to <= last) choose(stage, to, true);
    }

    function update() {
      const given = read();
      at("wrong").hidden = !given.wrong;
      at("wrong").textContent = given.wrong ?? "";
      at("answer").hidden = Boolean(given.wrong);
      if (given.wrong) return;
      found = compute(given);
      showFacts();
      drawChart();
      choose(Math.min(chosen[0], found.stages - 1), Math.min(chosen[1], 2 * found.microbatches - 1), false);
    }

    form.addEventListener("input", (event) => {
      const { of } = event.target.dataset, name = of ?? event.target.name;
      if (of) form.elements[of].value = event.target.value;
      const slider = form.querySelector(`[data-of=${name}]`);
      if (slider && !of) slider.value = event.target.value;
      update();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    at("fit").addEventListener("change", update);
    chart.addEventListener("keydown", step);
    for (const kind of ["pointermove", "pointerdown"]) {
      chart.addEventListener(kind, (event) => {
        const bar = event.target.closest("[data-stage]");
        if (bar) choose(Number(bar.dataset.stage), Number(bar.dataset.index), false);
      });
    }
    new ResizeObserver(() => found && at("scroll").clientWidth && update()).observe(at("scroll"));
    update();
  };
})();
