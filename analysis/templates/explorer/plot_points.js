"use strict";

/* Positions of rows on the plot, without drawing: axes, points, failures without a position, the front. */
const PlotPoints = (() => {
  const MOST_STEPS = 14;
  const MEMORY = /^(peak_allocated|peak_reserved|predicted_peak|allocated_after_step)_bytes$/;
  const RATE = /^((predicted_)?tokens_per_s(_per_gpu)?|mfu_\w+|hfu|published_mfu)$/;
  const SHARED = ["cohort", "workload", "world_size"];

  /** Whether a column is shown in steps: texts, and whole numbers with few values. */
  const isStepped = (column) => column.isText || (column.kind === "number" && Boolean(column.levels) && column.levels.length <= MOST_STEPS && column.levels.every(Number.isInteger));

  const isMemory = (column) => MEMORY.test(column.name);
  const isRate = (column) => RATE.test(column.name);

  /**
   * Numbers that place points: in the table's unit, steps by their rank, times in ms. NaN: unknown.
   * @param {Column} column
   */
  function values(column) {
    if (column.axis) return column.axis;
    if (isStepped(column)) {
      const place = new Float64Array(column.levels.length);
      column.sortedLevels.forEach((code, position) => (place[code] = position));
      column.axis = Float64Array.from(column.codes, (code) => (code < 0 ? NaN : place[code]));
    } else {
      const factor = column.kind === "time" ? 1000 : 1 / column.scale;
      column.axis = column.keys.map((value) => value * factor);
    }
    return column.axis;
  }

  /**
   * Failure of a row: 0 none (or not run), 1 out of memory, 2 other.
   * @param {ColumnMap} columns
   * @returns {(row: number) => number}
   */
  function failure(columns) {
    const outcome = columns.get("outcome");
    if (!outcome) return () => 0;
    const kinds = outcome.levels.map((level) => (level === "ok" || level === "cancelled" ? 0 : level === "oom" ? 1 : 2));
    return (row) => (outcome.codes[row] < 0 ? 0 : kinds[outcome.codes[row]]);
  }

  /**
   * Sorts rows by the area in which they can be drawn. `placed`: both values known; `beyond`: failures in the band at
   * the right; `below`: failures with only the x value, in the strip under the plot; `unplaced`: number of rows that
   * are only in the table.
   * @param {Asked & {fails: (row: number) => number}} asked
   * @returns {{placed: number[], beyond: number[], below: number[], unplaced: number}}
   */
  function place({ rows, x, y, logX, logY, fails }) {
    const [xs, ys] = [values(x), values(y)];
    const found = { placed: [], beyond: [], below: [], unplaced: 0 };
    for (const row of rows) {
      const [a, b] = [xs[row], ys[row]];
      const [across, up] = [a === a && (!logX || a > 0), b === b && (!logY || b > 0)];
      if (across && up) found.placed.push(row);
      else if (!fails(row)) found.unplaced++;
      else if (across && !isMemory(x)) found.below.push(row);
      else found.beyond.push(row);
    }
    return found;
  }

  /**
   * A round number at least as large as `value`: 1, 2, 2.5 or 5 times a power of ten.
   * @param {number} value
   */
  function round(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= value * (1 - 1e-9));
  }

  /**
   * [least, most] of an axis over the values of `rows` and `more`; rates and bytes begin at 0 unless all are far from
   * it.
   * @param {Column} column
   * @param {number[]} rows
   * @param {boolean} log
   * @param {number[]} [more]
   */
  function extent(column, rows, log, more = []) {
    if (isStepped(column)) return [-0.5, column.levels.length - 0.5];
    const places = values(column);
    let [low, high] = [Infinity, -Infinity];
    const see = (value) => { if (value < low) low = value; if (value > high) high = value; };
    for (const row of rows) see(places[row]);
    more.forEach(see);
    if (low > high) return [log ? 1 : 0, log ? 10 : 1];
    if (log) return [low / 1.25, high * 1.25];
    if (column.kind === "time") return [low - 1, high + 1];
    if (more.length && high === more.at(-1)) return [0, 1.03 * high]; // nothing beyond the device's memory
    const from = low >= 0 && low < 0.6 * high ? 0 : low;
    const step = round((high - from || Math.abs(high) || 1) / 5);
    return [from === 0 ? 0 : Math.floor(low / step) * step, Math.ceil((high + 0.02 * step) / step) * step];
  }

  /**
   * Positions of the labelled steps among `count`, with room for `most` labels.
   * @param {number} count
   * @param {number} most
   */
  function steps(count, most) {
    const every = Math.ceil(count / Math.max(1, most));
    return Array.from({ length: Math.ceil(count / every) }, (_, at) => at * every);
  }

  /**
   * Round positions on a logarithmic axis: 1, 2, 5 and their multiples of ten, or powers of ten alone if there are
   * many.
   * @param {number[]} ends
   */
  function decades([low, high]) {
    const wide = high / low > 2000;
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const step of wide ? [1] : [1, 2, 5]) found.push(Number((step * 10 ** power).toPrecision(1)));
    }
    const inside = found.filter((value) => value >= low && value <= high);
    return inside.length > 1 ? inside : [low, Math.sqrt(low * high), high].map((value) => Number(value.toPrecision(3)));
  }

  /**
   * Memory limits in the unit of `x`: the plan's limits, otherwise the memory of the devices; at most two.
   * @param {ColumnMap} columns
   * @param {Int32Array} rows
   * @param {Column} x
   */
  function capacities(columns, rows, x) {
    const column = columns.get("limit_bytes") ?? columns.get("device_memory_bytes");
    if (!column || !isMemory(x)) return [];
    const found = new Map();
    for (const row of rows) {
      const bytes = column.numbers[row];
      if (bytes === bytes) found.set(Math.round(bytes / 2 ** 28), bytes / x.scale);
    }
    return found.size <= 2 ? [...found.values()].sort((a, b) => a - b) : [];
  }

  /**
   * Rows for which no row with as little memory is faster, least memory first; none if the rows are of several kinds.
   * @param {ColumnMap} columns
   * @param {number[]} placed
   * @param {Column} x
   * @param {Column} y
   * @param {(row: number) => number} fails
   */
  function front(columns, placed, x, y, fails) {
    if (!isMemory(x) || !isRate(y) || !placed.length) return [];
    for (const name of SHARED) {
      const column = columns.get(name);
      if (column && placed.some((row) => column.keys[row] !== column.keys[placed[0]])) return [];
    }
    const [xs, ys] = [values(x), values(y)];
    const best = [];
    for (const row of placed.filter((row) => !fails(row)).sort((a, b) => xs[a] - xs[b] || ys[b] - ys[a])) {
      if (!best.length || ys[row] > ys[best.at(-1)]) best.push(row);
    }
    return best;
  }

  /**
   * Offsets [dx, dy] in pixels from the lower left corner, row by row from below, that fit `count` marks into a box;
   * and the distance between two marks.
   * @param {number} count
   * @param {number} width
   * @param {number} height
   * @param {number} [most] Largest distance.
   */
  function packed(count, width, height, most = 10) {
    let step = most;
    while (step > 1.5 && Math.floor(width / step) * Math.floor(height / step) < count) step -= 0.25;
    const across = Math.max(1, Math.floor(width / step));
    const offsets = Array.from({ length: count }, (_, place) => [(place % across) * step + step / 2, Math.floor(place / across) * step + step / 2]);
    return { offsets, step };
  }

  /**
   * A fixed offset of a row from -0.5 to 0.5, which spreads the points of one step.
   * @type {(row: number, factor: number) => number}
   */
  const aside = (row, factor) => ((row * factor) % 997) / 997 - 0.5;

  /**
   * Whether a point lies inside a lasso.
   * @param {Pair[]} polygon
   * @param {number} x
   * @param {number} y
   */
  function within(polygon, x, y) {
    let inside = false;
    for (let at = 0, before = polygon.length - 1; at < polygon.length; before = at++) {
      const [[ax, ay], [bx, by]] = [polygon[at], polygon[before]];
      if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
    }
    return inside;
  }

  return { aside, capacities, decades, extent, failure, front, isMemory, isStepped, packed, place, steps, values, within };
})();
