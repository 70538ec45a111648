"use strict";

/* The view as the address's hash: `key=value` pairs, so that a view can be passed on and survives a reload. */
const Address = (() => {
  const escape = (text) => encodeURIComponent(text).replace(/[~!'()*]/g, (c) => `%${c.charCodeAt(0).toString(16).toUpperCase()}`);

  function unescape(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // not ours: somebody typed a % of their own
    }
  }

  /** Pairs of the current hash: a Map of texts, still escaped. */
  function read() {
    const pairs = location.hash.replace(/^#/, "").split("&").filter(Boolean);
    return new Map(pairs.map((pair) => [unescape(pair.split("=")[0]), pair.split("=").slice(1).join("=")]));
  }

  function write(pairs) {
    const text = [...pairs].map(([key, value]) => `${escape(key)}=${value}`).join("&");
    if (`#${text}` === location.hash || (!text && !location.hash)) return;
    try {
      history.replaceState(null, "", `#${text}`);
    } catch {
      location.replace(`#${text}`); // pages of a disk are not trusted with their own history everywhere
    }
  }

  /** A filter as text and back. */
  function filterText(filter) {
    if (filter.values) return `is:${[...filter.values].map(escape).join("~")}`;
    if (filter.holds !== undefined) return `holds:${escape(filter.holds)}`;
    return `from:${filter.low ?? ""}~${filter.high ?? ""}`;
  }

  function filterOf(text) {
    const [kind, ...rest] = text.split(":");
    const parts = rest.join(":").split("~");
    if (kind === "is") return { values: new Set(parts.map(unescape)) };
    if (kind === "holds") return { holds: unescape(parts.join("~")) };
    if (kind !== "from") return null;
    const [low, high] = parts.map((part) => (part === "" || part === undefined || Number.isNaN(Number(part)) ? null : Number(part)));
    return low === null && (high ?? null) === null ? null : { low, high: high ?? null };
  }

  /** Row numbers as base-36 runs: `5-9.c.zz`. */
  function rowsText(rows) {
    const sorted = [...rows].sort((a, b) => a - b);
    const runs = [];
    for (const row of sorted) {
      const last = runs.at(-1);
      if (last && last[1] === row - 1) last[1] = row;
      else runs.push([row, row]);
    }
    return runs.map(([from, to]) => (from === to ? from.toString(36) : `${from.toString(36)}-${to.toString(36)}`)).join(".");
  }

  function rowsOf(text, most) {
    const rows = [];
    for (const run of text.split(".").filter(Boolean)) {
      const [from, to] = run.split("-").map((part) => parseInt(part, 36));
      for (let row = from; row <= (to ?? from) && row < most; row++) rows.push(row);
    }
    return rows;
  }

  return { read, write, escape, unescape, filterText, filterOf, rowsText, rowsOf };
})();
