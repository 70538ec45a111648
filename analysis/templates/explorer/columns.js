"use strict";

/* The embedded columns, unpacked on first use: values, how they are written, how they sort. Also `element`, the only
   way in which this page makes elements: texts are always inserted as text. */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} [attributes] Names that begin with `on` are listeners; null, undefined and false are
 *    skipped.
 * @param {...(Node|string|null|undefined)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const Columns = (() => {
  /** @type {Record<string, [number, string]>} */
  const SCALES = { B: [2 ** 30, "GiB"], fraction: [0.01, "%"], "FLOP/s": [1e12, "TFLOP/s"], "B/s": [1e9, "GB/s"], FLOP: [1e9, "GFLOP"] };
  const UNKNOWN = "–";
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
  const four = new Intl.NumberFormat("en-GB", { maximumSignificantDigits: 4 });

  function writeNumber(value) {
    if (Math.abs(value) >= 1e12 || (value !== 0 && Math.abs(value) < 1e-4)) return value.toExponential(3);
    return Number.isInteger(value) || Math.abs(value) >= 1000 ? whole.format(value) : four.format(value);
  }

  class Column {
    /** @type {(string|number)[]|null|undefined} */
    _levels;
    /** @type {Int32Array|undefined} */
    _codes;
    /** @type {Float64Array|undefined} */
    _numbers;
    /** @type {Float64Array|undefined} */
    _keys;
    /** @type {number[]|undefined} */
    _sorted;
    /** Cache of `PlotPoints.values` for this column. @type {Float64Array|undefined} */
    axis;

    /**
     * @param {PackedColumn} packed
     * @param {number} rows
     * @param {Record<string, string>} [names] Words for the values of a column of texts that holds codes.
     */
    constructor(packed, rows, names = {}) {
      this.names = names;
      this.values = packed.steps ? summed(packed.steps) : packed.values;
      this.name = packed.name;
      this.label = packed.label;
      this.kind = packed.kind;
      this.description = packed.description;
      this.isText = packed.kind === "text";
      this.rawUnit = packed.unit;
      this.packed = packed;
      this.rows = rows;
      const largest = this.isText ? 0 : /** @type {number[]} */ (packed.levels ?? this.values).reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 0);
      const [scale, unit] = SCALES[packed.unit] ?? usual(packed.unit);
      const small = packed.unit === "B" && largest < 2 ** 30 / 10;
      this.scale = small ? 2 ** 20 : scale;
      this.unit = small ? "MiB" : unit;
      this.isId = /(^|_)(id|job|row|seed)$|version$/.test(packed.name);
    }

    /** The distinct values, or null for numbers with many. */
    get levels() {
      this._levels ??= this.packed.levels ?? (this.packed.texts ? joined(this.packed.texts) : null);
      return this._levels;
    }

    /** Codes into `levels`, -1 for an unknown value; for texts, and for numbers with few values. */
    get codes() {
      if (!this._codes && this.levels) {
        const { codes, code, codeSteps } = this.packed;
        this._codes = codes || codeSteps ? Int32Array.from(codes ?? summed(codeSteps)) : new Int32Array(this.rows).fill(code);
      }
      return this._codes;
    }

    /** Numbers of a numeric column, NaN for an unknown value. */
    get numbers() {
      if (!this._numbers) {
        this._numbers = new Float64Array(this.rows);
        for (let row = 0; row < this.rows; row++) {
          const value = this.levels ? this.levels[this.codes[row]] : this.values[row];
          this._numbers[row] = /** @type {number|null|undefined} */ (value) ?? NaN;
        }
      }
      return this._numbers;
    }

    /** Text, number or null, in the unit of the table. @returns {Value} */
    value(row) {
      if (this.levels) return this.codes[row] < 0 ? null : this.levels[this.codes[row]];
      return this.values[row];
    }

    /** The value as shown to people, without the unit. */
    text(row) {
      return this.write(this.value(row));
    }

    /** @param {Value|undefined} value */
    write(value) {
      if (value === null || value === undefined) return UNKNOWN;
      if (typeof value === "string") return this.say(value);
      if (this.kind === "time") return new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ");
      return this.isId ? String(value) : writeNumber(value / this.scale);
    }

    /** A text as shown to people: an outcome's name for its code. @param {string} value */
    say(value) {
      return Object.hasOwn(this.names, value) ? this.names[value] : value;
    }

    get title() {
      return this.unit ? `${this.label}, ${this.unit}` : this.label;
    }

    get several() {
      return this.levels ? this.levels.length + (this.codes.includes(-1) ? 1 : 0) > 1 : true;
    }

    /** Sort key of each row: its rank among the values (natural order for texts); NaN if unknown. */
    get keys() {
      if (!this.isText) return this.numbers;
      if (!this._keys) {
        const place = new Float64Array(this.levels.length);
        this.sortedLevels.forEach((code, position) => (place[code] = position));
        this._keys = Float64Array.from(this.codes, (code) => (code < 0 ? NaN : place[code]));
      }
      return this._keys;
    }

    /** Codes of the levels in natural order. */
    get sortedLevels() {
      if (!this._sorted) {
        const [texts, numbers] = [/** @type {string[]} */ (this.levels), /** @type {number[]} */ (this.levels)];
        const compare = this.isText ? (a, b) => collator.compare(texts[a], texts[b]) : (a, b) => numbers[a] - numbers[b];
        this._sorted = this.levels.map((_, code) => code).sort(compare);
      }
      return this._sorted;
    }
  }

  /** @type {(unit: string) => [number, string]} */
  const usual = (unit) => [1, unit];

  /** Cumulative sums of differences. @param {number[]} steps */
  function summed(steps) {
    let sum = 0;
    return steps.map((step) => (sum += step));
  }

  /** Texts joined from the parts of analysis/explorer/pack_texts.py. @param {PackedTexts} packed */
  function joined({ forms, form }) {
    const texts = forms.map(({ cuts, places }) => {
      const parts = places.map((place) => (Array.isArray(place) ? place : place.steps ? summed(place.steps) : place.codes.map((code) => place.levels[code])));
      return parts[0].map((_, row) => parts.reduce((text, part, at) => text + (at ? cuts[at - 1] : "") + part[row], ""));
    });
    if (!form) return texts[0];
    const next = texts.map(() => 0);
    return form.map((of) => texts[of][next[of]++]);
  }

  /**
   * Columns by name, in the order of the file.
   * @param {RunsData} data
   * @returns {Map<string, Column>}
   */
  function unpack(data) {
    return new Map(data.columns.map((packed) => [packed.name, new Column(packed, data.rows, packed.name === "outcome" ? { ...data.outcomes, ok: "finished" } : {})]));
  }

  return { unpack, writeNumber, UNKNOWN };
})();
