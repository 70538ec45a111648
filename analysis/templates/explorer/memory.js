/* The memory view: sliders for model and layout, the bytes of one rank as tiles, and the devices that they fit on.

   The numbers are the planner's (memory_model.js), as are the rules and their messages (widget.rules, memory_rules.js). */
"use strict";
const Memory = (() => {
  const GIB = 2 ** 30, MOST_STAGES = 1024;
  /** Colours of the report's figures (Okabe and Ito), each with its most readable text colour. */
  const CATEGORIES = {
    parameters: { ground: "#0072B2", ink: "#ffffff" },
    gradients: { ground: "#E69F00", ink: "#000000" },
    optimizer: { ground: "#009E73", ink: "#000000" },
    activations: { ground: "#CC79A7", ink: "#000000" },
  };
  const PAGE = `
    <div class="widget memory">
      <div class="w-headline" role="status">
        <p><output id="runs-m-total"></output> <span id="runs-m-where"></span></p>
        <p id="runs-m-verdict"></p>
        <p class="quiet" id="runs-m-what"></p>
      </div>
      <form class="w-controls" aria-label="Model and layout"></form>
      <div class="w-result">
        <p class="warning" id="runs-m-note" hidden></p>
        <ul class="warning" id="runs-m-rules" hidden></ul>
        <div id="runs-m-answer">
          <h2>Where it fits</h2>
          <ul class="w-fits" id="runs-m-fits"></ul>
          <p class="quiet" id="runs-m-margin"></p>
          <h2>Bytes of one rank</h2>
          <div class="w-field w-choice" id="runs-m-stages"><label for="runs-m-stage">Pipeline stage</label>
            <select id="runs-m-stage"></select></div>
          <div id="runs-m-tiles" role="img" aria-label="Bytes by category and part; the table below has the same numbers"></div>
          <p class="quiet" id="runs-m-moment"></p>
          <div class="w-scroll"><table class="w-table"><caption>Predicted allocated memory at the stage's highest moment
            </caption><thead><tr><th scope="col">Part</th><th scope="col" class="n">GiB</th>
            <th scope="col" class="n w-exact">Bytes</th><th scope="col" class="n">Share</th></tr></thead>
            <tbody id="runs-m-parts"></tbody></table></div>
        </div>
      </div>
    </div>`;

  /** @param {number} bytes */
  const gib = (bytes) => {
    const value = bytes / GIB;
    if (value > 0 && value < 0.01) return "< 0.01";
    return value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  };
  /** @param {number} value */
  const plain = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
  /** @param {number} value */
  const whole = (value) => value.toLocaleString("en");
  /** @param {number} share */
  const percent = (share) =>
    share > 0 && share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
  /**
   * @param {number} count
   * @param {string} word
   */
  const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  /**
   * The planner's verdict on a peak on a cluster, in one word and one sentence (sweep.planning.point_verdict).
   * @param {number} peak
   * @param {ClusterAbout} cluster
   * @param {Widget} widget
   * @param {Experiment} experiment
   */
  function verdict(peak, cluster, widget, experiment) {
    const here = MemoryRules.violations(widget.rules, experiment, cluster).find(({ scope }) => scope === "cluster");
    if (here) return { kind: "no", mark: "✗", word: "invalid", text: here.message };
    const usable = cluster.usable_bytes, limit = usable * widget.oom_margin;
    if (peak > limit) {
      const text = `${gib(peak - limit)} GiB above the planner's limit`;
      return { kind: "no", mark: "✗", word: "does not fit", text };
    }
    if (peak > usable) {
      const above = `${gib(peak - usable)} GiB above what training can have`;
      const text = `${above}, within the planner's margin: it would be run`;
      return { kind: "maybe", mark: "≈", word: "too close to call", text };
    }
    return { kind: "yes", mark: "✓", word: "fits", text: `${gib(usable - peak)} GiB to spare` };
  }

  /**
   * One line for each group of clusters with equal devices and equal usable memory.
   * @param {ClusterAbout[]} clusters
   */
  function devices(clusters) {
    const found = new Map();
    for (const cluster of clusters) {
      const key = `${cluster.device} ${cluster.usable_bytes} ${cluster.joined_devices}`;
      if (!found.has(key)) found.set(key, { ...cluster, names: [] });
      found.get(key).names.push(cluster.name);
    }
    return [...found.values()].sort((a, b) => a.usable_bytes - b.usable_bytes);
  }

  /** Device names with one kind of verdict, shortened to a line. */
  function named(lines, kind) {
    const names = lines.filter((line) => line.kind === kind).map(({ device }) => device.device.replace("NVIDIA ", ""));
    return names.join(", ");
  }

  function fitLine({ device, peak, kind, mark, word, text }) {
    const line = element("li", "", { class: `w-fit w-${kind}`, "data-clusters": device.names.join(" ") });
    const name = element("span", `${device.device} `, { class: "w-device" });
    name.append(element("span", `${plain(device.usable_bytes / GIB)} of ${plain(device.memory_bytes / GIB)} GiB`,
      { class: "quiet" }));
    const bar = element("span", "", { class: "w-bar", "aria-hidden": "true" });
    const filled = element("span", "");
    filled.style.width = `${Math.min(100, (100 * peak) / device.memory_bytes)}%`;
    const room = element("i", "");
    room.style.left = `${(100 * device.usable_bytes) / device.memory_bytes}%`;
    bar.append(filled, room);
    line.append(name, bar, element("span", `${mark} ${word}`, { class: "w-word" }),
      element("span", text, { class: "quiet" }));
    return line;
  }

  /** [part, bytes] of a category; empty if it has no separate parts. */
  const partsOf = (stage, category) => Object.entries(stage.parts[category]).filter(([part]) => part !== category);

  /** The stage's bytes as two stacked bars: categories, and below each its parts. */
  function drawTiles(root, stage) {
    const tile = (name, bytes, colour, kind) => {
      const made = element("span", "", { class: `w-tile ${kind}`, title: `${name}: ${gib(bytes)} GiB, ${percent(bytes / stage.peak_bytes)}` });
      made.style.cssText = `flex:${bytes} 1 0;background:${colour.ground};color:${colour.ink}`;
      made.append(element("b", name), element("span", `${gib(bytes)} GiB`));
      return made;
    };
    const columns = Object.entries(CATEGORIES).filter(([category]) => stage[`${category}_bytes`]);
    root.replaceChildren(...columns.map(([category, colour]) => {
      const bytes = stage[`${category}_bytes`], column = element("span", "", { class: "w-tiles", "data-category": category });
      column.style.flex = `${bytes} 1 0`;
      const parts = element("span", "", { class: "w-parts" });
      parts.append(...partsOf(stage, category).filter(([, value]) => value > 0)
        .map(([part, value]) => tile(part, value, colour, "w-small")));
      column.append(tile(category, bytes, colour, ""), parts);
      return column;
    }));
    root.dataset.bytes = stage.peak_bytes;
  }

  function partRows(stage) {
    return Object.keys(CATEGORIES).flatMap((category) => {
      const bytes = stage[`${category}_bytes`];
      const row = (name, value, kind) => {
        const made = element("tr", "", { class: kind });
        const where = MemoryModel.madeIn(name);
        made.append(element("th", name, where ? { scope: "row", title: `workloads/engine/${where}` } : { scope: "row" }), element("td", gib(value), { class: "n" }),
          element("td", whole(value), { class: "n w-exact" }),
          element("td", percent(value / stage.peak_bytes), { class: "n" }));
        return made;
      };
      const parts = partsOf(stage, category);
      const head = row(category, bytes, "w-category");
      const swatch = element("span", "", { class: "w-swatch" });
      swatch.style.background = CATEGORIES[category].ground;
      head.firstChild.prepend(swatch);
      return [head, ...parts.map(([part, value]) => row(part, value, "w-part"))];
    });
  }

  /**
   * @param {Element} root
   * @param {Widget} widget `data.widget`: shapes, clusters, rules.
   * @param {?Experiment} experiment Initial values of the inputs; if null, a layout of eight billion parameters.
   */
  function mount(root, widget, experiment = null) {
    root.innerHTML = PAGE;
    /** @type {(name: string) => HTMLElement} */
    const at = (name) => root.querySelector(`#runs-m-${name}`);
    const select = /** @type {HTMLSelectElement} */ (at("stage")), known = devices(widget.clusters);
    /** @type {?ReturnType<typeof MemoryModel.estimateMemory>} */
    let memory = null;
    at("margin").textContent =
      "Bar: share of the device's memory; its line: what training can have, without what the driver, NCCL and the " +
      `allocator keep. The planner leaves a layout out above ${widget.oom_margin} × that line.`;

    /** The stage to show: the chosen one, or the one with the highest peak. */
    const shown = () => memory.stages[select.value === "" ? memory.peak_stage : Number(select.value)];
    function drawStage() {
      const stage = shown();
      at("parts").replaceChildren(...partRows(stage));
      at("moment").textContent = `Stage ${stage.stage} is at its highest in the ${stage.moment}.`;
      drawTiles(at("tiles"), stage);
    }

    function offerStages() {
      const before = select.value;
      const options = memory.stages.map(({ stage, peak_bytes }) =>
        new Option(`stage ${stage}: ${gib(peak_bytes)} GiB${stage === memory.peak_stage ? " (fullest)" : ""}`, stage));
      select.replaceChildren(new Option("the fullest", ""), ...options);
      select.value = Number(before) < options.length ? before : "";
      at("stages").hidden = options.length === 1;
    }

    function show(e, complaint) {
      const tooMany = e.pp > MOST_STAGES ? `pp=${e.pp}: this page works out at most ${MOST_STAGES} stages` : null;
      const refused = complaint ?? MemoryRules.refusal(widget.rules, e) ?? tooMany;
      const broken = refused ? [] : MemoryRules.violations(widget.rules, e, null);
      const structural = broken.filter(({ scope }) => scope === "layout").map(({ message }) => message);
      let sentences = refused ? [refused] : structural;
      const planned = py.made(ClosedForms.Experiment, e);
      memory = null;
      if (!sentences.length) {
        try {
          memory = MemoryModel.estimateMemory(planned);
        } catch (error) {
          if (!(error instanceof RangeError)) throw error;
          sentences = [error.message];
        }
      }
      at("rules").hidden = !sentences.length;
      at("rules").replaceChildren(...sentences.map((sentence) => element("li", sentence)));
      const engine = broken.find(({ scope }) => scope === "engine");
      at("note").hidden = !engine || !memory;
      at("note").textContent = engine ? `Predicted, but ${engine.message}` : "";
      at("answer").hidden = !memory;
      at("parameters").textContent = refused ? ""
        : `${(ClosedForms.num_params(planned.model) / 1e9).toPrecision(4)} G parameters`;
      at("what").textContent = refused ? "" : [
        plural(planned.world_size, "GPU"), `${plural(e.global_batch_size, "sequence")} or ` +
        `${plural(e.global_batch_size * e.seq_len, "token")} a step`].join(", ");
      at("total").textContent = memory ? `${gib(memory.peak_bytes)} GiB` : "no such layout";
      at("total").dataset.bytes = memory ? String(memory.peak_bytes) : "";
      at("where").textContent = !memory ? "" : memory.stages.length > 1
        ? `on a rank of stage ${memory.peak_stage}, the fullest of ${memory.stages.length}` : "on every rank";
      at("verdict").textContent = "";
      if (!memory) return;
      const lines = known.map((device) => {
        const peak = memory.peak_bytes + device.workspace_bytes;
        return { device, peak, ...verdict(peak, device, widget, e) };
      });
      at("fits").replaceChildren(...lines.map(fitLine));
      const fitting = named(lines, "yes"), close = named(lines, "maybe");
      at("verdict").textContent = [`${fitting ? `✓ fits ${fitting}` : "✗ fits none of these devices"}`,
        ...(close ? [`≈ too close to call on ${close}`] : [])].join("; ");
      offerStages();
      drawStage();
    }

    select.addEventListener("change", drawStage);
    MemoryForm.build(root.querySelector("form"), widget, show, experiment);
  }

  return { mount };
})();
