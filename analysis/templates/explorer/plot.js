"use strict";

/* The plot: rows as points, by plotly. Colour is a column, marker symbols are cohorts. What cannot be placed is counted
   and said, never put at zero. */
const Plot = (() => {
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]; // Okabe and Ito
  const DARK_COLOURS = ["#4aa3df", "#E69F00", "#1fbf93", "#d990b8", "#a6d8f5", "#ff7a33"];
  const ORDERED = ["#fde725", "#a0da39", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154"]; // viridis
  const OTHER = "#8a8f98";
  const SYMBOLS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"], ["cross", "✚"], ["star", "★"], ["triangle-down", "▼"], ["pentagon", "⬟"]];
  const SVG_MOST = 6000; // points above which WebGL draws, where there is one
  const DRAWN_MOST = 20000; // points that are drawn without WebGL
  const MOST_CATEGORIES = 8;

  const webgl = (() => {
    let known;
    return () => (known ??= Boolean(document.createElement("canvas").getContext("webgl")));
  })();

  /** Plotly reads texts as a kind of HTML. */
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  class View {
    /** `on` has open(row), select(rows). */
    constructor(root, legend, columns, cohorts, on) {
      Object.assign(this, { root, legend, columns, cohorts, on, drawn: false });
      this.tip = element("div", { class: "tip", hidden: true });
      root.after(this.tip);
      new ResizeObserver(() => this.drawn && root.offsetParent && Plotly.Plots.resize(root)).observe(root);
    }

    /** Draw `rows`; returns how many could not be placed and how many were left out, and the promise of being drawn. */
    show({ rows, x, y, colour, size, logX, logY, selected, current, dark }) {
      const [xs, ys] = [x, y].map((column) => axisValues(column));
      const places = [];
      for (const row of rows) {
        const [a, b] = [xs[row], ys[row]];
        if (a === a && b === b && (!logX || a > 0) && (!logY || b > 0)) places.push(row);
      }
      const unplaced = rows.length - places.length;
      const gl = places.length > SVG_MOST && webgl();
      const points = gl || places.length <= DRAWN_MOST ? places : thinned(places, selected);
      const groups = this.groups(points, colour, dark);
      const sizes = size ? markerSizes(size, points) : null;
      const some = selected.size > 0;
      // Grey points first: those with a value lie on them.
      const layers = groups.toSorted((a, b) => (b.swatch === OTHER) - (a.swatch === OTHER));
      const traces = layers.map((group) => ({
        type: gl ? "scattergl" : "scatter",
        mode: "markers",
        x: group.rows.map((row) => xs[row]),
        y: group.rows.map((row) => ys[row]),
        customdata: group.rows,
        hoverinfo: "none",
        showlegend: false,
        selectedpoints: some ? group.rows.flatMap((row, index) => (selected.has(row) ? [index] : [])) : null,
        selected: { marker: { opacity: 0.95 } },
        unselected: { marker: { opacity: 0.12 } },
        marker: {
          symbol: group.symbol[0],
          size: sizes ? group.rows.map((row) => sizes.get(row)) : 8,
          opacity: 0.75,
          line: { width: 0.6, color: dark ? "#14181d" : "#ffffff" },
          ...group.marker,
        },
      }));
      if (current >= 0 && xs[current] === xs[current] && ys[current] === ys[current]) {
        traces.push({
          type: gl ? "scattergl" : "scatter", mode: "markers", x: [xs[current]], y: [ys[current]], hoverinfo: "skip", showlegend: false,
          marker: { symbol: "circle-open", size: 20, line: { width: 3 }, color: dark ? "#ffdc94" : "#b00020" },
        });
      }
      this.writeLegend(groups, colour);
      const promise = this.draw(traces, this.layout({ x, y, logX, logY, dark, points }));
      return { unplaced, thinned: places.length - points.length, unsized: sizes?.unsized ?? 0, promise };
    }

    /** Points that share colour and symbol. */
    groups(points, colour, dark) {
      const titles = this.columns.get("cohort");
      const cohortOf = (row) => Math.max(0, this.cohorts.findIndex((cohort) => cohort.title === titles.value(row)));
      const level = titles?.codes ? titles.levels.map((_, code) => this.cohorts.findIndex((c) => c.title === titles.levels[code])) : null;
      const place = level ? (row) => level[titles.codes[row]] : cohortOf;
      const [keyOf, looks] = colouring(colour, points, dark);
      const found = new Map();
      for (const row of points) {
        const [key, cohort] = [keyOf(row), place(row)];
        const name = `${key}/${cohort}`;
        if (!found.has(name)) found.set(name, { key, cohort, rows: [] });
        found.get(name).rows.push(row);
      }
      const several = new Set([...found.values()].map((group) => group.cohort)).size > 1;
      const sorted = [...found.values()].sort((a, b) => a.cohort - b.cohort || a.key - b.key);
      const scaled = sorted.find((group) => group.key === 0);
      return sorted
        .map((group) => {
          const look = looks(group.key, group.rows, group === scaled);
          const cohort = several ? this.cohorts[group.cohort].title : "";
          return { ...group, ...look, symbol: SYMBOLS[group.cohort % SYMBOLS.length], label: [look.name, cohort].filter(Boolean).join(" · ") };
        });
    }

    writeLegend(groups, colour) {
      const entries = groups.filter((group) => group.label).map((group) =>
        element("li", {}, element("span", { class: "swatch", style: `color:${group.swatch}`, "aria-hidden": "true" }, group.symbol[1]), group.label),
      );
      const head = colour && entries.length ? [element("li", { class: "quiet" }, `${colour.title}:`)] : [];
      this.legend.replaceChildren(...head, ...entries);
    }

    layout({ x, y, logX, logY, dark, points }) {
      const [ink, line] = dark ? ["#e4e8ec", "#2c343d"] : ["#1d232a", "#dfe3e8"];
      const narrow = this.root.clientWidth < 560;
      const axis = (column, log) => ({
        title: { text: plain(cut(log ? `${column.title} (log)` : column.title, narrow ? 32 : 80)), font: { size: 13 }, standoff: 8 },
        type: log ? "log" : "linear",
        ...(log ? { dtick: logTicks(column, points), tickformat: "~s" } : {}),
        ...(column.isText ? textTicks(column, points) : {}),
        ...(column.kind === "time" ? { type: "date" } : {}),
        automargin: true,
        gridcolor: line,
        linecolor: line,
        zerolinecolor: line,
        tickfont: { size: narrow ? 10 : 12 },
      });
      const touch = matchMedia("(pointer: coarse)").matches;
      return {
        xaxis: axis(x, logX),
        yaxis: axis(y, logY),
        font: { color: ink, family: "system-ui, sans-serif" },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 50, r: 10, t: 34, b: 40 },
        dragmode: this.mode ?? (touch ? false : "select"),
        hovermode: "closest",
        modebar: { bgcolor: "rgba(0,0,0,0)", color: dark ? "#9aa5b1" : "#5b6570", activecolor: dark ? "#6cb6f2" : "#0b63a5" },
        selections: [],
        uirevision: `${x.name} ${y.name} ${logX} ${logY}`,
        selectionrevision: Math.random(),
        showlegend: false,
      };
    }

    async draw(traces, layout) {
      // Plotly's own default offers to send the chart to a server of theirs: nothing leaves this page.
      const config = { displaylogo: false, displayModeBar: true, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["autoScale2d"] };
      await Plotly.react(this.root, traces, layout, config);
      if (this.drawn) return;
      this.drawn = true;
      const rowOf = (event) => event.points?.[0]?.customdata;
      this.root.on("plotly_click", (event) => rowOf(event) !== undefined && this.on.open(rowOf(event)));
      // Without a range or lasso it is not the user's: plotly's own echo of a box that a redraw takes away.
      this.root.on("plotly_selected", (event) => (event?.range || event?.lassoPoints) && this.on.select(event.points.map((point) => point.customdata).filter((row) => row !== undefined)));
      this.root.on("plotly_deselect", () => this.on.select([]));
      this.root.on("plotly_relayout", (change) => "dragmode" in change && (this.mode = change.dragmode));
      this.root.on("plotly_hover", (event) => this.hover(event, rowOf(event)));
      this.root.on("plotly_unhover", () => (this.tip.hidden = true));
    }

    hover(event, row) {
      if (row === undefined) return;
      this.tip.replaceChildren(...this.on.lines(row).map((line) => element("div", {}, line)));
      this.tip.hidden = false;
      const { clientX, clientY } = event.event;
      const left = Math.min(clientX + 14, innerWidth - this.tip.offsetWidth - 8);
      this.tip.style.left = `${Math.max(8, left)}px`;
      this.tip.style.top = `${Math.max(8, clientY - this.tip.offsetHeight - 10)}px`;
    }
  }

  /** Numbers to place points by: in the unit of the table, texts by their place in natural order, times in ms. */
  function axisValues(column) {
    if (column.axis) return column.axis;
    const factor = column.isText ? 1 : column.kind === "time" ? 1000 : 1 / column.scale;
    column.axis = column.keys.map((value) => value * factor);
    return column.axis;
  }

  /** 1, 2, 5 on axes of up to four decades, else powers of ten. */
  function logTicks(column, points) {
    let [low, high] = [Infinity, 0];
    for (const row of points) {
      low = Math.min(low, column.numbers[row]);
      high = Math.max(high, column.numbers[row]);
    }
    return high / low > 1e4 ? 1 : "D2";
  }

  function textTicks(column, points) {
    const present = [...new Set(points.map((row) => column.keys[row]))].sort((a, b) => a - b);
    const step = Math.ceil(present.length / 24);
    const shown = present.filter((_, index) => index % step === 0);
    return { tickvals: shown, ticktext: shown.map((place) => plain(cut(column.levels[column.sortedLevels[place]], 22))) };
  }

  /** [key of a row, look of a key]: one colour; a colour a value; or a scale, for numbers with many values. */
  function colouring(column, points, dark) {
    const palette = dark ? DARK_COLOURS : COLOURS;
    const grey = { swatch: OTHER, marker: { color: OTHER } };
    if (!column) return [() => 0, () => ({ name: "", swatch: palette[0], marker: { color: palette[0] } })];
    const counts = new Map();
    for (const row of points) counts.set(column.keys[row], (counts.get(column.keys[row]) ?? 0) + 1);
    const known = [...counts.keys()].filter((key) => key === key).sort((a, b) => a - b);
    if (!column.isText && known.length > MOST_CATEGORIES) return scale(column, known, grey, dark);
    const most = column.isText ? palette.length : MOST_CATEGORIES;
    const named = known.length <= most ? known : known.toSorted((a, b) => counts.get(b) - counts.get(a)).slice(0, most - 1).sort((a, b) => a - b);
    const places = new Map(named.map((key, index) => [key, index]));
    const others = known.length - named.length;
    const keyOf = (row) => {
      const key = column.keys[row];
      return key !== key ? 1e6 : (places.get(key) ?? 1e5);
    };
    const ordered = (index) => {
      const at = named.length > 1 ? index / (named.length - 1) : 0.5;
      return dark ? ORDERED[Math.round((1 - at) * 5)] : ORDERED[Math.round(1 + at * 6)];
    };
    const look = (key) => {
      if (key === 1e6) return { ...grey, name: "unknown" };
      if (key === 1e5) return { ...grey, name: `${others} other values` };
      const value = column.isText ? column.levels[column.sortedLevels[named[key]]] : column.write(named[key]);
      const color = column.isText ? palette[key] : ordered(key);
      return { name: value, swatch: color, marker: { color } };
    };
    return [keyOf, look];
  }

  function scale(column, known, grey, dark) {
    const log = column.kind === "number" && known[0] > 0 && known.at(-1) / known[0] > 50;
    const value = (raw) => (log ? Math.log10(raw / column.scale) : raw / column.scale);
    const [cmin, cmax] = [value(known[0]), value(known.at(-1))];
    const even = Array.from({ length: 5 }, (_, index) => cmin + ((cmax - cmin) * index) / 4);
    const ticks = log ? even.map((tick) => Math.log10(Number((10 ** tick).toPrecision(1)))).filter((tick) => tick >= cmin && tick <= cmax) : even;
    const stops = dark ? ORDERED.slice(0, 6).reverse() : ORDERED.slice(1); // none that the ground swallows
    const write = (tick) => column.write((log ? 10 ** tick : tick) * column.scale);
    const look = (key, rows, first) =>
      key === 1
        ? { ...grey, name: "unknown" }
        : {
            name: "",
            swatch: dark ? ORDERED[1] : ORDERED[5],
            marker: {
              color: rows.map((row) => value(column.keys[row])),
              cmin,
              cmax,
              colorscale: stops.map((colour, index) => [index / (stops.length - 1), colour]),
              showscale: first,
              colorbar: { title: { text: plain(cut(column.title, 30)), side: "right", font: { size: 12 } }, thickness: 12, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map(write) },
            },
          };
    return [(row) => (column.keys[row] === column.keys[row] ? 0 : 1), look];
  }

  /** Diameters in pixels by row, areas in proportion to the value; without a value (or at most 0) the smallest. */
  function markerSizes(column, points) {
    const most = points.reduce((max, row) => Math.max(max, column.numbers[row] || 0), 0);
    const sizes = new Map();
    sizes.unsized = 0;
    for (const row of points) {
      const share = column.numbers[row] / most;
      if (!(share > 0)) sizes.unsized += 1;
      sizes.set(row, share > 0 ? Math.max(4, 24 * Math.sqrt(share)) : 3);
    }
    return sizes;
  }

  /** Every k-th point, and all that are selected. */
  function thinned(points, selected) {
    const step = Math.ceil(points.length / DRAWN_MOST);
    return points.filter((row, index) => index % step === 0 || selected.has(row));
  }

  return { View };
})();
