"use strict";

/* The view as `key=value` pairs in the address's hash, so that a view can be shared and survives a reload. Several
   parts of a page share the hash: each claims its keys and leaves the keys of the others alone. */
const Address = (() => {
  const claims = new Map(); // keys by owner

  /** Escapes a text but keeps the characters of filters readable. */
  const escape = (text) => encodeURIComponent(text).replace(/%(3A|2C|2F)/g, (code) => decodeURIComponent(code));

  function unescape(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // not written by this page: somebody typed a %
    }
  }

  /** [key, raw value] of everything in the hash. */
  function parts() {
    const pairs = location.hash.replace(/^#/, "").split("&").filter(Boolean);
    return pairs.map((pair) => [unescape(pair.split("=")[0]), pair]);
  }

  const matches = (names, key) => names.some((name) => (name.endsWith("*") ? key.startsWith(name.slice(0, -1)) : key === name));

  /**
   * Claim the keys of one part of the page.
   * @param {string} owner Name of the part, for the error message if two parts want the same key.
   * @param {Iterable<string>} keys Names; one that ends in `*` stands for all with this prefix.
   * @returns {Claim} `read` returns the
   *   part's current pairs of the hash; `write` replaces them and keeps all other pairs.
   */
  function claim(owner, keys) {
    const own = [...keys];
    const mine = (key) => matches(own, key);
    for (const [other, theirs] of claims) {
      const both = other !== owner && (theirs.find((name) => matches(own, name)) ?? own.find((name) => matches(theirs, name)));
      if (both) throw new Error(`${owner} and ${other} both claim ${both} in the address`);
    }
    claims.set(owner, own);

    function read() {
      return new Map(parts().filter(([key]) => mine(key)).map(([key, pair]) => [key, unescape(pair.split("=").slice(1).join("="))]));
    }

    function write(pairs) {
      const others = parts().filter(([key]) => !mine(key)).map(([, pair]) => pair);
      const written = [...pairs].map(([key, value]) => `${escape(key)}=${escape(value)}`);
      const text = [...others, ...written].join("&");
      if (text === location.hash.replace(/^#/, "")) return;
      try {
        history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
      } catch {
        location.replace(`#${text}`); // some browsers deny pages from disk access to their history
      }
    }

    return { read, write };
  }

  /**
   * Text of a filter; `filterOf` is the inverse. `~` separates values; one inside a value is escaped by a backslash.
   * @param {Filter} filter
   */
  function filterText(filter) {
    if (filter.values) return `is:${[...filter.values].map((value) => value.replace(/[\\~]/g, "\\$&")).join("~")}`;
    if (filter.holds !== undefined) return `holds:${filter.holds}`;
    return `from:${filter.low ?? ""}~${filter.high ?? ""}`;
  }

  /**
   * @param {string} text
   * @returns {Filter|null}
   */
  function filterOf(text) {
    const [kind, ...rest] = text.split(":");
    const value = rest.join(":");
    if (kind === "is") return { values: new Set(split(value)) };
    if (kind === "holds") return { holds: value };
    if (kind !== "from") return null;
    const [low, high] = value.split("~").map((part) => (part === "" || Number.isNaN(Number(part)) ? null : Number(part)));
    return low === null && (high ?? null) === null ? null : { low, high: high ?? null };
  }

  function split(text) {
    const found = [""];
    for (const [piece] of text.matchAll(/\\.|[^]/g)) {
      if (piece === "~") found.push("");
      else found[found.length - 1] += piece.at(-1);
    }
    return found;
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

  return { claim, filterText, filterOf, rowsText, rowsOf };
})();
