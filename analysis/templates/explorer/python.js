/* What translated Python (analysis/to_javascript) needs of Python's built-in types and functions. This file does not use
   the DOM. Lists and tuples are arrays, None is null; whole numbers are doubles, which are exact below 2^53. */
"use strict";
const py = (() => {
  /** A dataclass: an object with its fields in the order of its constructor. */
  class Record {}

  /** A named tuple: a record that can also be unpacked. */
  class Tuple extends Record {
    *[Symbol.iterator]() { yield* Object.values(this); }
    at(index) { return Object.values(this).at(index); }
    get length() { return Object.keys(this).length; }
  }

  const keys = new WeakMap();
  let functions = 0;
  /** A text that is equal for equal values. */
  function keyOf(value) {
    if (typeof value === "string") return `"${value}`;
    if (typeof value === "function") {
      if (!keys.has(value)) keys.set(value, `function ${functions += 1}`);
      return keys.get(value);
    }
    if (value === null || typeof value !== "object") return String(Number(value ?? NaN));
    if (Array.isArray(value) || value instanceof Tuple) return `(${[...value].map(keyOf).join()})`;
    if (!(value instanceof Record)) throw new TypeError("not hashable");
    if (!keys.has(value)) keys.set(value, `{${Object.values(value).map(keyOf).join()}}`);
    return keys.get(value);
  }

  /** A dict: keys are compared by value, and an iteration gives the keys in the order of their insertion. */
  class Dict {
    constructor(pairs = [], missing = null) {
      this.entries = new Map();
      this.missing = missing;
      for (const [key, value] of pairs) this.set(key, value);
    }
    get size() { return this.entries.size; }
    has(key) { return this.entries.has(keyOf(key)); }
    get(key, otherwise = null) {
      const found = this.entries.get(keyOf(key));
      return found ? found[1] : otherwise;
    }
    at(key) {
      const found = this.entries.get(keyOf(key));
      if (found) return found[1];
      if (!this.missing) throw new RangeError(`no key ${keyOf(key)}`);
      return this.setdefault(key, this.missing());
    }
    set(key, value) {
      const own = keyOf(key), found = this.entries.get(own);
      if (found) found[1] = value;
      else this.entries.set(own, [key, value]);
    }
    setdefault(key, value) {
      if (!this.has(key)) this.set(key, value);
      return this.get(key);
    }
    clear() { this.entries.clear(); }
    delete(key) { this.entries.delete(keyOf(key)); }
    pop(key, otherwise = null) {
      const found = this.get(key, otherwise);
      this.delete(key);
      return found;
    }
    update(other) { for (const [key, value] of dict(other).items()) this.set(key, value); }
    keys() { return [...this.entries.values()].map(([key]) => key); }
    values() { return [...this.entries.values()].map(([, value]) => value); }
    items() { return [...this.entries.values()].map(([key, value]) => [key, value]); }
    [Symbol.iterator]() { return this.keys()[Symbol.iterator](); }
  }

  /** A set, in the order of insertion. */
  class Members extends Dict {
    constructor(members = []) { super([...members].map((one) => [one, true])); }
    add(member) { this.set(member, true); }
  }

  /** collections.Counter */
  function counted(values) {
    const found = new Dict([], () => 0);
    for (const value of values) found.set(value, found.at(value) + 1);
    return found;
  }

  const dict = (given = []) => new Dict(given instanceof Dict ? given.items() : given);
  const equal = (a, b) => (a instanceof Dict && b instanceof Dict
    ? a.size === b.size && a.items().every(([key, value]) => b.has(key) && equal(value, b.get(key))) : keyOf(a) === keyOf(b));

  /** Below 0, 0, or above 0, as `a` comes before `b`, is equal to it, or comes after it. */
  function compare(a, b) {
    if (typeof a !== "object") return a < b ? -1 : a > b ? 1 : 0;
    const [left, right] = [[...a], [...b]];
    for (let i = 0; i < Math.min(left.length, right.length); i += 1) {
      const found = compare(left[i], right[i]);
      if (found) return found;
    }
    return left.length - right.length;
  }

  /** Truth of any value: an empty container is false. */
  function truth(value) {
    if (Array.isArray(value)) return value.length > 0;
    return value instanceof Dict ? value.size > 0 : Boolean(value);
  }

  function add(a, b) {
    if (typeof a !== "object") return a + b;
    return Array.isArray(a) ? [...a, ...b] : a.__add__(b);
  }

  function multiply(a, b) {
    if (Array.isArray(a)) return repeat(a, b);
    if (typeof a === "string") return a.repeat(b);
    return typeof a === "object" ? a.__mul__(b) : a * b;
  }

  const repeat = (list, count) => Array.from({ length: Math.max(0, count) }, () => list).flat();
  const range = (from, to = undefined, step = 1) => {
    const [first, end] = to === undefined ? [0, from] : [from, to];
    return Array.from({ length: Math.max(0, Math.ceil((end - first) / step)) }, (_, i) => first + i * step);
  };
  const zip = (...lists) => {
    const all = lists.map((one) => [...one]);
    return range(Math.min(...all.map((one) => one.length))).map((i) => all.map((one) => one[i]));
  };
  const enumerate = (values, first = 0) => [...values].map((value, i) => [first + i, value]);
  const sum = (values, start = 0) => [...values].reduce(add, start);
  const prod = (values) => [...values].reduce((product, value) => product * value, 1);

  /** The first of the values that none of the others exceeds in `sign` times the order. */
  function extreme(values, sign, key, otherwise) {
    const all = [...values];
    if (!all.length && otherwise === undefined) throw new RangeError("no values");
    if (!all.length) return otherwise;
    const measures = key ? all.map((one) => key(one)) : all;
    let best = 0;
    for (let i = 1; i < all.length; i += 1) if (sign * compare(measures[i], measures[best]) > 0) best = i;
    return all[best];
  }
  const max = (values, { key = undefined, otherwise = undefined } = {}) => extreme(values, 1, key, otherwise);
  const min = (values, { key = undefined, otherwise = undefined } = {}) => extreme(values, -1, key, otherwise);
  const sorted = (values, { key = (one) => one, reverse = false } = {}) => [...values]
    .map((value) => [key(value), value])
    .sort(([a], [b]) => (reverse ? compare(b, a) : compare(a, b)))
    .map(([, value]) => value);

  /** The first of the values, or `otherwise` without any. */
  function next(values, otherwise = undefined) {
    for (const value of values) return value;
    if (otherwise === undefined) throw new RangeError("no values");
    return otherwise;
  }

  function index(values, value) {
    const found = values.findIndex((one) => equal(one, value));
    if (found < 0) throw new RangeError("not in the list");
    return found;
  }
  const within = (value, values) => (values instanceof Dict ? values.has(value)
    : typeof values === "string" ? values.includes(value) : [...values].some((one) => equal(one, value)));

  /** Python's `%`: the remainder has the sign of the divisor. */
  function mod(a, b) {
    const rest = a % b;
    return rest && rest < 0 !== b < 0 ? rest + b : rest;
  }

  /** Half of an odd number goes to the even neighbour. */
  function round(value) {
    const below = Math.floor(value), half = value - below === 0.5;
    return half ? below + mod(below, 2) : Math.round(value);
  }

  function accumulate(values, doing = add) {
    const found = [];
    for (const value of values) found.push(found.length ? doing(found.at(-1), value) : value);
    return found;
  }

  const pairwise = (values) => zip([...values].slice(0, -1), [...values].slice(1));

  const chain = (...lists) => lists.flatMap((one) => [...one]);
  const reduce = (doing, values, ...first) => [...first, ...values].reduce((found, one) => doing(found, one));

  function bisect_left(values, value) {
    const found = values.findIndex((one) => compare(one, value) >= 0);
    return found < 0 ? values.length : found;
  }

  function bisect_right(values, value) {
    const found = values.findIndex((one) => compare(one, value) > 0);
    return found < 0 ? values.length : found;
  }

  /** `doing` with a memory of its latest results, by the values of its arguments. */
  function cached(doing, most = 4096) {
    let known = new Map();
    return (...given) => {
      const key = given.map(keyOf).join();
      if (!known.has(key)) {
        if (known.size >= most) known = new Map();
        known.set(key, doing(...given));
      }
      return known.get(key);
    };
  }

  /** dataclasses.replace */
  const replace = (record, changes) => Object.assign(Object.create(Object.getPrototypeOf(record)), record, changes);

  /**
   * A record of plain data (JSON) that holds its fields by name; fields that are not given have their defaults. The
   * class says of which class its parts are.
   */
  function made(Kind, plain) {
    if (plain instanceof Record) return plain;
    const record = new Kind(), parts = Kind.parts ?? {};
    const part = (name, value) => (Array.isArray(value) ? value.map((one) => part(name, one))
      : value !== null && typeof value === "object" ? made(parts[name](value), value) : value);
    for (const name of Object.keys(record)) {
      if (plain[name] !== undefined) record[name] = name in parts ? part(name, plain[name]) : plain[name];
    }
    return record;
  }

  /** re.compile, for matches at a place of a text. */
  const pattern = (source) => ({
    match(text, at = 0) {
      const expression = new RegExp(source, "y");
      expression.lastIndex = at;
      const found = expression.exec(text);
      return found && { at: (group) => found[group] ?? null, end: () => expression.lastIndex };
    },
  });

  const rpartition = (text, sign) => {
    const at = text.lastIndexOf(sign);
    return at < 0 ? ["", "", text] : [text.slice(0, at), sign, text.slice(at + sign.length)];
  };
  /** The values with those between the first `before` and the last `after` as one list. */
  const starred = (values, before, after) => {
    const all = [...values], end = all.length - after;
    return [...all.slice(0, before), all.slice(before, end), ...all.slice(end)];
  };
  /** An enumeration of numbers or texts: its members by name, and in their order. */
  const enumeration = (members) => Object.defineProperty(members, Symbol.iterator, { value: () => Object.values(members).values() });
  const attrgetter = (...names) => (value) => (names.length === 1 ? value[names[0]] : names.map((name) => value[name]));
  const itemgetter = (...places) => (value) => (places.length === 1 ? value.at(places[0]) : places.map((one) => value.at(one)));
  const fields = (Kind) => Object.keys(new Kind()).map((name) => ({ name }));
  const remove = (values, value) => { values.splice(index(values, value), 1); };

  return {
    Dict, Members, Record, Tuple,
    abs: Math.abs, accumulate, add, all: (values) => [...values].every(truth), any: (values) => [...values].some(truth),
    and: (a, other) => (truth(a) ? other() : a), attrgetter, bisect_left, bisect_right, bool: truth, cached, chain, compare, counted, dict,
    divmod: (a, b) => [Math.floor(a / b), mod(a, b)], enumerate, enumeration, equal, fields, float: Number, gcd, index,
    int: Math.trunc, itemgetter, len: (value) => value.length ?? value.size, list: (values) => [...values], made, max,
    merged: (a, b) => new Dict([...a.items(), ...b.items()]), min, mod, multiply, next, or: (a, other) => (truth(a) ? a : other()), pairwise, pattern, prod,
    range, reduce, remove, repeat, replace, reversed: (values) => [...values].reverse(), round, rpartition,
    set: (members = []) => new Members(members), sorted, starred, str: String, sum, truth, tuple: (values) => [...values], within, zip,
  };

  function gcd(...values) {
    return values.reduce((a, b) => { while (b) [a, b] = [b, a % b]; return Math.abs(a); }, 0);
  }
})();
