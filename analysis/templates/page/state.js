"use strict";

/* The reader's choices: part, model, number of devices, limits, and the colouring of the map. The address's hash stores
   them, so that a link shows what its sender saw; choices missing from the hash have their defaults. */
const State = (() => {
  const KEYS = ["part", "m", "g", "mem", "batch", "net", "engine", "prec", "price", "tok", "by", "minor"];
  const FILTER_KEYS = { net: "network_regime", engine: "engine_version", prec: "precision" };
  const TRILLION = 1e12;

  /**
   * The positive number of a text, otherwise null.
   * @param {string} text
   */
  function positive(text) {
    const value = Number.parseFloat(String(text ?? "").replace(",", "."));
    return value > 0 ? value : null;
  }

  /** A workload's name without its sequence length, and that length if the name has it. @param {string} workload */
  const baseOf = (workload) => workload.replace(/, seq \d+/, "");
  const lengthOf = (workload) => /, seq (\d+)/.exec(workload)?.[1] ?? "";

  class Model {
    /** @type {Part} */
    part;
    /** @type {Cell|undefined} */
    cell;
    /** Memory limit in GiB; null: none. @type {number|null} */
    memory;
    /** Tokens per step; null: the number that most layouts have. @type {number|"any"|null} */
    batch;
    /** Values, as texts, that columns must have. @type {Record<string, string>} */
    only;
    /** Price of a device-hour. @type {number|null} */
    price;
    /** Tokens to train on, in 10^12. @type {number} */
    trillions;
    /** Measure that colours the map; null: the first that the part has. @type {string|null} */
    measure;
    /** Whether the map shows variants with few runs. @type {boolean} */
    minor;

    /**
     * @param {Part[]} parts
     * @param {number|null} price Price of a device-hour that the report was made with.
     * @param {OpensAt|null} opens The cell shown at first.
     * @param {Claim} hash `Address.claim("page", State.KEYS)`
     */
    constructor(parts, price, opens, hash) {
      this.opens = opens;
      this.parts = parts;
      this.usualPrice = price;
      this.hash = hash;
      this.read();
    }

    /** Read all choices from the address, with defaults from the rows. */
    read() {
      const said = this.hash.read();
      this.part = this.parts.find((part) => part.slug === said.get("part")) ?? this.parts[0];
      const first = usualCell(this.part);
      const [workload, size] = [said.get("m"), Number(said.get("g"))];
      this.cell = this.part.at(workload, size) ?? this.nearest(workload) ?? first;
      this.memory = said.has("mem") ? positive(said.get("mem")) : this.usualMemory;
      const at = this.opens && !said.has("m") && this.part === this.parts[0] ? this.part.at(this.opens.workload, this.opens.world_size) : undefined;
      if (at) this.cell = at;
      if (at && !said.has("batch")) said.set("batch", String(this.opens.tokens_per_step));
      this.batch = said.get("batch") === Answer.ANY ? /** @type {"any"} */ (Answer.ANY) : positive(said.get("batch"));
      this.only = {};
      for (const [key, column] of Object.entries(FILTER_KEYS)) if (said.get(key)) this.only[column] = said.get(key);
      this.price = said.has("price") ? positive(said.get("price")) : this.usualPrice;
      this.trillions = positive(said.get("tok")) ?? 1;
      this.measure = said.get("by") ?? null;
      this.minor = said.has("minor");
    }

    /** Default memory limit in GiB: the memory of the device. */
    get usualMemory() {
      return this.part.capacity === null ? null : Math.round((10 * this.part.capacity) / Words.GIB) / 10;
    }

    get tokens() {
      return this.trillions * TRILLION;
    }

    /** The query of a cell, by default the chosen one; a chosen batch applies to that cell alone. */
    query(cell = this.cell) {
      const bytes = this.memory === null ? null : this.memory === this.usualMemory ? this.part.capacity : this.memory * Words.GIB;
      /** @type {Query["batch"]} */
      const batch = this.batch === Answer.ANY || cell === this.cell ? this.batch : null;
      return { workload: cell.workload, size: cell.size, memory: bytes, batch, only: this.only };
    }

    /** A model's cell whose size is nearest to the chosen one; undefined for a model that this part lacks. */
    nearest(workload, size = this.cell?.size ?? 0) {
      const found = [...this.part.cells.values()].filter((cell) => cell.workload === workload);
      const order = (cell) => (cell.layouts.length ? 0 : 1e9) + Math.abs(cell.size - size);
      return found.sort((a, b) => order(a) - order(b))[0];
    }

    /** The cell of a model's name without sequence length: at the chosen length if it has it, else with most points. */
    ofBase(base) {
      const names = this.part.workloads.filter((name) => baseOf(name) === base), length = lengthOf(this.cell.workload);
      const points = (name) => this.nearest(name).points.length;
      return this.nearest(names.find((name) => lengthOf(name) === length) ?? names.sort((a, b) => points(b) - points(a))[0]);
    }

    choosePart(slug) {
      this.part = this.parts.find((part) => part.slug === slug) ?? this.parts[0];
      this.cell = this.part.at(this.cell?.workload, this.cell?.size) ?? usualCell(this.part);
      Object.assign(this, { memory: this.usualMemory, batch: null, only: {}, measure: null });
    }

    write() {
      /** @type {[string, string][]} */
      const pairs = [];
      const put = (key, value, usual) => value !== usual && value !== null && pairs.push([key, String(value)]);
      put("part", this.part.slug, this.parts[0].slug);
      if (this.cell) pairs.push(["m", this.cell.workload], ["g", String(this.cell.size)]);
      if (this.memory !== this.usualMemory) pairs.push(["mem", String(this.memory ?? 0)]);
      put("batch", this.batch, null);
      for (const [key, column] of Object.entries(FILTER_KEYS)) put(key, this.only[column] ?? null, null);
      if (this.price !== this.usualPrice) pairs.push(["price", String(this.price ?? 0)]);
      put("tok", this.trillions, 1);
      put("by", this.measure, null);
      if (this.minor) pairs.push(["minor", "1"]);
      this.hash.write(pairs);
    }
  }

  /**
   * The default cell of a part: the one with most layouts, of several the largest; without layouts, with most points.
   * @param {Part} part
   */
  function usualCell(part) {
    const cells = [...part.cells.values()];
    cells.sort((a, b) => b.layouts.length - a.layouts.length || b.points.length - a.points.length || b.size - a.size);
    return cells[0];
  }

  return { Model, KEYS, FILTER_KEYS, baseOf, lengthOf, positive };
})();
