"use strict";

/* State of the view of rows: axes, order, filters, selection. It has a default view and is stored in the address. */
const ViewState = (() => {
  const AXES = [["x", "x"], ["y", "y"], ["c", "colour"], ["s", "size"]]; // field by key in the address
  const PREFIX = "r.";

  class State {
    /** Names of columns for x, y, colour and size; empty for none. */
    x = "";
    y = "";
    colour = "";
    size = "";
    logX = false;
    logY = false;
    /** @type {Sort} */
    sort = { name: "", descending: false };
    /** Numbers of selected rows. @type {Set<number>} */
    selected = new Set();
    /** The current row of the table; -1: none. */
    current = -1;
    /** Whether the drawer is open, and which of its views is shown. */
    open = false;
    view = "run";
    /** Whether the table shows only the selection. */
    only = false;
    /** The row toggled last; -1: none. */
    anchor = -1;

    /**
     * @param {RunsData} data
     * @param {ColumnMap} columns
     * @param {FilterModel} filters
     */
    constructor(data, columns, filters) {
      this.data = data;
      this.columns = columns;
      this.filters = filters;
      this.plottable = [...columns.values()].filter((column) => this.usable(column));
    }

    /** @param {Column|undefined} column */
    usable(column) {
      return column !== undefined && (column.several || this.data.rows < 2);
    }

    /** Reset: peak memory on x, throughput on y, one colour per tp; only the first part's rows. */
    reset() {
      const { columns } = this;
      const first = (...names) => names.find((name) => this.usable(columns.get(name))) ?? this.plottable[0]?.name ?? "";
      const memory = columns.has("peak_allocated_bytes") ? "peak_allocated_bytes" : "peak_reserved_bytes";
      this.x = first(memory, "predicted_peak_bytes", "duration_s", "world_size");
      this.y = first("tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu", "predicted_step_time_s", "duration_s", "tp");
      this.colour = ["tp", "workload", "outcome"].find((name) => columns.get(name)?.several) ?? "";
      this.size = "";
      [this.logX, this.logY] = [wide(columns.get(this.x)), wide(columns.get(this.y))];
      const fastest = ["tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu"].find((name) => columns.has(name));
      this.sort = fastest ? { name: fastest, descending: true } : { name: "", descending: false };
      this.selected = new Set();
      Object.assign(this, { current: -1, only: false, open: false, view: "run" });
      this.resetFilters();
    }

    /** Parts are not comparable, so by default only the first is shown. */
    resetFilters() {
      this.filters.clear();
      const { cohorts } = this.data;
      if (cohorts.length > 1) this.filters.set("cohort", { values: new Set([cohorts[0].title]) });
    }

    choose(axis, name) {
      this[axis] = name;
      if (axis === "x" || axis === "y") this[axis === "x" ? "logX" : "logY"] = wide(this.columns.get(name));
    }

    /** Whether an axis is logarithmic: as asked, but never for a column shown in steps. */
    onLog(axis) {
      const column = this.columns.get(this[axis.toLowerCase()]);
      return this[`log${axis}`] && Boolean(column) && !PlotPoints.isStepped(column);
    }

    /** The whole state as pairs of the address, including defaults. */
    everything() {
      /** @type {Map<string, string>} */
      const pairs = new Map(AXES.map(([key, field]) => [key, this[field] ?? ""]));
      pairs.set("log", `${this.logX ? "x" : ""}${this.logY ? "y" : ""}`);
      pairs.set("sort", `${this.sort.descending ? "-" : ""}${this.sort.name}`);
      pairs.set("f", [...this.filters.active].map(([name, filter]) => `${name}=${Address.filterText(filter)}`).sort().join("\n"));
      return pairs;
    }

    /**
     * Pairs that differ from the first view, for the address.
     * @param {Map<string, string>} usual
     */
    pairs(usual) {
      /** @type {Map<string, string>} */
      const pairs = new Map();
      for (const [key, value] of this.everything()) {
        if (value === usual.get(key)) continue;
        pairs.set(PREFIX + key, key === "f" ? "1" : value); // all active filters are named, and those of the first view are not added
        if (key === "f") for (const [name, filter] of this.filters.active) pairs.set(`${PREFIX}f.${name}`, Address.filterText(filter));
      }
      if (this.selected.size) pairs.set(`${PREFIX}sel`, `${this.data.fingerprint}:${Address.rowsText(this.selected)}`).set(`${PREFIX}only`, this.only ? "1" : "0");
      if (this.current >= 0) pairs.set(PREFIX + (this.open ? "row" : "at"), String(this.columns.get("attempt_id").value(this.current)));
      if (this.open && this.view !== "run") pairs.set(`${PREFIX}view`, this.view);
      return pairs;
    }

    /**
     * Apply the pairs of the address to the first view; returns sentences on names that this page lacks.
     * @param {Map<string, string>} pairs
     */
    restore(pairs) {
      const text = (key) => pairs.get(PREFIX + key);
      const has = (key) => pairs.has(PREFIX + key);
      const { columns } = this;
      const notices = [];
      this.reset();
      for (const [key, field] of AXES) {
        if (!has(key)) continue;
        if (columns.has(text(key)) || (text(key) === "" && field !== "x" && field !== "y")) this.choose(field, text(key));
        else if (text(key)) notices.push(`There is no column ${text(key)} here.`);
      }
      if (has("log")) [this.logX, this.logY] = ["x", "y"].map((axis) => text("log").includes(axis));
      const sorted = text("sort")?.replace(/^-/, "");
      if (has("sort") && (columns.has(sorted) || !sorted)) this.sort = { name: sorted, descending: text("sort").startsWith("-") };
      if (has("f")) this.filters.clear();
      for (const [key, value] of pairs) {
        if (!key.startsWith(`${PREFIX}f.`)) continue;
        const name = key.slice(PREFIX.length + 2);
        if (columns.has(name)) this.filters.set(name, Address.filterOf(value));
        else notices.push(`The filter on ${name} is left out: there is no such column here.`);
      }
      if (has("sel")) {
        const [made, rows] = text("sel").split(":");
        if (made === this.data.fingerprint) Object.assign(this, { selected: new Set(Address.rowsOf(rows ?? "", this.data.rows)), only: text("only") === "1" });
        else notices.push("The selection in the address is of other rows than this page has; it is left out.");
      }
      this.view = text("view") ?? "run";
      const id = text("row") ?? text("at") ?? null;
      this.current = id === null ? -1 : this.find(id);
      this.open = has("row") ? this.current >= 0 : has("view");
      if (id !== null && this.current < 0) notices.push(`The row ${id} of the address is not in this page.`);
      return notices;
    }

    /** The number of the row with an attempt's id; -1 if there is none. */
    find(id) {
      const ids = this.columns.get("attempt_id");
      for (let row = 0; ids && row < this.data.rows; row++) if (ids.value(row) === id) return row;
      return -1;
    }
  }

  /**
   * Whether a column's positive values span more than two decades; it then gets a logarithmic axis. @param
   * {Column|undefined} column
   */
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

  return { State };
})();
