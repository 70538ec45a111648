"use strict";

/* "Every run": one state, the views that show it, and the actions that change it. */
const Runs = (() => {
  const CHART = "runs-echarts"; // the script element of the chart library
  const KEYS = ["r.*"];
  const number = (count) => count.toLocaleString("en-GB");

  /**
   * Start the section.
   * @param {object} given
   * @param {HTMLElement} given.root The markup of `explorer/runs.html`.
   * @param {RunsData} given.data What `analysis.explorer.page_data` gives.
   * @param {ColumnMap} given.columns `Columns.unpack(data)`.
   * @param {Claim} [given.hash] `Address.claim("runs", ["r.*"])`, which is the default.
   * @param {(row: number) => void} [given.onopen] Called with a row's number when its drawer opens.
   * The functions that it returns say what they do; `state` and `plot` are for tests and the console.
   */
  function mount({ root, data, columns, hash = Address.claim("runs", KEYS), onopen = () => {} }) {
    /** @type {(id: string) => HTMLElement} */
    const by = (id) => root.querySelector(`#runs-${id}`);
    const filters = new Filters.Model(columns, data.rows);
    const state = new ViewState.State(data, columns, filters);
    /** @type {Timing} */
    const timing = {};
    const table = new Table.View(by("table"), { move, open, toggle, sort });
    const plot = new Plot.View(by("plot"), by("legend"), columns, data.cohorts, { open, select, lines, zoom: () => axes.update(plot.mode, plot.isZoomed) });
    const drawer = new Drawer.View(by("drawer"), data, columns, { open, close, view });
    const facets = new Filters.View(by("facets"), filters, setFilter);
    const axes = new Axes.View(by("axes"), by("tools"), state, { choose, log, mode, whole });
    let usual = new Map(); // the first view, of which the address says nothing
    let passing = new Int32Array(0); // rows that the filters let through, in the table's order: those of the plot
    let order = passing; // rows of the table: these, or those of them that are selected
    let drawing = 0;
    let charts = false;
    let written = "";
    const narrow = matchMedia("(max-width: 50rem)");

    // ---- what is shown ---------------------------------------------------------------------------------------

    function render({ rows = true, points = true, keepZoom = false } = {}) {
      if (rows) {
        passing = Table.order(data.rows, (row) => filters.passes(row), columns.get(state.sort.name), state.sort.descending);
        facets.update();
      }
      order = state.only && state.selected.size ? passing.filter((row) => state.selected.has(row)) : passing;
      table.show({ columns: tableColumns(), order, selected: state.selected, current: state.current, sort: state.sort });
      writeStatus();
      if (points) schedulePlot(keepZoom);
      save();
    }

    function tableColumns() {
      const names = new Set([...data.table, state.x, state.y, state.colour, state.size]);
      const said = (name) => filters.active.get(name)?.values?.size === 1; // the filter above the table names it
      const hidden = { cohort: data.cohorts.length < 2 || said("cohort"), model: said("model") || said("workload"), world_size: said("world_size") };
      const found = [...names].map((name) => columns.get(name)).filter((column) => column && !hidden[column.name]);
      const place = (column) => ["layout", state.y, state.x].indexOf(column.name) >>> 0; // columns without a place come last
      return narrow.matches ? found.toSorted((a, b) => place(a) - place(b)) : found;
    }

    function writeStatus() {
      const chosen = state.selected.size;
      by("count").textContent = `${number(order.length)} of ${number(data.rows)} rows${chosen ? `, ${number(chosen)} selected` : ""}`;
      by("unselect").hidden = by("only").hidden = chosen === 0;
      by("only").setAttribute("aria-pressed", String(state.only));
      by("filter-count").textContent = filters.active.size ? `${filters.active.size} active` : "none active";
      by("note").textContent = note();
      by("active").replaceChildren(...[...filters.active].map(([name, filter]) => {
        const text = Filters.words(columns.get(name), filter);
        return element("button", { type: "button", class: "tag", "aria-label": `Take away the filter ${text}`, onclick: () => setFilter(name, null) }, element("span", {}, text), element("span", { "aria-hidden": "true" }, " ✕"));
      }));
      /** @type {HTMLButtonElement} */ (by("csv")).disabled = order.length === 0;
    }

    function note() {
      if (data.rows === 0) return "Nothing has been run yet: there is no row to show.";
      const values = filters.active.get("cohort")?.values;
      const shown = data.cohorts.filter((cohort) => !values || values.has(cohort.title));
      if (shown.length === 1) return `${shown[0].title}. ${shown[0].meaning}`;
      return `${shown.length} parts in view, not comparable with each other: each has a marker of its own. ${shown.map((cohort) => `${cohort.title}${cohort.stamp ? ` (${cohort.stamp})` : ""}`).join("; ")}.`;
    }

    /** Draw after the browser has shown the table; of several requests, only the last one is drawn. */
    function schedulePlot(keepZoom = false) {
      if (!charts || !data.rows) return;
      cancelAnimationFrame(drawing);
      timing.plotted = false;
      drawing = requestAnimationFrame(() => setTimeout(() => drawPlot(keepZoom)));
    }

    function drawPlot(keepZoom) {
      const began = performance.now();
      const { unplaced, unsized, promise } = plot.show({
        rows: passing, selected: state.selected, current: state.current, logX: state.onLog("X"), logY: state.onLog("Y"), keepZoom,
        x: columns.get(state.x), y: columns.get(state.y), colour: columns.get(state.colour), size: columns.get(state.size),
      });
      const logs = state.onLog("X") || state.onLog("Y") ? " above 0" : "";
      const notes = [];
      if (unplaced) notes.push(`${number(unplaced)} of these rows have no ${columns.get(state.x).label} or no ${columns.get(state.y).label}${logs} and are only in the table.`);
      if (unsized) notes.push(`${number(unsized)} points without a ${columns.get(state.size).label} are drawn smallest.`);
      by("plot-note").textContent = notes.join(" ");
      axes.update(plot.mode, plot.isZoomed);
      promise.then(() => {
        timing.plot = performance.now() - began;
        timing.open ??= performance.now();
        timing.plotted = true;
      });
    }

    /** The lines of text for the point under the pointer. */
    function lines(row) {
      const shown = [...new Set(["outcome", state.x, state.y, state.colour, state.size])].map((name) => columns.get(name)).filter((column) => column && column.value(row) !== null);
      return [`${columns.get("workload")?.text(row) ?? ""}, ${columns.get("layout")?.text(row) ?? ""}`, ...shown.map((column) => `${column.label}: ${column.text(row)} ${column.unit}`.trim())];
    }

    // ---- actions ---------------------------------------------------------------------------------------------

    function refilter(change) {
      const began = performance.now();
      change();
      render();
      timing.filter = performance.now() - began;
    }

    function setFilter(name, filter) {
      refilter(() => filters.set(name, filter));
    }

    function move(row) {
      state.current = row;
      table.current = row;
      table.reveal(row);
      if (state.open) drawer.show(row, state.view);
      render({ rows: false, keepZoom: true });
    }

    /** Open the drawer of a row; -1: without a row, for the models only. */
    function open(row, name = "run") {
      Object.assign(state, { current: row < 0 ? state.current : row, open: true, view: name });
      if (row >= 0) table.reveal(row);
      drawer.show(row, name);
      render({ rows: false, keepZoom: true });
      drawer.focus();
      if (row >= 0) onopen(row);
    }

    function view(name) {
      state.view = name;
      drawer.show(drawer.row, name);
      save();
    }

    function close() {
      state.open = false;
      drawer.hide();
      save();
      table.focus();
    }

    /** Add a row to the selection or remove it; `extend`: all rows of the table since the last toggled one. */
    function toggle(row, extend) {
      const from = Array.prototype.indexOf.call(order, state.anchor);
      const to = Array.prototype.indexOf.call(order, row);
      if (extend && from >= 0) for (let place = Math.min(from, to); place <= Math.max(from, to); place++) state.selected.add(order[place]);
      else if (!state.selected.delete(row)) state.selected.add(row);
      Object.assign(state, { anchor: row, current: row });
      render({ rows: false, keepZoom: true });
    }

    function select(rows) {
      state.selected = new Set(rows);
      state.only = rows.length > 0;
      render({ rows: false, keepZoom: true });
    }

    function sort(name) {
      const { sort: now } = state;
      state.sort = { name, descending: now.name === name ? !now.descending : !columns.get(name).isText };
      render({ points: false });
    }

    function choose(axis, name) {
      state.choose(axis, name);
      render({ rows: false });
    }

    function log(axis, on) {
      state[`log${axis}`] = on;
      render({ rows: false });
    }

    function mode(name) {
      plot.setMode(plot.mode === name ? "" : name);
      axes.update(plot.mode, plot.isZoomed);
    }

    function whole() {
      plot.zoomTo([[0, 100], [0, 100]]);
    }

    // ---- the address -----------------------------------------------------------------------------------------

    function save() {
      const pairs = state.pairs(usual);
      written = JSON.stringify([...pairs]);
      hash.write(pairs);
    }

    function restore() {
      const pairs = hash.read();
      if (JSON.stringify([...pairs]) === written) return; // changed by another part of the page
      const notices = state.restore(pairs);
      for (const name of filters.active.keys()) facets.add(columns.get(name));
      by("notice").textContent = notices.join(" ");
      by("notice").hidden = notices.length === 0;
      const { open: opened, current, view: shown } = state;
      axes.update(plot.mode, plot.isZoomed);
      render();
      if (opened) open(current, shown);
      else {
        drawer.hide();
        if (current >= 0) move(current);
      }
    }

    // ---- start -----------------------------------------------------------------------------------------------

    /**
     * The library takes longer to start than everything else together, so it runs when the section is near the screen.
     */
    async function loadCharts() {
      await LateScripts.run(CHART);
      timing.charts = performance.now();
      charts = true;
      by("plot").removeAttribute("aria-busy");
      schedulePlot();
    }

    function nearby(then) {
      const observer = new IntersectionObserver((entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(then));
      }, { rootMargin: "600px" });
      observer.observe(root);
    }

    function offerMore() {
      const more = /** @type {HTMLSelectElement} */ (by("more"));
      const rest = state.plottable.filter((column) => !facets.facets.has(column.name));
      more.append(element("option", { value: "" }, "choose …"), ...rest.map((column) => element("option", { value: column.name }, column.title)));
      more.addEventListener("change", () => {
        if (!more.value) return;
        const facet = facets.add(columns.get(more.value));
        more.selectedOptions[0].remove();
        facets.update();
        facet.root.querySelector("input").focus();
      });
    }

    function start() {
      if (narrow.matches) /** @type {HTMLDetailsElement} */ (by("filters")).open = false;
      for (const name of data.filters) if (columns.get(name).several) facets.add(columns.get(name));
      offerMore();
      by("reset").addEventListener("click", () => refilter(() => state.resetFilters()));
      by("unselect").addEventListener("click", () => select([]));
      by("only").addEventListener("click", () => { state.only = !state.only; render({ rows: false, points: false }); });
      by("csv").addEventListener("click", () => Csv.download("runs.csv", Csv.text(columns, order)));
      for (const name of ["memory", "pipeline"]) by(`open-${name}`).addEventListener("click", () => open(-1, name));
      root.addEventListener("keydown", (event) => event.key === "Escape" && state.open && close());
      window.addEventListener("themechange", () => schedulePlot(true));
      window.addEventListener("hashchange", restore);
      state.reset();
      usual = state.everything();
      if (data.rows) {
        restore();
        nearby(loadCharts);
      } else {
        by("body").hidden = true;
        by("note").textContent = note();
      }
      timing.table = performance.now();
    }

    start();
    return {
      timing,
      state,
      plot,
      /**
       * Set exactly these filters, as if the user had; filters on other columns stay.
       * @param {Object<string, ?(string|number|Array)>} wanted Value, or values, of `cohort` (its title), `workload`,
       *   `world_size` and any other column; null or missing for these three: no filter on it.
       */
      focus(wanted) {
        refilter(() => {
          for (const name of new Set(["cohort", "workload", "world_size", ...Object.keys(wanted)])) {
            if (!columns.has(name)) continue;
            const values = [wanted[name] ?? []].flat();
            filters.set(name, values.length ? { values: new Set(values.map(String)) } : null);
          }
        });
      },
      /** Reset to the first view: first part, no other filter, nothing selected or open. */
      clear() {
        if (state.open) drawer.hide();
        state.reset();
        axes.update(plot.mode, plot.isZoomed);
        render();
      },
      /** Open the drawer of an attempt; returns false if it has no row. `name`: "run", "memory" or "pipeline". */
      open(attemptId, name = "run") {
        const row = state.find(attemptId);
        if (row >= 0) open(row, name);
        return row >= 0;
      },
      /** Row numbers of the table, in its order. */
      order: () => [...order],
      /** {words, notes} of the command that runs a row again, or {missing}: the reason why there is none. */
      rerun: (row) => Rerun.anywhere((name) => columns.get(name)?.value(row) ?? null, data),
    };
  }

  return { mount };
})();
