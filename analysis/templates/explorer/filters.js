"use strict";

/* Filters over the columns and their controls. Each filter stores which rows it rejects, so that a change costs one
   pass over one column. The counts beside a filter's values are of the rows that all *other* filters accept. */
const Filters = (() => {
  const MOST_CHIPS = 14;
  const MOST_NAMED = 40; // columns that other parts of the page also filter by
  const NAMED = new Set(["cohort", "workload", "model", "world_size"]);

  class Model {
    /**
     * @param {ColumnMap} columns
     * @param {number} rows
     */
    constructor(columns, rows) {
      this.columns = columns;
      this.rows = rows;
      /** @type {Map<string, Filter>} */
      this.active = new Map();
      /** @type {Map<string, Uint8Array>} */
      this.fails = new Map();
      this.failed = new Uint16Array(rows); // number of filters that reject each row
    }

    /**
     * Replace the filter of one column; null removes it.
     * @param {string} name
     * @param {Filter|null} filter
     */
    set(name, filter) {
      const column = this.columns.get(name);
      const before = this.fails.get(name);
      if (before) for (let row = 0; row < this.rows; row++) this.failed[row] -= before[row];
      this.active.delete(name);
      this.fails.delete(name);
      if (!column || !filter) return;
      const fails = turnedDown(column, filter, this.rows);
      for (let row = 0; row < this.rows; row++) this.failed[row] += fails[row];
      this.active.set(name, filter);
      this.fails.set(name, fails);
    }

    clear() {
      for (const name of [...this.active.keys()]) this.set(name, null);
    }

    passes(row) {
      return this.failed[row] === 0;
    }

    /**
     * Number of rows per level of a column (last entry: unknown) that the other filters accept.
     * @param {Column} column
     */
    counts(column) {
      const own = this.fails.get(column.name);
      const counts = new Int32Array(column.levels.length + 1);
      const { codes } = column;
      const unknown = column.levels.length;
      for (let row = 0; row < this.rows; row++) {
        if (this.failed[row] === (own ? own[row] : 0)) counts[codes[row] < 0 ? unknown : codes[row]]++;
      }
      return counts;
    }
  }

  /**
   * For each row, 1 if the filter rejects it.
   * @param {Column} column
   * @param {Filter} filter
   * @param {number} rows
   */
  function turnedDown(column, filter, rows) {
    const fails = new Uint8Array(rows);
    if (filter.values) {
      const lets = column.levels.map((level) => filter.values.has(String(level)));
      const unknown = filter.values.has("");
      for (let row = 0; row < rows; row++) fails[row] = (column.codes[row] < 0 ? unknown : lets[column.codes[row]]) ? 0 : 1;
    } else if (filter.holds !== undefined) {
      const needle = filter.holds.toLowerCase();
      const lets = column.levels.map((level) => String(level).toLowerCase().includes(needle));
      for (let row = 0; row < rows; row++) fails[row] = column.codes[row] >= 0 && lets[column.codes[row]] ? 0 : 1;
    } else {
      const low = filter.low === null ? -Infinity : filter.low * column.scale;
      const high = filter.high === null ? Infinity : filter.high * column.scale;
      // A typed bound may be the rounded value of the table, which must pass.
      const slack = 1e-9 * Math.max(Math.abs(low), Math.abs(high)) || 0;
      const reach = Number.isFinite(slack) ? slack : 0;
      for (let row = 0; row < rows; row++) {
        const value = column.numbers[row];
        fails[row] = value >= low - reach && value <= high + reach ? 0 : 1;
      }
    }
    return fails;
  }

  /** @param {Column} column */
  function kindOf(column) {
    const most = NAMED.has(column.name) ? MOST_NAMED : MOST_CHIPS;
    if (column.levels && column.levels.length <= most && column.kind !== "time") return "values";
    return column.isText ? "holds" : "range";
  }

  /** Controls of the filters in `root`; `changed` is called with a column's name and its new filter. */
  class View {
    /**
     * @param {HTMLElement} root
     * @param {Model} model
     * @param {(name: string, filter: Filter|null) => void} changed
     */
    constructor(root, model, changed) {
      this.root = root;
      this.model = model;
      this.changed = changed;
      /** @type {Map<string, Facet>} */
      this.facets = new Map();
    }

    /** @param {Column} column */
    add(column) {
      if (this.facets.has(column.name)) return this.facets.get(column.name);
      const facet = { values: chips, holds: search, range: bounds }[kindOf(column)](column, (filter) => this.changed(column.name, filter));
      this.facets.set(column.name, facet);
      this.root.append(facet.root);
      return facet;
    }

    /** Update controls and counts from the model. */
    update() {
      for (const [name, facet] of this.facets) facet.update(this.model.active.get(name), this.model);
    }
  }

  function fieldset(column, ...children) {
    return element("fieldset", { "data-column": column.name }, element("legend", { title: column.description }, column.title), ...children);
  }

  /**
   * @param {Column} column
   * @param {(filter: Filter|null) => void} changed
   * @returns {Facet}
   */
  function chips(column, changed) {
    const boxes = [...column.sortedLevels, -1].map((code) => {
      const value = code < 0 ? "" : String(column.levels[code]);
      const box = element("input", { type: "checkbox", value, onchange: () => report() });
      const count = element("span", { class: "count" });
      const text = code < 0 ? "unknown" : column.write(column.levels[code]);
      const chip = element("label", { class: "chip" }, box, element("span", { class: "name" }, text), count);
      return { code, box, count, chip };
    });
    const report = () => {
      const values = new Set(boxes.filter(({ box }) => box.checked).map(({ box }) => box.value));
      changed(values.size ? { values } : null);
    };
    const unknown = column.codes.includes(-1);
    const root = fieldset(column, element("div", { class: "chips" }, ...boxes.map(({ chip }) => chip)));
    const update = (filter, model) => {
      const counts = model.counts(column);
      for (const { code, box, count, chip } of boxes) {
        const rows = counts[code < 0 ? column.levels.length : code];
        box.checked = Boolean(filter?.values?.has(box.value));
        count.textContent = rows.toLocaleString("en-GB");
        chip.classList.toggle("none", rows === 0 && !box.checked);
        if (code < 0) chip.hidden = !unknown;
      }
    };
    return { root, update };
  }

  /**
   * @param {Column} column
   * @param {(filter: Filter|null) => void} changed
   * @returns {Facet}
   */
  function bounds(column, changed) {
    const limits = [Infinity, -Infinity];
    for (const value of column.numbers) {
      if (value < limits[0]) limits[0] = value;
      if (value > limits[1]) limits[1] = value;
    }
    const input = (what, limit) =>
      element("input", { type: "number", step: "any", "aria-label": `${column.title}, ${what}`, placeholder: Columns.writeNumber(limit / column.scale), oninput: () => report() });
    const [low, high] = [input("at least", limits[0]), input("at most", limits[1])];
    const read = (field) => (field.value === "" ? null : Number(field.value));
    const report = () => changed(read(low) === null && read(high) === null ? null : { low: read(low), high: read(high) });
    const root = fieldset(column, element("div", { class: "bounds" }, low, element("span", {}, "to"), high));
    const update = (filter) => {
      /** @type {[HTMLInputElement, number|null][]} */
      const pairs = [[low, filter?.low ?? null], [high, filter?.high ?? null]];
      for (const [field, bound] of pairs) {
        if (read(field) !== bound) field.value = bound === null ? "" : String(bound);
      }
    };
    return { root, update };
  }

  /**
   * @param {Column} column
   * @param {(filter: Filter|null) => void} changed
   * @returns {Facet}
   */
  function search(column, changed) {
    const field = element("input", { type: "search", "aria-label": `${column.title} holds`, placeholder: "holds …", oninput: () => changed(field.value ? { holds: field.value } : null) });
    const update = (filter) => {
      if (field.value !== (filter?.holds ?? "")) field.value = filter?.holds ?? "";
    };
    return { root: fieldset(column, field), update };
  }

  /**
   * A filter in words: `tp: 4, 8`.
   * @param {Column} column
   * @param {Filter} filter
   */
  function words(column, filter) {
    const named = (value) => (value === "" ? "unknown" : column.isText ? column.say(value) : column.write(Number(value)));
    if (filter.values) return `${column.label}: ${[...filter.values].map(named).join(", ")}`;
    if (filter.holds !== undefined) return `${column.label} holds “${filter.holds}”`;
    const { low, high } = filter;
    const range = low === null ? `at most ${high}` : high === null ? `at least ${low}` : `${low} to ${high}`;
    return `${column.label}: ${range} ${column.unit}`.trim();
  }

  return { Model, View, words };
})();
