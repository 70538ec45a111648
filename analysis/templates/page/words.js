"use strict";

/* Numbers and layouts as text: a unit with every number, a dash for unknown values. */
const Words = (() => {
  const UNKNOWN = "–";
  const GIB = 2 ** 30;

  /** @param {number|null|undefined} value */
  const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

  /**
   * A number with thousands' separators and this many decimals.
   * @param {number|null|undefined} value
   * @param {number} [digits]
   */
  function fixed(value, digits = 0) {
    if (!known(value)) return UNKNOWN;
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  /**
   * About three significant digits, without decimals from 100 on.
   * @param {number|null|undefined} value
   */
  function short(value) {
    if (!known(value)) return UNKNOWN;
    const size = Math.abs(value);
    if (size === 0 || size >= 100) return fixed(value);
    return fixed(value, size >= 10 ? 1 : size >= 1 ? 2 : Math.min(6, 2 - Math.floor(Math.log10(size))));
  }

  const percent = (fraction, digits = 1) => (known(fraction) ? `${fixed(100 * fraction, digits)} %` : UNKNOWN);
  const gib = (bytes, digits = 1) => (known(bytes) ? fixed(bytes / GIB, bytes < GIB ? 3 : digits) : UNKNOWN);

  /**
   * Bytes with their unit: MiB below a tenth of a GiB.
   * @param {number|null|undefined} bytes
   */
  function memory(bytes) {
    if (!known(bytes)) return UNKNOWN;
    return bytes < GIB / 10 ? `${short(bytes / 2 ** 20)} MiB` : `${fixed(bytes / GIB, 1)} GiB`;
  }

  /** @param {number|null|undefined} count */
  function tokens(count) {
    if (!known(count)) return UNKNOWN;
    if (count >= 1e6) return `${fixed(count / 1e6, 2)} M`;
    return count >= 1e4 ? `${fixed(count / 1e3)} k` : fixed(count);
  }

  /**
   * An amount without a currency, since the page only knows the price as a number.
   * @param {number|null|undefined} amount
   */
  function money(amount) {
    if (!known(amount)) return UNKNOWN;
    if (amount >= 1e6) return `$${fixed(amount / 1e6, 2)} M`;
    return amount >= 1e4 ? `$${fixed(amount / 1e3)} k` : `$${fixed(amount)}`;
  }

  /**
   * The value of a setting as in results/text/numbers.py (`format_setting`): fractions with six significant digits.
   * @param {Value} value
   */
  const setting = (value) => String(typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(6)) : value);

  const days = (count) => (known(count) ? fixed(count, count < 100 ? 1 : 0) : UNKNOWN);

  /** Whether a degree is more than one. @param {Value} degree */
  const several = (degree) => Number(degree) > 1;

  /** "1 layout", "2 layouts". */
  const plural = (count, noun) => `${fixed(count)} ${noun}${count === 1 ? "" : "s"}`;

  /** The singular of a noun for devices: GPU, CPU process. */
  const one = (nouns) => nouns.replace(/(?<=ss)es$|s$/, "");

  /**
   * The parts of a layout, spelled out: ["dp 32", "pp 2", "ZeRO 1", "micro-batch 1 × 8"]. `read(name)` is a value or
   * null.
   * @param {Read} read
   */
  function layout(read) {
    const parts = [];
    const [replicas, shards] = [read("dp_replicate"), read("dp_shard")];
    parts.push(several(replicas) && several(shards) ? `dp ${replicas} × ${shards}` : `dp ${read("dp") ?? "?"}`);
    for (const axis of ["tp", "cp", "pp", "ep"]) if (several(read(axis))) parts.push(`${axis} ${read(axis)}`);
    if (several(read("cp")) && read("cp_kind")) parts.push(String(read("cp_kind")));
    if (several(read("pp")) && read("pp_schedule") && read("pp_schedule") !== "1f1b") parts.push(schedule(read));
    if (several(read("dp")) && read("zero_stage") !== null) parts.push(`ZeRO ${read("zero_stage")}`);
    parts.push(`micro-batch ${read("micro_batch_size") ?? "?"} × ${read("num_microbatches") ?? "?"}`);
    if (read("recompute") && read("recompute") !== "none") {
      parts.push(`recompute ${read("recompute")}${several(read("recompute_every")) ? ` every ${read("recompute_every")}` : ""}`);
    }
    if (read("activation_offload") && read("activation_offload") !== "none") parts.push(`activations offloaded ${read("activation_offload")}`);
    if (read("recurrence") && read("recurrence") !== "torch") parts.push(`${read("recurrence")} recurrences`);
    if (read("compile") && read("compile") !== "none") parts.push("compiled");
    if (read("cuda_graph") === "step") parts.push("graph");
    if (read("document_balance") === "greedy") parts.push("greedy documents");
    const newest = read("engine") === "ultrasweep" && !["1", "2", "3"].includes(String(read("engine_version")));
    if (newest && read("cuda_graph") === "none") parts.push("eager"); // as in workloads.spec.engine_versions: not the usual choice
    if (read("precision") && read("precision") !== "bf16") parts.push(String(read("precision")).replaceAll("_", " "));
    const sums = Number(read("num_microbatches")) > 1 || !["4", "5", "6"].includes(String(read("engine_version")));
    const fused = read("gradient_accumulation_fusion"), fuses = newest && read("compile") === "none" && Number(read("zero_stage")) <= 1 && sums;
    if (fused !== null && (fused === "yes") !== fuses) parts.push(fuses ? "unfused accumulation" : "fused accumulation");
    return [...parts, ...updateWords(read)];
  }

  /** The values of `UPDATE_FIELDS`; what is unknown is usual. @param {Read} read */
  const updates = (read) => Object.fromEntries(Object.entries(UPDATE_FIELDS).map(([name, usual]) => [name, read(name) ?? usual]));

  /** Words for unusual ones: ["states bf16"]. @param {Read} read */
  function updateWords(read) {
    const is = updates(read), named = { grad_reduce: "reduce ", optimizer: "", optimizer_states: "states ", master_weights: "master " };
    const words = Object.entries(named).filter(([name]) => is[name] !== UPDATE_FIELDS[name]).map(([name, word]) => word + is[name]);
    return Number(is.optimizer_offload) > 0 ? [...words, `offload ${setting(is.optimizer_offload)}`] : words;
  }

  /** @param {Read} read */
  function schedule(read) {
    const name = String(read("pp_schedule")).replaceAll("_", " ");
    return several(read("virtual_stages")) ? `${name}, ${read("virtual_stages")} chunks` : name;
  }

  return { UNKNOWN, GIB, known, fixed, short, percent, gib, memory, tokens, money, setting, days, plural, one, layout, updates };
})();
