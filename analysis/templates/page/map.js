"use strict";

/* The map: every model and number of devices with its best layout, coloured by one measure. It is a grid of buttons
   with one tab stop: arrows move, Enter chooses, hover or focus shows the first five layouts. */
const CellMap = (() => {
  const RAMP = ["--r0", "--r1", "--r2", "--r3", "--r4"];
  const by = (id) => document.getElementById(id);

  /** @typedef {Found & {state: PageState}} CellAnswer */
  /** @typedef {[string, string, (cell: Cell, found: CellAnswer) => number|null, (value: number) => string]} Measure name, label, value of a cell, how it is written */

  /**
   * Measures that a part has.
   * @param {Part} part
   * @param {number} tokens
   * @returns {Measure[]}
   */
  function measures(part, tokens) {
    /** @type {(value: (place: number) => number|null) => Measure[2]} */
    const best = (value) => (cell, found) => (found.best ? value(found.best.place) : null);
    /** @type {Measure[]} */
    const all = [
      ["mfu", "MFU", best((place) => part.mfu(place)), (value) => Words.percent(value)],
      ["rate", "tokens/s", best((place) => part.rate(place)), Words.short],
      ["memory", "memory", best((place) => part.memoryOf(place)), Words.memory],
      ["finished", "finished", (cell, found) => (found.points ? (found.points - found.outOfMemory - found.failed) / found.points : null), (value) => Words.percent(value, 0)],
      ["hours", "GPU-h", best((place) => part.hours(place, tokens)), Words.fixed],
    ];
    if (part.isPlan) return [["rate", "tokens/s, predicted", (cell, found) => Planned.fastest(found.state, cell)[0]?.rate ?? null, Words.short], ["fits", "should fit", (cell, found) => (found.points ? Planned.candidates(found.state, cell).length / found.points : null), (value) => Words.percent(value, 0)]];
    /** @type {Record<string, boolean>} */
    const has = { mfu: part.ranked.row.some((row) => part.value("mfu_palm", row) !== null), hours: part.noun === "GPUs" };
    return all.filter(([name]) => has[name] ?? true);
  }

  /**
   * Draw the map.
   * @param {PageState} state
   * @param {(cell: Cell) => Found} found The answer of a cell.
   * @param {Act} act
   */
  function show(state, found, act) {
    const { part } = state;
    const choices = measures(part, state.tokens);
    const [name, , measure, write] = choices.find(([key]) => key === state.measure) ?? choices[0];
    by("measure").replaceChildren(...choices.map(([key, label]) => element("button", { type: "button", "aria-pressed": String(key === name), "data-by": key, onclick: () => act.set({ measure: key }) }, label)));
    const rows = part.workloads.filter((workload) => state.minor || !part.minor.has(workload) || workload === state.cell.workload);
    const answers = new Map([...part.cells.values()].map((cell) => [cell, { ...found(cell), state }]));
    const values = new Map([...answers].map(([cell, answer]) => [cell, measure(cell, answer)]));
    const drawn = [...values].filter(([cell, value]) => value !== null && rows.includes(cell.workload)).map(([, value]) => value);
    const top = Math.max(...drawn, 0);
    // An MFU is relative to the peak of its precision: each peak has its own scale.
    const peak = (cell) => (name === "mfu" && answers.get(cell).best ? part.value("peak_flops", answers.get(cell).best.row) : null);
    const topLike = (cell) => Math.max(...[...values].filter(([other, value]) => value !== null && rows.includes(other.workload) && peak(other) === peak(cell)).map(([, value]) => value), 0);
    const low = name === "hours" ? Math.min(...drawn, top) : 0;
    const grid = by("map");
    grid.style.gridTemplateColumns = `minmax(44px, max-content) repeat(${part.sizes.length}, minmax(0, 1fr))`;
    grid.replaceChildren(element("div", { class: "rl" }, part.noun), ...part.sizes.map((size) => element("div", { class: "h" }, String(size))));
    for (const workload of rows) {
      grid.append(element("div", { class: "rl" }, workload.replaceAll("_", "_\u200b")));
      for (const size of part.sizes) {
        const cell = part.at(workload, size);
        grid.append(cell ? button(state, cell, answers.get(cell), values.get(cell), write, level(values.get(cell), low, topLike(cell)), act) : element("div", { class: "cell void", title: "not in the results" }, "·"));
      }
    }
    legend(state, rows, name, write, low, top, act);
  }

  /**
   * Share from 0 to 1. GPU-hours span decades, so they use the logarithm, with the fewest darkest.
   * @param {number|null} value
   * @param {number} low
   * @param {number} top
   */
  function level(value, low, top) {
    if (value === null || !top) return null;
    if (low > 0) return top === low ? 1 : 1 - Math.log(value / low) / Math.log(top / low);
    return value / top;
  }

  /**
   * @param {PageState} state
   * @param {Cell} cell
   * @param {CellAnswer} answer
   * @param {number|null} value
   * @param {(value: number) => string} write
   * @param {number|null} shade
   * @param {Act} act
   */
  function button(state, cell, answer, value, write, shade, act) {
    const { part } = state, chosen = cell === state.cell;
    const tie = answer.ties.length > 1, pale = !part.isPlan && !answer.best && cell.points.length === 0;
    const [predicted] = pale || part.isPlan ? Planned.fastest(state, cell) : [];
    const layout = answer.best ? part.layoutName(answer.best.place) : (predicted?.layout ?? null);
    const words = value !== null && !pale ? write(value) : predicted ? Words.short(predicted.rate) : pale ? `${cell.waiting} planned` : `0 of ${cell.points.length}`;
    const said = `${cell.workload} on ${cell.size}: ${words}${layout ? `, ${layout}` : ""}${predicted ? ", predicted" : tie ? `, a tie of ${answer.ties.length}` : ""}`;
    const kind = pale ? " pale" : value === null || !layout ? " none" : "";
    const node = element("button", {
      type: "button", class: `cell${kind}`, "aria-label": said, "aria-pressed": String(chosen), tabindex: chosen ? "0" : "-1", "data-m": cell.workload, "data-g": cell.size,
      onclick: () => act.choose(cell), onpointerenter: (event) => event.pointerType !== "touch" && popover(node, state, answer), onfocus: () => node.matches(":focus-visible") && popover(node, state, answer),
      onpointerleave: hide, onblur: hide, onkeydown: move,
    }, element("b", {}, words));
    if (layout) node.append(...brief(layout).map((line) => element("span", {}, line)));
    if (layout && !pale && shade !== null) paint(node, shade);
    if (answer.best) {
      const slow = part.value("network_regime", answer.best.row) === "slow";
      if (tie || slow) node.append(element("span", { class: "flag", "aria-hidden": "true" }, `${tie ? "≈" : ""}${slow ? "▾" : ""}`));
    }
    return node;
  }

  /** A layout in two short lines: degrees; ZeRO stage and batching. */
  function brief(layout) {
    const [degrees, batching] = layout.split(" · "), zero = degrees.match(/ z\d/)?.[0] ?? "";
    return [degrees.replace(zero, "").replace(/ (?=\w)/g, "\u202f"), `${zero} ${batching.replace(/^mbs /, "")}`.trim()];
  }

  /**
   * Set the colour for a share of the ramp, and black or white text by its luminance.
   * @param {HTMLElement} node
   * @param {number} share
   */
  function paint(node, share) {
    const style = getComputedStyle(document.documentElement);
    const stops = RAMP.map((name) => hex(style.getPropertyValue(name)));
    const at = Math.min(0.999, Math.max(0, share)) * (stops.length - 1), first = Math.floor(at), part = at - first;
    const mixed = stops[first].map((value, channel) => Math.round(value + part * (stops[first + 1][channel] - value)));
    const [r, g, b] = mixed.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    node.style.background = `rgb(${mixed.join(",")})`;
    node.style.color = 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  }

  const hex = (text) => [1, 3, 5].map((place) => Number.parseInt(text.trim().slice(place, place + 2), 16));

  /**
   * @param {PageState} state
   * @param {string[]} rows
   * @param {string} name Name of the measure.
   * @param {(value: number) => string} write
   * @param {number} low
   * @param {number} top
   * @param {Act} act
   */
  function legend(state, rows, name, write, low, top, act) {
    const { part } = state;
    /** @type {Node[]} */
    const items = [];
    if (top) items.push(element("span", {}, low ? write(top) : write(0), element("i", { class: low ? "ramp turned" : "ramp" }), low ? write(low) : write(top)));
    const cells = [...part.cells.values()].filter((cell) => rows.includes(cell.workload));
    if (!part.isPlan && cells.some((cell) => !cell.layouts.length && cell.points.length)) items.push(element("span", {}, element("i", { class: "sw hatched" }), "none finished"));
    if (cells.some((cell) => cell.waiting && !cell.points.length)) items.push(element("span", {}, element("i", { class: "sw pale" }), "tokens/s predicted, not run"));
    if (part.isPlan) items.push(element("span", {}, "predicted, not measured"));
    else items.push(element("span", {}, "≈ a tie"));
    if (part.valuesOf("network_regime", part.ranked.row).length > 1) items.push(element("span", {}, "▾ the winner saw the slow network"));
    if (name === "mfu" && part.valuesOf("peak_flops", part.ranked.row).length > 1) items.push(element("span", {}, "MFU is relative to the peak in each run's precision (FP8: twice BF16's), and so is the shade: each precision against its best."));
    if (part.minor.size) {
      const count = part.minor.size;
      items.push(element("button", { type: "button", class: "more", id: "minor", onclick: () => act.set({ minor: !state.minor }) }, state.minor ? "Hide variants with few runs" : `Show ${Words.plural(count, "variant")} with few runs`));
    }
    by("maplegend").replaceChildren(...items);
  }

  /**
   * Show the first five layouts of a cell beside it.
   * @param {HTMLElement} node
   * @param {PageState} state
   * @param {CellAnswer} answer
   */
  function popover(node, state, answer) {
    const { part } = state, box = by("pop");
    const title = element("b", {}, `${answer.cell.workload} on ${answer.cell.size}`);
    if (part.isPlan || !answer.list.length) {
      const counts = `${Words.fixed(answer.points)} points: ${Words.fixed(answer.outOfMemory)} out of memory, ${Words.fixed(answer.failed)} failed otherwise${answer.cell.waiting ? `, ${answer.cell.waiting} not run` : ""}`;
      const lines = Planned.fastest(state, answer.cell).slice(0, 5).map((point) => element("tr", {}, element("td", { class: "l lay" }, point.layout), element("td", {}, Words.short(point.rate))));
      box.replaceChildren(title, element("p", {}, part.isPlan ? `${Words.fixed(Planned.candidates(state, answer.cell).length)} of ${Words.fixed(answer.points)} should fit` : counts), ...(lines.length ? [element("p", {}, "Predicted fastest:"), element("table", {}, ...lines)] : []));
    } else {
      const line = (layout, place) => element("tr", {}, element("td", {}, String(place + 1)), element("td", { class: "l lay" }, part.layoutName(layout.place)), element("td", {}, Words.short(layout.rate)), element("td", {}, place ? `−${Words.percent(layout.behind)}` : ""));
      box.replaceChildren(title, element("table", {}, ...answer.list.slice(0, 5).map(line)));
    }
    box.hidden = false;
    const at = node.getBoundingClientRect(), wide = box.offsetWidth;
    box.style.left = `${Math.max(4, Math.min(at.left + scrollX, innerWidth - wide - 8))}px`;
    const above = at.top - box.offsetHeight - 6;
    box.style.top = `${scrollY + (above > 0 ? above : at.bottom + 6)}px`;
  }

  function hide() {
    by("pop").hidden = true;
  }

  /** @param {KeyboardEvent & {currentTarget: HTMLElement}} event */
  function move(event) {
    if (event.key === "Escape") return hide();
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return undefined;
    event.preventDefault();
    /** @type {NodeListOf<HTMLElement>} */
    const cells = by("map").querySelectorAll("button.cell");
    const all = [...cells];
    const rows = [...new Set(all.map((cell) => cell.dataset.m))], here = event.currentTarget;
    let row = rows.indexOf(here.dataset.m), size = Number(here.dataset.g);
    const sizes = [...new Set(all.map((cell) => Number(cell.dataset.g)))].sort((a, b) => a - b);
    for (;;) { // skip places without a cell
      row += step[0];
      size = sizes[sizes.indexOf(size) + step[1]];
      if (size === undefined || !rows[row]) return undefined;
      const next = all.find((cell) => cell.dataset.m === rows[row] && Number(cell.dataset.g) === size);
      if (next) {
        next.focus();
        return undefined;
      }
    }
  }

  return { show, hide };
})();
