"use strict";

/* Which layouts are within noise of the fastest one: a port of results/statistics/noise.py, which explains the
   formulas. A test compares both over every cell of the study and of the recorded rows. This file does not use the DOM. */
const Noise = (() => {
  const CONFIDENCE = 0.95;

  /** Variance of the median of this many normal values, over that of one value. */
  const ofMedian = (repeats) => Math.PI / 2 / (repeats + Math.PI / 2 - 1);

  /**
   * Quantile of the normal distribution (Wichura 1988, algorithm AS 241: what Python's NormalDist uses).
   * @param {number} p
   */
  function normalQuantile(p) {
    const q = p - 0.5;
    const ratio = (r, top, bottom) => horner(r, top) / horner(r, bottom);
    if (Math.abs(q) <= 0.425) return q * ratio(0.180625 - q * q, ...CENTRAL);
    const r = Math.sqrt(-Math.log(q < 0 ? p : 1 - p));
    const value = r <= 5 ? ratio(r - 1.6, ...MIDDLE) : ratio(r - 5, ...TAIL);
    return q < 0 ? -value : value;
  }

  const horner = (x, coefficients) => coefficients.reduce((sum, c) => sum * x + c, 0);

  const CENTRAL = [
    [2.50908092873012267e3, 3.34305755835881281e4, 6.72657709270087009e4, 4.59219539315498715e4, 1.37316937655094611e4, 1.97159095030655144e3, 1.33141667891784378e2, 3.38713287279636661],
    [5.22649527885285456e3, 2.87290857357219427e4, 3.93078958000927106e4, 2.12137943015865959e4, 5.39419602142475111e3, 6.87187007492057908e2, 4.23133307016009113e1, 1.0],
  ];
  const MIDDLE = [
    [7.74545014278341408e-4, 2.27238449892691846e-2, 2.41780725177450611e-1, 1.27045825245236838, 3.64784832476320461, 5.76949722146069141, 4.63033784615654530, 1.42343711074968358],
    [1.05075007164441684e-9, 5.47593808499534495e-4, 1.51986665636164572e-2, 1.48103976427480075e-1, 6.89767334985100005e-1, 1.67638483018380385, 2.05319162663775882, 1.0],
  ];
  const TAIL = [
    [2.01033439929228813e-7, 2.71155556874348758e-5, 1.24266094738807843e-3, 2.65321895265761231e-2, 2.96560571828504892e-1, 1.78482653991729133, 5.46378491116411437, 6.65790464350110378],
    [2.04426310338993979e-15, 1.42151175831644589e-7, 1.84631831751005468e-5, 7.86869131145613259e-4, 1.48753612908506148e-2, 1.36929880922735805e-1, 5.99832206555887938e-1, 1.0],
  ];

  /**
   * Quantile of Student's t (Abramowitz and Stegun 26.7.5).
   * @param {number} level
   * @param {number} freedom
   */
  function student(level, freedom) {
    const z = normalQuantile(level);
    const terms = [
      (z ** 3 + z) / 4,
      (5 * z ** 5 + 16 * z ** 3 + 3 * z) / 96,
      (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / 384,
      (79 * z ** 9 + 776 * z ** 7 + 1482 * z ** 5 - 1920 * z ** 3 - 945 * z) / 92160,
    ];
    return terms.reduce((sum, term, place) => sum + term / freedom ** (place + 1), z);
  }

  /**
   * For layouts of one cell, best first: whether each is behind the first by no more than noise explains; null if noise
   * is unknown. Each of the others is compared at a level of 0.05 / (their number).
   * @param {{rate: number, noise: number|null, freedom: number|null, repeats: number}[]} layouts
   * @returns {(boolean|null)[]}
   */
  function within(layouts) {
    const best = layouts[0], quantiles = new Map();
    const level = 1 - (1 - CONFIDENCE) / Math.max(1, layouts.length - 1);
    return layouts.map((layout, place) => {
      if (place === 0) return true;
      if (best.noise === null || layout.noise === null) return null;
      const freedom = Math.min(best.freedom ?? Infinity, layout.freedom ?? Infinity);
      if (!quantiles.has(freedom)) quantiles.set(freedom, student(level, freedom));
      const spread = Math.sqrt(best.noise ** 2 * ofMedian(best.repeats) + layout.noise ** 2 * ofMedian(layout.repeats));
      return Math.log(best.rate / layout.rate) <= spread * quantiles.get(freedom);
    });
  }

  return { within, student, normalQuantile };
})();
