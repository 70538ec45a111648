"use strict";

/* The first ten layouts of the answer: how far behind the best each is, and the cost of choosing it. */
const TopTen = (() => {
  const by = (id) => document.getElementById(id);

  /**
   * @param {PageState} state
   * @param {Found} found
   * @param {(row: number) => void} open
   */
  function show(state, found, open) {
    waiting(state, found, open);
    if (state.part.isPlan) return undefined;
    const { part } = state, list = found.list.slice(0, 10), best = list[0];
    by("h-ten").textContent = list.length > 1 ? `Top ${list.length} of ${found.list.length}` : "";
    if (list.length < 2) return by("ten").replaceChildren();
    const last = 1 - list.at(-1).behind, low = Math.max(0, Math.min(0.9, Math.floor(20 * last) / 20));
    const at = (share) => (100 * (Math.max(low, share) - low)) / (1 - low);
    const network = part.valuesOf("network_regime", found.list.map(({ row }) => row)).length > 0;
    const mfu = list.some(({ place }) => part.mfu(place) !== null);
    const money = part.noun === "GPUs" && part.method !== "rehearsed_fake";
    const head = [
      ["l", "#"], ["l", "Layout"], ["", `tokens/s/${part.noun === "GPUs" ? "GPU" : "process"}`], ["track hide", element("span", { class: "scale" }, element("span", {}, Words.percent(low, 0)), element("span", {}, "of the best"), element("span", {}, "best"))],
      ["", "Slower"], ...(mfu ? [["hide", "MFU"]] : []), ["hide", "GiB"], ["hide", "Step, s"],
      ...(money ? [["hide", "Days"], ["hide", state.price ? "Extra cost" : "Extra GPU-hours"]] : []), ...(network ? [["hide", "Network"]] : []),
    ];
    const reach = found.list.filter(({ tied }) => tied).at(-1).behind;
    const line = (layout, place) => {
      const tie = layout.tied && found.ties.length > 1, hours = part.hours(layout.place, state.tokens), extra = hours - part.hours(best.place, state.tokens);
      const track = element("span", { class: "trk" }, element("i", { class: "band", style: `left:${at(1 - reach)}%` }), element("i", { class: tie || !place ? "dot" : "dot g", style: `left:${at(1 - layout.behind)}%` }));
      const cells = [
        ["l", String(place + 1)], ["l", element("button", { type: "button", class: "open lay", onclick: () => open(layout.row) }, part.layoutName(layout.place)), tie && !place ? element("span", { class: "tag" }, "tie") : ""],
        ["", Words.short(layout.rate)], ["track hide", track], ["", place ? Words.percent(layout.behind) : Words.UNKNOWN],
        ...(mfu ? [["hide", Words.percent(part.mfu(layout.place))]] : []), ["hide", Words.gib(part.memoryOf(layout.place))], ["hide", Words.short(part.stepTime(layout.place))],
        ...(money ? [["hide", Words.days(hours / state.cell.size / 24)], ["hide", place ? `+${state.price ? Words.money(extra * state.price) : Words.fixed(extra)}` : Words.UNKNOWN]] : []),
        ...(network ? [["hide", part.text("network_regime", layout.row) ?? Words.UNKNOWN]] : []),
      ];
      return element("tr", { class: `${tie ? "tie" : ""} ${place ? "" : "first"}` }, ...cells.map(([kind, ...content]) => element("td", { class: kind }, ...content)));
    };
    return by("ten").replaceChildren(element("table", {},
      element("thead", {}, element("tr", {}, ...head.map(([kind, content]) => element("th", { scope: "col", class: kind }, content)))),
      element("tbody", {}, ...list.map(line))));
  }

  /**
   * The predictions of what has not run: a plan's own ten, or below the measured ten those of a half-finished sweep.
   * @param {PageState} state
   * @param {Found} found
   * @param {(row: number) => void} open
   */
  function waiting(state, found, open) {
    const { isPlan } = state.part, { title } = Planned.table(state);
    by(isPlan ? "h-ten" : "h-next").textContent = title;
    by("h-next").hidden = isPlan || !title;
    by(isPlan ? "ten" : "next").replaceChildren(...Planned.list(state, found.best?.rate ?? null, open));
    if (isPlan) by("next").replaceChildren();
  }

  return { show };
})();
