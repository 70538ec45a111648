"use strict";

/* The reader's limits, and the answer: the fastest layout within them, other layouts that may be as fast, and its
   costs. */
const Finder = (() => {
  const by = (id) => document.getElementById(id);

  /** Fill the lists of the form for the chosen part and cell. @param {PageState} state */
  function showForm(state) {
    const { part, cell } = state;
    const base = State.baseOf(cell.workload), lengths = part.workloads.filter((name) => State.baseOf(name) === base);
    fill("f-model", [...new Set(part.workloads.map(State.baseOf))].map((name) => [name, name]), base);
    fill("f-seq", lengths.map((name) => [name, State.lengthOf(name) || "as usual"]).sort((a, b) => Number(a[1]) - Number(b[1])), cell.workload);
    by("f-seq").closest("label").hidden = lengths.length < 2;
    const sizes = part.sizes.filter((size) => part.at(cell.workload, size));
    const device = part.gpuName ? ` × ${part.gpuName}` : "";
    fill("f-gpus", sizes.map((size) => [String(size), `${size}${device}`]), String(cell.size));
    const places = cell.layouts;
    const batches = [...new Set(places.map((place) => part.number("tokens_per_step", part.row(place))))].filter((value) => value !== null).sort((a, b) => a - b);
    const query = state.query();
    /** @type {Record<string, string>} */
    const asked = { ...query.only, ...(query.batch === null ? {} : { tokens_per_step: String(query.batch) }) };
    /** @type {(column: string) => string|undefined} */
    const usual = (column) => { const { [column]: own, ...others } = asked; return Answer.usualGroup(part, places, others)?.[column]; };
    /** @type {(id: string, column: string, values: Value[], write: (value: Value) => string, chosen: string) => void} */
    const list = (id, column, values, write, chosen) => {
      const most = usual(column);
      const word = (value) => `${write(value)}${String(value) === most && values.length > 1 ? " (most runs)" : ""}`;
      const options = values.map((value) => [String(value) === most ? "" : String(value), word(value)]);
      fill(id, [...options, ...(most === undefined && Answer.LIKE.includes(column) && !chosen ? [["", "none"]] : []), [Answer.LIKE.includes(column) ? Answer.ANY : "", "any"]], chosen === most ? "" : chosen);
      by(id).closest("label").hidden = values.length < 2;
    };
    list("f-batch", "tokens_per_step", batches, Words.tokens, String(state.batch ?? ""));
    for (const [key, column] of Object.entries(State.FILTER_KEYS)) list(`f-${key}`, column, part.valuesOf(column, part.ranked.row), (value) => String(value).replaceAll("_", " "), state.only[column] ?? "");
    for (const [id, value] of [["f-mem", state.memory], ["f-price", state.price], ["f-tok", state.trillions]]) {
      const field = /** @type {HTMLInputElement} */ (by(id));
      if (document.activeElement !== field) field.value = String(value ?? "");
    }
    by("f-mem").closest("label").hidden = part.capacity === null && !part.ranked.row.some((row) => part.value(part.memory, row) !== null);
    for (const id of ["f-price", "f-tok"]) by(id).closest("label").hidden = part.noun !== "GPUs";
    by("f-price-label").textContent = `$ per ${Words.one(part.noun)}-hour`;
    by("f-gpus-label").textContent = part.noun;
  }

  /**
   * @param {string} id
   * @param {string[][]} options Value and text.
   * @param {string} chosen
   */
  function fill(id, options, chosen) {
    const list = /** @type {HTMLSelectElement} */ (by(id));
    list.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    list.value = chosen;
  }

  /**
   * Show the answer for the chosen cell.
   * @param {PageState} state
   * @param {Found} found
   * @param {Act} act
   * @param {(row: number) => Command} command
   * @param {string|null} whole The command that runs the plan, or goes on with the sweep.
   */
  function showAnswer(state, found, act, command, whole) {
    const { part, cell } = state;
    const where = `${cell.workload} on ${cell.size}${part.gpuName ? ` × ${part.gpuName}` : ` ${part.noun}`}`;
    const box = by("winner");
    if (part.isPlan) return Planned.show(state, by("h-answer"), box, where, whole);
    if (!found.best) {
      by("h-answer").textContent = where;
      box.replaceChildren(element("p", { class: "layout" }, nothing(found)), funnel(state, found, act), element("p", { class: "callout calm" }, ...wayOut(state, found, act)), ...toRunNext(cell, null, whole));
      return undefined;
    }
    const how = part.method === "measured" ? "" : part.method === "rehearsed" ? " (rehearsed, not measured)" : " (estimated, not measured)";
    by("h-answer").textContent = `Fastest for ${where}${how}`;
    box.replaceChildren(
      layoutLine(part, found.best.row), stats(state, found.best), funnel(state, found, act),
      ...notes(state, found, act, command, whole), commandLine(command(found.best.row)));
    return undefined;
  }

  /** @param {Found} found */
  function nothing(found) {
    if (found.finished === 0) return found.points ? "Nothing finished here" : "Nothing has run here yet";
    return found.fits === 0 ? "Nothing fits here" : "Nothing ran at this batch";
  }

  /**
   * @param {Part} part
   * @param {number} row
   */
  function layoutLine(part, row) {
    const line = element("p", { class: "layout" });
    Words.layout(part.reader(row)).forEach((text, place) => {
      if (place) line.append(" ", element("i", {}, "·"), " ");
      line.append(element("span", { class: "whole" }, text));
    });
    return line;
  }

  /**
   * @param {PageState} state
   * @param {Layout} best
   */
  function stats(state, best) {
    const { part, cell } = state;
    const hours = part.hours(best.place, state.tokens);
    const list = [[Words.short(best.rate), `tokens/s/${part.noun === "GPUs" ? "GPU" : "process"}`]];
    if (part.mfu(best.place) !== null) list.push([Words.percent(part.mfu(best.place)), "MFU (PaLM)"]);
    const memory = part.memoryOf(best.place);
    if (memory !== null) {
      const kind = part.memory === "peak_reserved_bytes" ? "reserved" : "peak";
      list.push([Words.memory(memory), part.capacity === null ? kind : `${kind} of ${Words.gib(part.capacity)} GiB`]);
    }
    if (part.noun === "GPUs" && part.method !== "rehearsed_fake") {
      list.push([`${Words.days(hours / cell.size / 24)} days`, `for ${state.trillions} T tokens`]);
      list.push(state.price ? [Words.money(hours * state.price), `${Words.fixed(hours)} GPU-hours`] : [Words.fixed(hours), "GPU-hours; no price given"]);
    }
    return definitions(list);
  }

  /** Values with their names, in one row. @param {string[][]} list */
  function definitions(list) {
    return element("dl", { class: "stats" }, ...list.map(([value, name]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  /**
   * The funnel: how many layouts remain after each of fit, batch and throughput.
   * @param {PageState} state
   * @param {Found} found
   * @param {Act} act
   */
  function funnel(state, found, act) {
    const lost = [];
    if (found.outOfMemory) lost.push(`${Words.fixed(found.outOfMemory)} out of memory`);
    if (found.failed) lost.push(`${Words.fixed(found.failed)} failed otherwise`);
    const above = found.finished - found.fits;
    if (above) lost.push(`${Words.fixed(above)} above the limits`);
    if (found.cell.waiting) lost.push(`${Words.fixed(found.cell.waiting)} have not run`);
    /** @type {(string|Node)[]} */
    const batch = found.batch === null ? ["any batch"] : [`with ${Words.tokens(found.batch)} tokens per step`];
    const { part } = state, { best } = found, same = (column) => best && !found.list.some(({ row }) => part.value(column, row) !== part.value(column, best.row));
    if (part.valuesOf("precision", part.ranked.row).length > 1 && same("precision")) batch.push(`, ${String(part.value("precision", best.row)).replaceAll("_", " ")}`);
    if (part.valuesOf("engine_version", part.ranked.row).length > 1 && same("engine_version")) batch.push(`, engine ${part.value("engine_version", best.row)}`);
    if (found.fasterAt) batch.push("; elsewhere up to ", button(Words.short(found.fasterAt), () => act.set({ batch: Answer.ANY, only: { precision: Answer.ANY, ...state.only } })));
    const close = found.ties.length > 1 ? "within a tie of the fastest" : found.list.length > 1 ? "clearly fastest" : found.list.length ? "alone: nothing to compare" : "nothing is left";
    return element("div", { class: "funnel" },
      step("1 Fits", found.fits, found.points, lost.join(", ") || "every point"),
      step("2 Like with like", found.list.length, found.fits, ...batch),
      step("3 Throughput", found.ties.length, found.list.length, close));
  }

  const step = (name, count, of, ...small) => element("div", {}, element("span", { class: "k" }, name), element("br"), element("b", {}, Words.fixed(count)), ` of ${Words.fixed(of)}`, element("small", {}, ...small));
  const button = (text, onclick) => element("button", { type: "button", class: "more", onclick }, text);
  const callout = (calm, ...words) => element("p", { class: calm ? "callout calm" : "callout" }, ...words);
  const code = (text) => element("span", { class: "lay" }, text);
  const strong = (text) => element("b", {}, text);

  /**
   * Notes on how certain the winner is, and on other differences between the runs.
   * @param {PageState} state
   * @param {Found} found
   * @param {Act} act
   * @param {Commander} command
   * @param {string|null} whole
   */
  function notes(state, found, act, command, whole) {
    const { part } = state, [best, next] = found.list, told = [];
    if (next) {
      const behind = `${Words.percent(next.behind)} slower`;
      const noise = part.ranked.noise[best.place];
      const spread = noise === null ? null : `${Words.percent(noise)} of one run, from ${part.ranked.sources[part.ranked.from[best.place]]}`;
      if (found.ties.length > 1) {
        const lean = Math.min(...found.ties.map(({ place }) => part.memoryOf(place) ?? Infinity));
        const why = next.unknown ? "; the spread of steps within a run is not known, so up to 5 % decides nothing." : `; noise (${spread}) explains that.`;
        told.push(callout(false, strong(`Tie of ${found.ties.length}.`), " The next, ", code(part.layoutName(next.place)), `, is ${behind}${why}`, Number.isFinite(lean) ? ` Leanest of the tie: ${Words.memory(lean)}.` : "", ...settle(found, command)));
      } else {
        const why = next.unknown ? ", more than the 5 % that count as chance if the spread of a run's steps is not known." : `, more than noise explains (${spread}).`;
        told.push(callout(true, strong("Clear winner:"), " the next, ", code(part.layoutName(next.place)), `, is ${behind}${why}`));
      }
    }
    for (const column of Answer.FILTERS) {
      const own = part.value(column, best.row), others = found.list.filter(({ row }) => part.value(column, row) !== own);
      if (own === null || !others.length) continue;
      const name = { network_regime: "Networks", engine_version: "Engine versions", precision: "Precisions" }[column];
      const values = part.valuesOf(column, found.list.map(({ row }) => row));
      const each = values.flatMap((value, place) => [place ? ", " : " ", button(`${String(value).replaceAll("_", " ")} (${found.list.filter(({ row }) => part.value(column, row) === value).length})`, () => act.set({ only: { ...state.only, [column]: String(value) } }))]);
      told.push(callout(false, strong(`${name} differ`), `: the fastest has ${String(own).replaceAll("_", " ")}. Compare only`, ...each, "."));
    }
    told.push(...toRunNext(state.cell, best, whole));
    if (part.stamp) told.push(callout(false, `${part.stamp[0].toUpperCase()}${part.stamp.slice(1)}.`));
    return told;
  }

  /**
   * Points of the plan that a cell still has to run, and whether one of them may be faster than the best so far.
   * @param {Cell} cell
   * @param {Layout|null} best
   * @param {string|null} whole
   */
  function toRunNext({ next }, best, whole) {
    if (!next) return [];
    const [first] = next.first, predicted = first.rate !== null;
    const which = predicted ? "the fastest by prediction is " : "one of them is ";
    const range = first.low === null ? "" : `, 90 % of it ${Words.short(first.low)} to ${Words.short(first.high)}`;
    const rate = predicted ? ` (${Words.short(first.rate)} tokens/s predicted${range})` : "";
    const faster = best ? next.first.filter(({ high }) => high !== null && high > best.rate).length : 0;
    const may = faster ? ` By their intervals ${faster === next.first.length && faster > 1 ? "all of the first" : "of the first ten"} ${faster} may be faster than the best so far.` : "";
    const points = `${Words.plural(next.points, "point")} of the plan ${next.points === 1 ? "has" : "have"} no result here`;
    const goOn = whole ? [" ", copier("Copy the command that goes on", whole), "."] : [" The sweep's command continues with them."];
    return [callout(true, strong("To run next:"), ` ${points}; ${which}`, code(first.layout), `${rate}.${may}`, ...goOn)];
  }

  /** A button that copies a text. */
  function copier(label, text) {
    const copy = button(label, () => copied(copy, text));
    return copy;
  }

  /**
   * A button for the commands that repeat each layout of a tie; repeats may resolve the tie.
   * @param {Found} found
   * @param {Commander} command
   */
  function settle(found, command) {
    const lines = found.ties.map(({ row }) => command(row)).filter(({ words }) => words).map(({ words }) => Rerun.line(words));
    if (!lines.length) return [];
    return [" To settle it, run them again: ", copier(`Copy the ${lines.length} commands`, lines.join("\n")), "."];
  }

  /**
   * Suggestions when no layout is left, each one click away.
   * @param {PageState} state
   * @param {Found} found
   * @param {Act} act
   */
  function wayOut(state, found, act) {
    const { part, cell } = state;
    const within = (size) => { const other = part.at(cell.workload, size); return other && Answer.find(part, state.query(other)).best; };
    if (found.finished && !found.fits) {
      const lean = found.cell.layouts.map((place) => part.memoryOf(place)).filter((bytes) => bytes !== null).sort((a, b) => a - b)[0];
      if (lean !== undefined && Object.keys(state.only).length === 0) return [`The leanest finished layout needs ${Words.memory(lean)}. `, button("Allow that", () => act.set({ memory: Math.ceil(lean / Words.GIB) }))];
      return ["No layout satisfies the limits. ", button("Drop them", () => act.set({ only: {}, memory: state.usualMemory }))];
    }
    if (found.fits) return [`${Words.plural(found.fits, "layout")} finished at other batches. `, button("Take any", () => act.set({ batch: Answer.ANY, only: { precision: Answer.ANY, ...state.only } }))];
    const sizes = part.sizes.filter(within);
    if (!sizes.length) return [found.points ? "No run of this model finished on any number of devices under these limits." : "No run of this model has finished yet."];
    const list = sizes.flatMap((size, place) => [place ? ", " : "", button(String(size), () => act.set({ cell: part.at(cell.workload, size) }))]);
    return ["This model finished on ", ...list, ` ${part.noun}.`];
  }

  /**
   * A command with a button that copies it, or the reason why there is none.
   * @param {Command & {text?: string}} found `text`: the whole line, instead of its words.
   * @param {string} [label]
   */
  function commandLine(found, label = "Command that measures this layout") {
    if (found.missing) return element("p", { class: "note" }, found.missing);
    const text = found.text ?? Rerun.line(found.words);
    const shown = element("code", { id: "command", tabindex: "0", "aria-label": label }, text);
    const copy = element("button", { type: "button", onclick: () => copied(copy, text) }, "Copy command");
    const rest = found.notes.length ? element("p", { class: "note" }, found.notes.join(" ")) : "";
    return element("div", {}, element("div", { class: "cmd" }, shown, copy), rest);
  }

  /**
   * @param {HTMLButtonElement} copy
   * @param {string} text
   */
  async function copied(copy, text) {
    const label = copy.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = element("textarea", { class: "vh", "aria-hidden": "true" }, text); // some browsers deny the clipboard to pages opened from disk
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
      copy.focus();
    }
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = label), 1500);
  }

  return { showForm, showAnswer, layoutLine, commandLine, definitions, step, callout, strong };
})();
