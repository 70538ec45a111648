"use strict";

/* Numbers and layouts as people read them: a unit beside every number, a dash where nothing is known. */
const Words = (() => {
  const UNKNOWN = "–";
  const GIB = 2 ** 30;

  /** @param {number|null|undefined} value */
  const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

  /** With thousands' separators and so many decimals. */
  function fixed(value, digits = 0) {
    if (!known(value)) return UNKNOWN;
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  /** About three significant digits, none behind the point from 100 on. */
  function short(value) {
    if (!known(value)) return UNKNOWN;
    const size = Math.abs(value);
    if (size === 0 || size >= 100) return fixed(value);
    return fixed(value, size >= 10 ? 1 : size >= 1 ? 2 : Math.min(6, 2 - Math.floor(Math.log10(size))));
  }

  const percent = (fraction, digits = 1) => (known(fraction) ? `${fixed(100 * fraction, digits)} %` : UNKNOWN);
  const gib = (bytes, digits = 1) => (known(bytes) ? fixed(bytes / GIB, bytes < GIB ? 3 : digits) : UNKNOWN);

  /** With its unit: MiB below a tenth of a GiB. */
  function memory(bytes) {
    if (!known(bytes)) return UNKNOWN;
    return bytes < GIB / 10 ? `${short(bytes / 2 ** 20)} MiB` : `${fixed(bytes / GIB, 1)} GiB`;
  }

  function tokens(count) {
    if (!known(count)) return UNKNOWN;
    if (count >= 1e6) return `${fixed(count / 1e6, 2)} M`;
    return count >= 1e4 ? `${fixed(count / 1e3)} k` : fixed(count);
  }

  /** In the currency of the price that was given, which the page does not know. */
  function money(amount) {
    if (!known(amount)) return UNKNOWN;
    if (amount >= 1e6) return `$${fixed(amount / 1e6, 2)} M`;
    return amount >= 1e4 ? `$${fixed(amount / 1e3)} k` : `$${fixed(amount)}`;
  }

  const days = (count) => (known(count) ? fixed(count, count < 100 ? 1 : 0) : UNKNOWN);

  /** "1 layout", "2 layouts". */
  const plural = (count, noun) => `${fixed(count)} ${noun}${count === 1 ? "" : "s"}`;

  /** The noun for one of them: GPU, CPU process. */
  const one = (nouns) => nouns.replace(/(?<=ss)es$|s$/, "");

  /** The parts of a layout, spelled out: ["dp 32", "pp 2", "ZeRO 1", "micro-batch 1 × 8"]. `read(name)` is a value or null. */
  function layout(read) {
    const parts = [];
    const [replicas, shards] = [read("dp_replicate"), read("dp_shard")];
    parts.push(replicas > 1 && shards > 1 ? `dp ${replicas} × ${shards}` : `dp ${read("dp") ?? "?"}`);
    for (const axis of ["tp", "cp", "pp", "ep"]) if (read(axis) > 1) parts.push(`${axis} ${read(axis)}`);
    if (read("cp") > 1 && read("cp_kind")) parts.push(String(read("cp_kind")));
    if (read("pp") > 1 && read("pp_schedule") && read("pp_schedule") !== "1f1b") parts.push(schedule(read));
    if (read("dp") > 1 && read("zero_stage") !== null) parts.push(`ZeRO ${read("zero_stage")}`);
    parts.push(`micro-batch ${read("micro_batch_size") ?? "?"} × ${read("num_microbatches") ?? "?"}`);
    if (read("recompute") && read("recompute") !== "none") {
      parts.push(`recompute ${read("recompute")}${read("recompute_every") > 1 ? ` every ${read("recompute_every")}` : ""}`);
    }
    if (read("compile") && read("compile") !== "none") parts.push("compiled");
    if (read("precision") && read("precision") !== "bf16") parts.push(String(read("precision")).replaceAll("_", " "));
    return parts;
  }

  function schedule(read) {
    const name = String(read("pp_schedule")).replaceAll("_", " ");
    return read("virtual_stages") > 1 ? `${name}, ${read("virtual_stages")} chunks` : name;
  }

  return { UNKNOWN, GIB, known, fixed, short, percent, gib, memory, tokens, money, days, plural, one, layout };
})();
