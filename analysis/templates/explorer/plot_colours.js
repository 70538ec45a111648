"use strict";

/* Colour, shape and size of a row's point. A column with few values has one colour per value, one with many a ramp. */
const PlotColours = (() => {
  const MOST_COLOURS = 8, RAMP = 12, SIZES = [4, 7, 11, 15, 20, 25];
  const SHAPES = [["circle", "●"], ["diamond", "◆"], ["triangle", "▲"], ["rect", "■"], ["pin", "⬟"], ["roundRect", "▢"], ["arrow", "▼"],
    ["emptyCircle", "○"], ["emptyRect", "□"]];

  /**
   * The page's current colours: `colour("--c1")`.
   * @param {HTMLElement} root
   */
  function theme(root) {
    const style = getComputedStyle(root);
    return (name) => style.getPropertyValue(name).trim();
  }

  /**
   * @param {string} from
   * @param {string} to
   * @param {number} share
   */
  function mixed(from, to, share) {
    const parts = [from, to].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    return `rgb(${parts[0].map((value, index) => Math.round(value + (parts[1][index] - value) * share)).join(",")})`;
  }

  /**
   * The colour for a share from 0 to 1: the page's ramp without the end that is invisible on its background.
   * @param {(name: string) => string} colour
   * @param {number} share
   */
  function ramp(colour, share) {
    const stops = ["--r1", "--r2", "--r3", "--r4"].map(colour);
    const at = Math.min(2, Math.floor(share * 3));
    return mixed(stops[at], stops[at + 1], share * 3 - at);
  }

  /**
   * {key(row), look(key)} of a column; null: one colour for all. Smaller keys come first in the legend.
   * @param {Column|undefined} column
   * @param {number[]} rows
   * @param {(name: string) => string} colour
   */
  function colouring(column, rows, colour) {
    const grey = colour("--unk");
    if (!column) return { key: () => 0, look: () => ({ name: "", colour: colour("--c1") }) };
    const counts = new Map();
    for (const row of rows) counts.set(column.keys[row], (counts.get(column.keys[row]) ?? 0) + 1);
    const known = [...counts.keys()].filter((key) => key === key).sort((a, b) => a - b);
    if (!column.isText && known.length > MOST_COLOURS) return ramped(column, known, colour, grey);
    const named = known.length <= MOST_COLOURS ? known : known.toSorted((a, b) => counts.get(b) - counts.get(a)).slice(0, MOST_COLOURS - 1).sort((a, b) => a - b);
    const places = new Map(named.map((key, index) => [key, index]));
    const all = column.levels && !column.isText ? column.sortedLevels.map((code) => column.levels[code]) : null;
    // If there are colours for all values, a value keeps its colour under every filter.
    const slot = (key, index) => (all && all.length <= MOST_COLOURS ? all.indexOf(key) : column.isText && column.levels.length <= MOST_COLOURS ? key : index);
    const OTHERS = 1e5, UNKNOWN = 1e6;
    const key = (row) => {
      const value = column.keys[row];
      return value !== value ? UNKNOWN : (places.get(value) ?? OTHERS);
    };
    const look = (at) => {
      if (at === UNKNOWN) return { name: "unknown", colour: grey };
      if (at === OTHERS) return { name: `${known.length - named.length} other values`, colour: grey };
      const name = column.write(column.isText ? column.levels[column.sortedLevels[named[at]]] : named[at]);
      return { name, colour: colour(`--c${slot(named[at], at) + 1}`) };
    };
    return { key, look };
  }

  /**
   * @param {Column} column
   * @param {number[]} known
   * @param {(name: string) => string} colour
   * @param {string} grey
   */
  function ramped(column, known, colour, grey) {
    const log = column.kind === "number" && known[0] > 0 && known.at(-1) / known[0] > 50;
    const read = log ? Math.log : (value) => value;
    const [low, high] = [read(known[0]), read(known.at(-1))];
    const key = (row) => {
      const value = column.keys[row];
      return value !== value ? 1e6 : Math.min(RAMP - 1, Math.floor(((read(value) - low) / (high - low)) * RAMP));
    };
    const look = (at) => (at === 1e6 ? { name: "unknown", colour: grey } : { name: "", colour: ramp(colour, at / (RAMP - 1)) });
    const scale = { colours: Array.from({ length: RAMP }, (_, at) => look(at).colour), from: column.write(known[0]), to: column.write(known.at(-1)), log };
    return { key, look, scale };
  }

  /**
   * Diameter of a row's point: areas grow with the value; without a value (or at most 0) the smallest.
   * @param {Column|undefined} column
   * @param {number[]} rows
   * @param {number} usual
   */
  function sizing(column, rows, usual) {
    if (!column) return { of: () => usual, unsized: 0 };
    const most = rows.reduce((max, row) => Math.max(max, column.numbers[row] || 0), 0);
    const of = (row) => {
      const share = column.numbers[row] / most;
      return share > 0 ? SIZES[Math.min(SIZES.length - 1, Math.ceil(Math.sqrt(share) * SIZES.length) - 1)] : 3;
    };
    return { of, unsized: rows.filter((row) => !(column.numbers[row] > 0)).length };
  }

  /**
   * Rows that share colour, shape and size; rows without a value come first, so that the others are drawn above them.
   * @returns {{groups: {rows: number[], name: string, colour: string, size: number, shape: string, sign: string,
   *   cohort: string}[], scale: ?object, unsized: number}}
   */
  function groups({ rows, column, size, cohorts, cohortColumn, colour }) {
    const place = cohortColumn?.codes ? cohortColumn.levels.map((title) => cohorts.findIndex((cohort) => cohort.title === title)) : null;
    const cohortOf = (row) => (place ? Math.max(0, place[cohortColumn.codes[row]] ?? 0) : 0);
    const { key, look, scale } = colouring(column, rows, colour);
    const usual = rows.length > 10000 ? 3 : rows.length > 3000 ? 4 : rows.length > 600 ? 5.5 : 8;
    const { of, unsized } = sizing(size, rows, usual);
    const found = new Map();
    for (const row of rows) {
      const [at, cohort, diameter] = [key(row), cohortOf(row), of(row)];
      const name = `${at}/${cohort}/${diameter}`;
      let group = found.get(name);
      if (!group) found.set(name, (group = { key: at, cohort, size: diameter, rows: [] }));
      group.rows.push(row);
    }
    const several = new Set([...found.values()].map((group) => group.cohort)).size > 1;
    const sorted = [...found.values()].sort((a, b) => b.key - a.key || a.cohort - b.cohort || b.size - a.size);
    const made = sorted.map((group) => {
      const [shape, sign] = SHAPES[group.cohort % SHAPES.length];
      return { ...group, ...look(group.key), shape, sign, cohort: several ? cohorts[group.cohort].title : "" };
    });
    return { groups: made, scale, unsized };
  }

  return { groups, theme };
})();
