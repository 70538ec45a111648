"use strict";

/* The page: one state, the views that show it, and what each action does to it. */
window.Explorer = (() => {
  const by = (id) => document.getElementById(id);
  const data = JSON.parse(by("data").textContent);
  const columns = Columns.unpack(data);
  const filters = new Filters.Model(columns, data.rows);
  const state = { tab: "runs", selected: new Set(), current: -1, open: false, only: false, sort: { name: "", descending: false }, anchor: -1 };
  const planned = columns.has("verdict"); // points of a plan: nothing of them has run
  const timing = {};
  const noted = new Map(); // what the other tabs keep in the address
  const started = new Set();
  const tabs = { runs: null, memory: (root) => initMemory(root, data), pipeline: (root) => initPipeline(root, data) };

  const table = new Table.View(by("table"), { move, open, toggle, sort });
  const plot = new Plot.View(by("plot"), by("legend"), columns, data.cohorts, { open, select, lines });
  const panel = new Panel.View(by("panel"), data, columns, { open, close });
  const facets = new Filters.View(by("facets"), filters, (name, filter) => refilter(() => filters.set(name, filter)));

  // ---- what is shown -------------------------------------------------------------------------------------------

  let passing = new Int32Array(0); // rows that the filters let through, in the table's order: those of the plot
  let order = passing; // rows of the table: these, or those of them that are selected
  let drawing = 0;

  function render({ rows = true, points = true } = {}) {
    if (rows) {
      passing = Table.order(data.rows, (row) => filters.passes(row), columns.get(state.sort.name), state.sort.descending);
      order = state.only && state.selected.size ? passing.filter((row) => state.selected.has(row)) : passing;
      facets.update();
    }
    table.show({ columns: tableColumns(), order, selected: state.selected, current: state.current, sort: state.sort });
    writeStatus();
    if (points) schedulePlot();
    save();
  }

  function tableColumns() {
    const names = new Set([...data.table, state.x, state.y, state.colour, state.size]);
    const found = [...names].map((name) => columns.get(name)).filter(Boolean);
    return found.filter((column) => column.name !== "cohort" || data.cohorts.length > 1);
  }

  function writeStatus() {
    const [shown, all, chosen] = [order.length, data.rows, state.selected.size];
    const number = (count) => count.toLocaleString("en-GB");
    by("count").textContent = `${number(shown)} of ${number(all)} rows${chosen ? `, ${number(chosen)} selected` : ""}`;
    by("clear").hidden = by("only-selected").hidden = chosen === 0;
    by("only-selected").setAttribute("aria-pressed", String(state.only));
    const count = filters.active.size;
    by("filter-count").textContent = count ? `${count} active` : "none active";
    by("cohort-note").textContent = cohortNote();
  }

  function cohortNote() {
    if (data.rows === 0) return "Nothing has been run yet: there is no row to show.";
    const values = filters.active.get("cohort")?.values;
    const shown = data.cohorts.filter((cohort) => !values || values.has(cohort.title));
    if (shown.length === 1) return `${shown[0].title}. ${shown[0].meaning}`;
    return `${shown.length} cohorts in view, not comparable with each other: each has a marker of its own. ${shown.map((cohort) => `${cohort.title}${cohort.stamp ? ` (${cohort.stamp})` : ""}`).join("; ")}.`;
  }

  /** Draw after the browser has shown the table; of several asked for at once, the last one counts. */
  function schedulePlot() {
    if (!window.Plotly || !data.rows) return;
    cancelAnimationFrame(drawing);
    timing.plotted = false;
    drawing = requestAnimationFrame(() => setTimeout(drawPlot));
  }

  function drawPlot() {
    const began = performance.now();
    const { unplaced, thinned, unsized, promise } = plot.show({
      rows: passing, selected: state.selected, current: state.current, dark: isDark(), logX: onLog("X"), logY: onLog("Y"),
      x: columns.get(state.x), y: columns.get(state.y), colour: columns.get(state.colour), size: columns.get(state.size),
    });
    const notes = [];
    const number = (count) => count.toLocaleString("en-GB");
    if (unplaced) notes.push(`${number(unplaced)} of these rows have no ${columns.get(state.x).label} or no ${columns.get(state.y).label}${onLog("X") || onLog("Y") ? " above 0" : ""} and are only in the table.`);
    if (thinned) notes.push(`${number(thinned)} more points are not drawn: this browser has no WebGL for so many.`);
    if (unsized) notes.push(`${number(unsized)} points without a ${columns.get(state.size).label} are drawn smallest.`);
    by("plot-note").textContent = notes.join(" ");
    promise.then(() => {
      timing.plot = performance.now() - began;
      timing.open ??= performance.now();
      timing.plotted = true;
    });
  }

  /** Whether an axis is logarithmic: as asked, and never for texts. */
  function onLog(axis) {
    return state[`log${axis}`] && !columns.get(state[axis.toLowerCase()]).isText;
  }

  /** The lines beside a point under the pointer. */
  function lines(row) {
    const shown = [...new Set([state.x, state.y, state.colour, state.size])].map((name) => columns.get(name)).filter(Boolean);
    return [`${columns.get("workload").text(row)}, ${columns.get("layout").text(row)}`, ...shown.map((column) => `${column.label}: ${column.text(row)} ${column.unit}`.trim())];
  }

  // ---- actions -------------------------------------------------------------------------------------------------

  function refilter(change) {
    const began = performance.now();
    change();
    render();
    timing.filter = performance.now() - began;
  }

  function move(row) {
    state.current = row;
    table.current = row;
    table.reveal(row);
    render({ rows: false });
    if (state.open) panel.show(row);
  }

  function open(row) {
    state.current = row;
    state.open = true;
    table.reveal(row);
    panel.show(row);
    document.body.classList.add("with-panel");
    render({ rows: false });
    by("panel").focus({ preventScroll: true });
  }

  function close() {
    state.open = false;
    by("panel").hidden = true;
    document.body.classList.remove("with-panel");
    save();
    table.focus();
  }

  /** Add a row to the selection or take it out; `extend`: all rows of the table from the last one toggled. */
  function toggle(row, extend) {
    const from = Array.prototype.indexOf.call(order, state.anchor);
    const to = Array.prototype.indexOf.call(order, row);
    if (extend && from >= 0) for (let place = Math.min(from, to); place <= Math.max(from, to); place++) state.selected.add(order[place]);
    else if (!state.selected.delete(row)) state.selected.add(row);
    state.anchor = row;
    state.current = row;
    render({ rows: state.only });
  }

  function select(rows) {
    state.selected = new Set(rows);
    state.only = rows.length > 0;
    render();
  }

  function sort(name) {
    const numeric = !columns.get(name).isText;
    const { sort: now } = state;
    state.sort = now.name === name ? { name, descending: !now.descending } : { name, descending: numeric };
    render({ points: false });
  }

  // ---- controls ------------------------------------------------------------------------------------------------

  const usable = (column) => column !== undefined && (column.several || data.rows < 2);
  const plottable = [...columns.values()].filter(usable);

  function control(key, label, none) {
    const options = plottable.map((column) => element("option", { value: column.name }, column.title));
    const choice = element("select", { "aria-label": label, "data-axis": key, onchange: () => choose(key, choice.value) }, ...(none ? [element("option", { value: "" }, none)] : []), ...options);
    return element("label", { class: "stacked" }, label, choice);
  }

  function logBox(key, label) {
    const box = element("input", { type: "checkbox", "data-axis": key, onchange: () => { state[key] = box.checked; render({ rows: false }); } });
    return element("label", { class: "check" }, box, label);
  }

  function choose(key, name) {
    state[key] = name;
    if (key === "x" || key === "y") state[key === "x" ? "logX" : "logY"] = wide(columns.get(name));
    syncControls();
    render({ rows: false });
  }

  function syncControls() {
    for (const key of ["x", "y", "colour", "size"]) document.querySelector(`select[data-axis=${key}]`).value = state[key];
    for (const key of ["logX", "logY"]) {
      const box = document.querySelector(`input[data-axis=${key}]`);
      box.checked = state[key];
      box.disabled = columns.get(state[key === "logX" ? "x" : "y"])?.isText ?? true;
    }
  }

  /** A column whose positive values span more than two decades is read on a logarithmic axis. */
  function wide(column) {
    if (!column || column.kind !== "number") return false;
    let [low, high] = [Infinity, -Infinity];
    for (const value of column.numbers) {
      if (value <= 0) return false;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return high / low > 100;
  }

  function defaults() {
    const first = (...names) => names.find((name) => usable(columns.get(name))) ?? plottable[0]?.name ?? "";
    const memory = columns.has("peak_allocated_bytes") ? "peak_allocated_bytes" : "peak_reserved_bytes";
    state.x = first(memory, "predicted_peak_bytes", "duration_s", "world_size");
    state.y = first("tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu", "predicted_step_time_s", "duration_s", "tp");
    state.colour = [...(planned ? ["verdict"] : []), "workload", "outcome", "tp"].find((name) => columns.get(name)?.several) ?? "";
    state.size = "";
    [state.logX, state.logY] = [wide(columns.get(state.x)), wide(columns.get(state.y))];
    const fastest = ["tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu"].find((name) => columns.has(name));
    state.sort = fastest ? { name: fastest, descending: true } : { name: "", descending: false };
    Object.assign(state, { selected: new Set(), current: -1, only: false });
    firstCohort();
  }

  /** Cohorts are not comparable: unless asked for, only the first is in view. */
  function firstCohort() {
    filters.clear();
    if (data.cohorts.length > 1) filters.set("cohort", { values: new Set([data.cohorts[0].title]) });
  }

  // ---- the address ---------------------------------------------------------------------------------------------

  function save() {
    const pairs = new Map([["tab", state.tab], ["x", state.x], ["y", state.y], ["c", state.colour], ["s", state.size], ["log", `${state.logX ? "x" : ""}${state.logY ? "y" : ""}`]]);
    if (state.sort.name) pairs.set("sort", `${state.sort.descending ? "-" : ""}${state.sort.name}`);
    for (const [key, value] of pairs) pairs.set(key, Address.escape(value ?? ""));
    pairs.set("f", "1"); // the filters are all named: none of the first view's is to be added
    for (const [name, filter] of filters.active) pairs.set(`f.${name}`, Address.filterText(filter));
    if (state.selected.size) pairs.set("sel", `${data.fingerprint}:${Address.rowsText(state.selected)}`).set("only", state.only ? "1" : "0");
    if (state.current >= 0) pairs.set(state.open ? "row" : "at", Address.escape(columns.get("attempt_id").value(state.current)));
    for (const [key, value] of noted) pairs.set(key, Address.escape(value));
    Address.write(pairs);
  }

  function restore() {
    const pairs = Address.read();
    const text = (key) => Address.unescape(pairs.get(key));
    const notices = [];
    defaults();
    for (const [key, name] of [["x", "x"], ["y", "y"], ["c", "colour"], ["s", "size"]]) {
      if (!pairs.has(key)) continue;
      if (columns.has(text(key)) || (text(key) === "" && key !== "x" && key !== "y")) state[name] = text(key);
      else if (text(key)) notices.push(`There is no column ${text(key)} here.`);
    }
    [state.logX, state.logY] = ["x", "y"].map((axis) => (pairs.has("log") ? text("log").includes(axis) : wide(columns.get(state[axis]))));
    if (pairs.has("sort") && columns.has(text("sort").replace(/^-/, ""))) state.sort = { name: text("sort").replace(/^-/, ""), descending: text("sort").startsWith("-") };
    if (pairs.has("f")) filters.clear();
    for (const [key, value] of pairs) {
      if (!key.startsWith("f.")) {
        if (/^[mp]\./.test(key)) noted.set(key, Address.unescape(value));
        continue;
      }
      const column = columns.get(key.slice(2));
      if (!column) notices.push(`The filter on ${key.slice(2)} is left out: there is no such column here.`);
      else addFilter(column, Address.filterOf(value));
    }
    if (pairs.has("sel")) {
      const [made, rows] = pairs.get("sel").split(":");
      if (made === data.fingerprint) Object.assign(state, { selected: new Set(Address.rowsOf(rows ?? "", data.rows)), only: pairs.get("only") === "1" });
      else notices.push("The selection in the address is of other rows than this page has; it is left out.");
    }
    const id = pairs.has("row") ? text("row") : pairs.has("at") ? text("at") : null;
    const current = id === null ? -1 : findRow(id);
    if (id !== null && current < 0) notices.push(`The row ${id} of the address is not in this page.`);
    by("notice").textContent = notices.join(" ");
    by("notice").hidden = notices.length === 0;
    syncControls();
    render();
    if (current >= 0 && pairs.has("row")) open(current);
    else if (current >= 0) move(current);
    show(text("tab") in tabs ? text("tab") : "runs");
  }

  function findRow(id) {
    const ids = columns.get("attempt_id");
    for (let row = 0; row < data.rows; row++) if (ids.value(row) === id) return row;
    return -1;
  }

  function addFilter(column, filter) {
    facets.add(column);
    filters.set(column.name, filter);
  }

  // ---- tabs and theme ------------------------------------------------------------------------------------------

  function show(name, focus = false) {
    for (const other of Object.keys(tabs)) {
      const tab = by(`tab-${other}`);
      tab.setAttribute("aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
      by(`view-${other}`).hidden = other !== name;
      if (focus && other === name) tab.focus();
    }
    state.tab = name;
    startTab(name);
    save();
  }

  /** A tab is made when it is first seen, and not before plotly is there. */
  function startTab(name) {
    if (started.has(name) || !window.Plotly) return;
    started.add(name);
    tabs[name]?.(by(`view-${name}`));
  }

  /** Plotly takes longer to start than all else together: it runs when the table is on the screen. */
  function loadPlotly() {
    document.head.append(element("script", {}, by("plotly").textContent));
    by("plotly").remove();
    schedulePlot();
    startTab(state.tab);
    timing.plotly = performance.now();
  }

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => document.documentElement.dataset.theme === "dark";

  function storedTheme() {
    try {
      return localStorage.getItem("ultrasweep-theme");
    } catch {
      return null; // some browsers keep nothing for pages of a disk
    }
  }

  function setTheme(choice, keep) {
    const theme = choice ?? (prefersDark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    by("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
    if (keep) {
      try {
        localStorage.setItem("ultrasweep-theme", theme);
      } catch {
        // it then lasts as long as the page
      }
    }
    window.dispatchEvent(new Event("themechange"));
  }

  // ---- start ---------------------------------------------------------------------------------------------------

  function start() {
    setTheme(storedTheme(), false);
    if (matchMedia("(max-width: 50rem)").matches) by("filters").open = by("axes").open = false;
    document.querySelector("#axes .controls").append(
      control("x", "x axis"), logBox("logX", "log x"), control("y", "y axis"), logBox("logY", "log y"), control("colour", "colour", "none"), control("size", "size", "none"));
    for (const name of data.filters) if (columns.get(name).several) facets.add(columns.get(name));
    by("more").append(element("option", { value: "" }, "choose …"), ...plottable.filter((column) => !facets.facets.has(column.name)).map((column) => element("option", { value: column.name }, column.title)));
    by("more").addEventListener("change", () => {
      if (!by("more").value) return;
      const facet = facets.add(columns.get(by("more").value));
      by("more").selectedOptions[0].remove();
      facets.update();
      facet.root.querySelector("input").focus();
    });
    by("reset").addEventListener("click", () => refilter(firstCohort));
    by("clear").addEventListener("click", () => select([]));
    by("only-selected").addEventListener("click", () => { state.only = !state.only; render(); });
    by("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark", true));
    prefersDark.addEventListener("change", () => storedTheme() ?? setTheme(null, false));
    window.addEventListener("themechange", schedulePlot);
    window.addEventListener("hashchange", restore);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && state.open) close();
    });
    for (const name of Object.keys(tabs)) by(`tab-${name}`).addEventListener("click", () => show(name));
    document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const names = Object.keys(tabs);
      show(names[(names.indexOf(state.tab) + step + names.length) % names.length], true);
      event.preventDefault();
    });
    if (data.rows) restore();
    else {
      by("runs").hidden = true;
      by("cohort-note").textContent = cohortNote();
      const pairs = Address.read();
      show(pairs.get("tab") in tabs ? pairs.get("tab") : "runs");
    }
    timing.table = performance.now();
    requestAnimationFrame(() => setTimeout(loadPlotly));
  }

  function note(key, value) {
    noted.set(key, String(value));
    save();
  }

  start();
  return {
    data, columns, state, timing, show, note,
    noted: (key) => noted.get(key) ?? null,
    order: () => [...order],
    rerun: (row) => Rerun.command((name) => columns.get(name)?.value(row) ?? null, data.engine),
  };
})();
