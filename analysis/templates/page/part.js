"use strict";

/* One part of the results, rows that may be compared with each other: its cells (a model on a number of devices), its
   ranked layouts, and what is known of each. No DOM here. */
class Part {
  /**
   * @param {object} packed an entry of `parts` of analysis/page/page_data.py
   * @param {Map<string, object>} columns every row's columns (Columns.unpack)
   */
  constructor(packed, columns) {
    Object.assign(this, packed);
    this.columns = columns;
    this.ranked ??= { row: [], rate: [], repeats: [], noise: [], freedom: [], from: [], sources: [] };
    this.isPlan = packed.method === "planned";
    this.cells = new Map();
    this.gpuName = this.noun === "GPUs" ? (this.device ?? "").replace(/^NVIDIA /, "").split(" ")[0] : "";
    const cell = (row) => this.at(this.value("workload", row), this.value("world_size", row), true);
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
    this.workloads = [...this.workloads.filter((name) => named.has(name)), ...[...named].filter((name) => !packed.workloads.includes(name))];
  }

  /** The cell of a model and a number of devices; undefined, or with `make` a new one, where there is none. */
  at(workload, size, make = false) {
    const key = `${workload}\n${size}`;
    if (make && !this.cells.has(key)) this.cells.set(key, { workload, size, points: [], layouts: [], waiting: 0 });
    return this.cells.get(key);
  }

  /** A value of a row: text, number or null. */
  value(name, row) {
    return this.columns.get(name)?.value(row) ?? null;
  }

  /** What `Words.layout` and `Rerun.command` read a row by. */
  reader(row) {
    return (name) => this.value(name, row);
  }

  row(place) {
    return this.ranked.row[place];
  }

  /** Tokens a second and device of a layout, its repeats pooled. */
  rate(place) {
    return this.ranked.rate[place];
  }

  /** The row's value of a column that is proportional to the throughput, for the pooled repeats. */
  pooled(name, place) {
    const [value, own] = [this.value(name, this.row(place)), this.value("tokens_per_s_per_gpu", this.row(place))];
    return value === null || !own ? value : (value * this.rate(place)) / own;
  }

  mfu(place) {
    return this.pooled("mfu_palm", place);
  }

  stepTime(place) {
    const [value, own] = [this.value("step_time_s", this.row(place)), this.value("tokens_per_s_per_gpu", this.row(place))];
    return value === null || !own ? value : (value * own) / this.rate(place);
  }

  /** Peak memory in bytes, as far as these rows know it. */
  memoryOf(place) {
    return this.value(this.memory, this.row(place));
  }

  layoutName(place) {
    return this.value("layout", this.row(place));
  }

  /** GPU-hours for so many tokens at the speed of the timed steps. */
  hours(place, tokens) {
    return tokens / this.rate(place) / 3600;
  }

  /** Whether this part has values in a column, and which. */
  valuesOf(name, rows) {
    const column = this.columns.get(name);
    if (!column) return [];
    return [...new Set(rows.map((row) => column.value(row)))].filter((value) => value !== null).sort((a, b) => (a < b ? -1 : 1));
  }

  /** Workloads with few points beside the others: variants that the map folds away. */
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
