"use strict";

/* One part of the results, i.e. comparable rows: its cells (a model on a number of devices) and its ranked layouts with
   their values. This file does not use the DOM. */
class Part {
  /** @type {Set<string>|undefined} */
  _minor;

  /**
   * @param {PackedPart} packed
   * @param {ColumnMap} columns every row's columns (Columns.unpack)
   */
  constructor(packed, columns) {
    this.slug = packed.slug;
    this.title = packed.title;
    this.meaning = packed.meaning;
    this.stamp = packed.stamp;
    this.method = packed.method;
    this.rows = packed.rows;
    this.noun = packed.noun;
    this.device = packed.device;
    this.powerLimit = packed.power_limit_w;
    this.capacity = packed.capacity;
    this.memory = packed.memory;
    this.points = packed.points;
    this.choices = packed.choices;
    this.settings = packed.settings;
    this.waiting = packed.waiting;
    this.columns = columns;
    /** @type {Ranked} */
    this.ranked = packed.ranked ?? { row: [], rate: [], repeats: [], noise: [], freedom: [], from: [], sources: [] };
    this.isPlan = packed.method === "planned";
    /** @type {Map<string, Cell>} */
    this.cells = new Map();
    this.gpuName = this.noun === "GPUs" ? (this.device ?? "").replace(/^NVIDIA /, "").split(" ")[0] : "";
    const cell = (row) => this.at(this.text("workload", row), this.number("world_size", row), true);
    this.points.rows.forEach((row, place) => {
      if (!this.points.again[place]) cell(row).points.push(row);
    });
    this.ranked.row.forEach((row, place) => cell(row).layouts.push(place));
    for (const one of this.waiting ?? []) {
      const found = this.at(one.workload, one.world_size, true);
      found.waiting += one.points;
      found.next = one;
    }
    this.sizes = [...new Set([...this.cells.values()].map((found) => found.size))].sort((a, b) => a - b);
    const named = new Set([...this.cells.values()].map((found) => found.workload));
    this.workloads = [...packed.workloads.filter((name) => named.has(name)), ...[...named].filter((name) => !packed.workloads.includes(name))];
  }

  /**
   * The cell of a model and a number of devices. If there is none: undefined, or with `make` a new one.
   * @param {string} workload
   * @param {number} size
   */
  at(workload, size, make = false) {
    const key = `${workload}\n${size}`;
    if (make && !this.cells.has(key)) this.cells.set(key, { workload, size, points: [], layouts: [], waiting: 0 });
    return this.cells.get(key);
  }

  /**
   * @param {string} name
   * @param {number} row
   */
  value(name, row) {
    return this.columns.get(name)?.value(row) ?? null;
  }

  /** Value of a column of numbers. @returns {number|null} */
  number(name, row) {
    return /** @type {number|null} */ (this.value(name, row));
  }

  /** Value of a column of texts. @returns {string|null} */
  text(name, row) {
    return /** @type {string|null} */ (this.value(name, row));
  }

  /** Function that reads a row's columns, for `Words.layout` and `Rerun.command`. */
  reader(row) {
    return (name) => this.value(name, row);
  }

  row(place) {
    return this.ranked.row[place];
  }

  /** Tokens per second and device of a layout, with its repeats pooled. */
  rate(place) {
    return this.ranked.rate[place];
  }

  /** The row's value of a column proportional to the throughput, scaled to the pooled repeats. */
  pooled(name, place) {
    const [value, own] = [this.number(name, this.row(place)), this.number("tokens_per_s_per_gpu", this.row(place))];
    return value === null || !own ? value : (value * this.rate(place)) / own;
  }

  mfu(place) {
    return this.pooled("mfu_palm", place);
  }

  stepTime(place) {
    const [value, own] = [this.number("step_time_s", this.row(place)), this.number("tokens_per_s_per_gpu", this.row(place))];
    return value === null || !own ? value : (value * own) / this.rate(place);
  }

  /** Peak memory in bytes by the column that these rows have. */
  memoryOf(place) {
    return this.number(this.memory, this.row(place));
  }

  /** The short name of a ranked layout, or of a row. */
  layoutName(place, row = this.row(place)) {
    return this.text("layout", row);
  }

  /** GPU-hours for this many tokens at the speed of the timed steps. */
  hours(place, tokens) {
    return tokens / this.rate(place) / 3600;
  }

  /**
   * Distinct values that the given rows have in a column.
   * @param {string} name
   * @param {number[]} rows
   */
  valuesOf(name, rows) {
    const column = this.columns.get(name);
    if (!column) return [];
    return [...new Set(rows.map((row) => column.value(row)))].filter((value) => value !== null).sort((a, b) => (a < b ? -1 : 1));
  }

  /** Workloads with few points compared with the others: variants that the map folds away. */
  get minor() {
    if (!this._minor) {
      const count = new Map(this.workloads.map((name) => [name, 0]));
      for (const { workload, points, waiting } of this.cells.values()) count.set(workload, count.get(workload) + points.length + waiting);
      const most = Math.max(0, ...count.values());
      this._minor = new Set(this.workloads.length > 6 ? this.workloads.filter((name) => count.get(name) < 0.06 * most) : []);
    }
    return this._minor;
  }
}
