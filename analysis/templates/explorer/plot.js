"use strict";

/* The plot: rows as points on a canvas (Apache ECharts); failures beyond the device's memory or under the axis. Rows
   that cannot be placed are counted in a note, never put at zero. The rows under the pointer, or in a box, are computed
   here from the pixels of the points, in the same way for a hundred rows and for fifty thousand. */
const Plot = (() => {
  const { aside, values, within } = PlotPoints;
  const CROSS = "path://M0,1L1,0L5,4L9,0L10,1L6,5L10,9L9,10L5,6L1,10L0,9L4,5Z", HOLLOW = "path://M0,0H8V8H0ZM1,1V7H7V1Z";
  const NEAR = 14; // pixels within which a point is meant
  const LARGE = 600; // points that are drawn as one path a colour
  const TOP = 30, LEFT = 62, RIGHT = 14, FOOT = 44, STRIP = 56, DRAG = 6;

  class View {
    /** @type {Chart|undefined} */ chart;
    /** @type {Asked} */ asked;
    /** Where the rows asked for stand. @type {Placed} */ found;
    /** Rows of the front. @type {number[]} */ front;
    /** What devices hold, in the unit across. @type {number[]} */ limits;
    /** @type {PlotGroup[]} */ groups;
    /** Of the failures that have no place of their own. @type {Spot[]} */ marks = [];
    /** Their distance in pixels. @type {number} */ markSize;
    /** @type {PlotArea} */ area;
    /** Least and most across, and up. @type {number[][]} */ extents;
    /** From and to in per cent of the extents: what is zoomed to. @type {number[][]} */ window;
    /** What the axes were drawn for. @type {string} */ key;
    /** A row's place across, and up, in the axis's unit. @type {(row: number) => number} */ xs;
    /** @type {(row: number) => number} */ ys;
    /** Where a press began. @type {number[]|undefined} */ pressed;
    /** What `spots` were made of, and they. @type {Placed|undefined} */ spotsOf;
    spotsAt = "";
    /** @type {Spot[]} */ allSpots;

    /**
     * @param {HTMLElement} root
     * @param {HTMLElement} legend
     * @param {ColumnMap} columns
     * @param {CohortAbout[]} cohorts
     * @param {PlotActions} on
     */
    constructor(root, legend, columns, cohorts, on) {
      this.root = root;
      this.legend = legend;
      this.columns = columns;
      this.cohorts = cohorts;
      this.on = on;
      this.mode = matchMedia("(pointer: coarse)").matches ? "" : "rect";
      this.fails = PlotPoints.failure(columns);
      this.canvas = element("div", { class: "plot-canvas", role: "img", "aria-label": "Plot of the runs; the table below has the same rows" });
      this.words = element("div", { class: "plot-words", "aria-hidden": "true" });
      this.tip = element("div", { class: "tip", hidden: true });
      root.replaceChildren(this.canvas, this.words, this.tip);
      new ResizeObserver(() => this.resized()).observe(root);
    }

    resized() {
      if (!this.chart || !this.canvas.clientWidth) return;
      if (this.canvas.clientWidth === this.chart.getWidth() && this.canvas.clientHeight === this.chart.getHeight()) return;
      this.chart.resize();
      this.show(this.asked);
    }

    start() {
      this.chart = echarts.init(this.canvas, null, { renderer: "canvas" });
      const pointer = this.chart.getZr();
      pointer.on("mousedown", (event) => (this.pressed = [event.offsetX, event.offsetY]));
      pointer.on("mousemove", (event) => this.hover(event.offsetX, event.offsetY));
      pointer.on("globalout", () => this.hover(-99, -99));
      pointer.on("click", (event) => this.click(event.offsetX, event.offsetY));
      this.chart.on("brushEnd", (event) => this.boxed(event.areas[0]));
      this.chart.on("datazoom", () => this.zoomed());
    }

    /**
     * Draw the rows asked for. Returns the numbers of rows without a place or size, and the promise of the drawing.
     * @param {Asked} asked
     */
    show(asked) {
      this.asked = asked;
      if (!this.chart) this.start();
      const { x, y, logX, logY } = asked;
      const colour = PlotColours.theme(this.root);
      const found = PlotPoints.place({ ...asked, fails: this.fails });
      const made = PlotColours.groups({ rows: found.placed, column: asked.colour, size: asked.size, cohorts: this.cohorts, cohortColumn: this.columns.get("cohort"), colour });
      const limits = PlotPoints.capacities(this.columns, asked.rows, x);
      const front = PlotPoints.front(this.columns, found.placed, x, y, this.fails);
      const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
      const small = width < 560;
      const band = found.beyond.length ? (small ? 76 : 170) : 0;
      const strip = found.below.length ? STRIP : 0;
      this.area = { left: small ? 48 : LEFT, top: TOP, right: width - RIGHT - band, bottom: height - FOOT - strip, band, strip, small };
      this.extents = [PlotPoints.extent(x, [...found.placed, ...found.below], logX, limits), PlotPoints.extent(y, found.placed, logY)];
      Object.assign(this, { found, front, limits, groups: made.groups });
      this.marks = [];
      this.beyond(found.beyond);
      const key = [x.name, y.name, logX, logY, width, height].join();
      const zoom = key === this.key && asked.keepZoom ? this.window : null;
      this.key = key;
      this.window = zoom ?? [[0, 100], [0, 100]];
      this.chart.setOption(
        {
          animation: false,
          textStyle: { fontFamily: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", color: colour("--ink") },
          grid: [{ left: this.area.left, top: TOP, right: width - this.area.right, bottom: height - this.area.bottom }, { left: 0, top: 0, right: 0, bottom: 0 }],
          xAxis: [this.axis(x, logX, 0, colour), { gridIndex: 1, show: false, min: 0, max: width }],
          yAxis: [this.axis(y, logY, 1, colour), { gridIndex: 1, show: false, min: 0, max: height, inverse: true }],
          dataZoom: [["xAxisIndex", 0], ["yAxisIndex", 1]].map(([which, at]) => ({ type: "inside", id: which, [which]: 0, filterMode: "none", startValue: this.value(at, this.window[at][0]), endValue: this.value(at, this.window[at][1]), zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, moveOnMouseWheel: false })),
          brush: { id: "brush", seriesIndex: [-1], brushMode: "single", transformable: false, removeOnClick: true, brushStyle: { borderWidth: 1, color: colour("--accent-soft"), borderColor: colour("--accent"), opacity: 0.5 } },
          series: [...this.layers(made.groups, colour), ...this.failures(colour), ...this.lines(limits, front, colour), ...this.rings(front, colour)],
        },
        { notMerge: true },
      );
      this.setMode(this.mode);
      this.below();
      this.writeWords(limits);
      this.writeLegend(made, front);
      const failed = found.beyond.length + found.below.length;
      this.canvas.setAttribute("aria-label", `${y.label} against ${x.label} of ${found.placed.length.toLocaleString("en-GB")} rows${failed ? `, and ${failed.toLocaleString("en-GB")} failures` : ""}; the table below has the same rows`);
      const promise = new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve))); // painted with the next frame
      return { unplaced: found.unplaced, unsized: made.unsized, promise };
    }

    axis(column, log, at, colour) {
      const [least, most] = this.extents[at];
      const stepped = PlotPoints.isStepped(column);
      const room = at ? this.area.bottom - this.area.top : this.area.right - this.area.left;
      const ticks = stepped ? { customValues: PlotPoints.steps(column.levels.length, room / (at ? 16 : 46)) } : log ? { customValues: PlotPoints.decades(this.window[at].map((share) => this.value(at, share))) } : {};
      const cut = (text) => (text.length > (at ? 9 : 18) ? `${text.slice(0, at ? 8 : 17)}…` : text);
      const name = (place) => cut(column.write(column.levels[column.sortedLevels[Math.round(place)]]));
      const short = (value) => (Math.abs(value) >= 1e4 ? `${Columns.writeNumber(value / 1000)} k` : Columns.writeNumber(value));
      const label = stepped ? { formatter: name } : column.kind === "time" ? {} : { formatter: short };
      return {
        gridIndex: 0, type: stepped ? "value" : column.kind === "time" ? "time" : log ? "log" : "value", min: least, max: most, splitNumber: at ? 5 : this.area.small ? 3 : 7,
        axisLine: { show: true, onZero: false, lineStyle: { color: colour("--strong") } }, axisTick: { show: at === 0, ...ticks, lineStyle: { color: colour("--strong") } },
        splitLine: { show: at === 1 && !stepped, lineStyle: { color: colour("--rule") } },
        axisLabel: { color: colour("--muted"), fontSize: 12, hideOverlap: true, ...(at === 0 && this.limits.length ? { showMaxLabel: false } : {}), ...ticks, margin: at ? 8 : 8 + this.area.strip, ...label },
      };
    }

    layers(groups, colour) {
      const { x, y, selected } = this.asked;
      const [xs, ys] = [values(x), values(y)];
      const spread = [x, y].map((column) => (PlotPoints.isStepped(column) ? 0.56 : 0));
      const some = selected.size > 0;
      const count = groups.reduce((sum, group) => sum + group.rows.length, 0);
      const flat = (rows) => {
        const places = new Float64Array(2 * rows.length);
        rows.forEach((row, index) => {
          places[2 * index] = xs[row] + spread[0] * aside(row, 7919);
          places[2 * index + 1] = ys[row] + spread[1] * aside(row, 104729);
        });
        return places;
      };
      const layer = (group, rows, opacity) => ({
        type: "scatter", silent: true, xAxisIndex: 0, yAxisIndex: 0, dimensions: ["x", "y"], data: flat(rows), clip: true, large: count > LARGE, largeThreshold: 0, progressive: 0,
        symbol: group.shape, symbolSize: group.size, itemStyle: { color: group.colour, opacity, ...(count > 600 ? {} : { borderColor: colour("--bg"), borderWidth: 0.6 }) },
      });
      this.xs = (row) => xs[row] + spread[0] * aside(row, 7919);
      this.ys = (row) => ys[row] + spread[1] * aside(row, 104729);
      const usual = count > 600 ? 0.65 : 0.85;
      if (!some) return groups.map((group) => layer(group, group.rows, usual));
      const apart = groups.map((group) => [group.rows.filter((row) => !selected.has(row)), group.rows.filter((row) => selected.has(row))]);
      return [...groups.map((group, at) => layer(group, apart[at][0], 0.1)), ...groups.map((group, at) => layer(group, apart[at][1], 0.95))].filter((made) => made.data.length);
    }

    /** Marks of the band at the right: out-of-memory failures first, from below. */
    beyond(rows) {
      const { right, top, bottom, band, small } = this.area;
      if (!rows.length) return;
      const sorted = rows.toSorted((a, b) => this.fails(a) - this.fails(b) || a - b);
      const { offsets, step } = PlotPoints.packed(sorted.length, band - (small ? 8 : 22), bottom - top - 24);
      this.markSize = step;
      offsets.forEach(([dx, dy], at) => this.marks.push([right + (small ? 8 : 20) + dx, bottom - dy, sorted[at]]));
    }

    /** Marks of the strip under the plot, each at its x value; laid out again after a zoom. */
    below() {
      const rows = this.found.below;
      if (!rows.length) return;
      const { bottom, left, right } = this.area;
      this.marks = [];
      const columns = new Map();
      const { toPixels } = this;
      for (const row of rows) {
        const at = Math.round(toPixels(values(this.asked.x)[row], this.extents[1][0])[0] / 3) * 3;
        if (at >= left - 1 && at <= right + 1) columns.set(at, [...(columns.get(at) ?? []), row]);
      }
      const places = [...columns.keys()].sort((a, b) => a - b);
      const gap = places.reduce((least, at, index) => (index ? Math.min(least, at - places[index - 1]) : least), 64);
      const fullest = Math.max(0, ...[...columns.values()].map((own) => own.length));
      const room = Math.max(6, Math.min(64, gap - 4));
      const { step } = PlotPoints.packed(fullest, room, STRIP - 14, 8);
      this.markSize = step;
      for (const [at, own] of columns) {
        const sorted = own.sort((a, b) => this.fails(a) - this.fails(b) || a - b);
        const { offsets } = PlotPoints.packed(own.length, room, STRIP - 14, step);
        const across = Math.min(own.length, Math.max(1, Math.floor(room / step))) * step;
        offsets.forEach(([dx, dy], index) => this.marks.push([at - across / 2 + dx, bottom + STRIP - 4 - dy, sorted[index]]));
      }
      const colour = PlotColours.theme(this.root);
      this.chart.setOption({ series: this.failures(colour) });
    }

    failures(colour) {
      const { selected } = this.asked;
      const kinds = [[1, "oom", colour("--oom"), CROSS], [2, "other", colour("--unk"), HOLLOW]];
      return kinds.flatMap(([kind, id, ink, sign]) => {
        const own = this.marks.filter(([, , row]) => this.fails(row) === kind);
        if (!this.found.beyond.length && !this.found.below.length) return [];
        const plain = this.markSize < 5 || own.length > LARGE;
        const data = new Float64Array(own.flatMap(([px, py]) => [px, py]));
        return [{ type: "scatter", id, silent: true, xAxisIndex: 1, yAxisIndex: 1, dimensions: ["x", "y"], data, large: own.length > LARGE, largeThreshold: 0, progressive: 0, symbol: plain ? "rect" : sign, symbolSize: plain ? Math.max(1, this.markSize - 0.75) : Math.min(7, this.markSize - 1.5), itemStyle: { color: ink, opacity: selected.size && !own.some(([, , row]) => selected.has(row)) ? 0.2 : 1 } }];
      });
    }

    /** The devices' memory as dashed lines, and the front in steps. */
    lines(limits, front, colour) {
      const [low, high] = this.extents[1];
      const line = { type: "line", silent: true, xAxisIndex: 0, yAxisIndex: 0, symbol: "none", clip: true };
      const rows = [];
      let height = Infinity;
      for (const row of front) {
        const [, py] = this.toPixels(this.xs(row), this.ys(row));
        if (height - py < 1) continue; // steps of less than a pixel are drawn as slopes
        rows.push([this.xs(row), this.ys(row)]);
        height = py;
      }
      if (front.length) rows.push([this.xs(front.at(-1)), rows.at(-1)[1]]);
      return [
        ...limits.map((limit) => ({ ...line, data: [[limit, low], [limit, high]], lineStyle: { color: colour("--oom"), type: "dashed", width: 1.2 } })),
        ...(rows.length ? [{ ...line, step: "end", data: [[rows[0][0], low], ...rows], lineStyle: { color: colour("--ink"), width: 1.2 } }] : []),
      ];
    }

    /** A ring around the current row of the table. */
    rings(front, colour) {
      const { current } = this.asked;
      const at = current >= 0 && this.found.placed.includes(current) ? [[this.xs(current), this.ys(current)]] : [];
      return at.length ? [{ type: "scatter", id: "ring", silent: true, xAxisIndex: 0, yAxisIndex: 0, symbol: "circle", symbolSize: 18, data: at, itemStyle: { color: "transparent", borderColor: colour("--ink"), borderWidth: 2.5 }, z: 9 }] : [];
    }

    writeWords(limits) {
      const { left, right, top, bottom, band, strip, small } = this.area;
      const { x, y, logX, logY } = this.asked;
      const word = (text, style, kind = "") => element("span", { style, class: kind }, text);
      const number = (count) => count.toLocaleString("en-GB");
      const [oom, other] = [1, 2].map((kind) => [...this.found.beyond, ...this.found.below].filter((row) => this.fails(row) === kind).length);
      const said = [oom ? [`${number(oom)} ${small ? "OOM" : "out of memory"}`, "oom"] : null, other ? [`${number(other)} ${small ? "other" : "failed otherwise"}`, "quiet"] : null].filter(Boolean);
      const width = this.canvas.clientWidth;
      const parts = [
        word(`${y.title}${logY ? " (log)" : ""}`, `left:4px;top:6px`, "quiet"),
        word(`${x.title}${logX ? " (log)" : ""}`, `left:${left}px;width:${right - left}px;text-align:center;bottom:4px`, "quiet"),
        ...said.map(([text, kind], line) => (band ? word(text, `left:${right + (small ? 6 : 18)}px;top:${top - 24 + 15 * line}px;white-space:nowrap`, kind) : word(text, `right:${RIGHT}px;top:${6 + 15 * line}px`, kind))),
        ...(strip ? [word("failed", `right:${width - left + 8}px;top:${bottom + 18}px`, "quiet")] : []),
      ];
      for (const limit of limits) {
        const [px] = this.toPixels(limit, this.extents[1][1]);
        if (px > left && px <= right + 1) parts.push(word(`${Columns.writeNumber(limit)} ${x.unit}`, `right:${width - px + 4}px;top:${top - 16}px`, "oom"));
      }
      this.words.replaceChildren(...parts);
    }

    writeLegend(made, front) {
      const { colour: column } = this.asked;
      const seen = new Map();
      for (const group of made.groups.toReversed()) {
        const label = [group.name, group.cohort].filter(Boolean).join(" · ");
        if (label && !seen.has(label)) seen.set(label, element("li", {}, element("span", { class: "swatch", style: `color:${group.colour}`, "aria-hidden": "true" }, group.sign), label));
      }
      const { scale } = made;
      const ramp = scale ? [element("li", {}, `${scale.from} `, element("span", { class: "ramp", style: `background:linear-gradient(90deg,${scale.colours.join(",")})`, "aria-hidden": "true" }), ` ${scale.to}${scale.log ? " (log)" : ""}`)] : [];
      const head = column && (seen.size || scale) ? [element("li", { class: "quiet" }, `${column.title}:`)] : [];
      const kinds = new Set([...this.found.beyond, ...this.found.below].map((row) => this.fails(row)));
      const more = [kinds.has(1) && ["oom", "×", "out of memory"], kinds.has(2) && ["quiet", "□", "failed otherwise"], front.length && ["", "—", `best for its memory${this.batches(front) > 1 ? ", of any batch" : ""}`]].filter(Boolean);
      this.legend.replaceChildren(...head, ...ramp, ...seen.values(), ...more.map(([kind, sign, text]) => element("li", { class: kind }, element("span", { class: "swatch", "aria-hidden": "true" }, sign), text)));
    }

    batches(rows) {
      const column = this.columns.get("tokens_per_step");
      return new Set(rows.map((row) => column?.keys[row])).size;
    }

    // ---- pointing -----------------------------------------------------------------------------------------------

    /**
     * Position of a value on an axis, in per cent of the whole axis. The library's percentages are not logarithmic.
     */
    share(at, value) {
      const [least, most] = this.extents[at].map(this.read(at));
      return Math.round((1e8 * (this.read(at)(value) - least)) / (most - least)) / 1e6;
    }

    /** The value at a percentage of the axis. */
    value(at, share) {
      const [least, most] = this.extents[at].map(this.read(at));
      const place = least + ((most - least) * share) / 100;
      return this.read(at) === Math.log ? Math.exp(place) : place;
    }

    read(at) {
      return (at ? this.asked.logY : this.asked.logX) ? Math.log : Number;
    }

    /** Function from values of an axis to fractions of the zoomed window. */
    along(at) {
      const read = this.read(at);
      const [least, most] = this.window[at].map((share) => read(this.value(at, share)));
      return (value) => (read(value) - least) / (most - least);
    }

    /** Function from values on both axes to pixels of the canvas. @returns {(a: number, b: number) => Pair} */
    get toPixels() {
      const { left, right, top, bottom } = this.area;
      const [across, up] = [this.along(0), this.along(1)];
      return (a, b) => [left + across(a) * (right - left), bottom - up(b) * (bottom - top)];
    }

    /** [x, y, row] of every point and mark in the canvas, computed on first use after a drawing. @returns {Spot[]} */
    get spots() {
      const stamp = `${this.window}`;
      if (this.spotsOf !== this.found || this.spotsAt !== stamp) {
        const { left, right, top, bottom } = this.area;
        const inside = ([px, py]) => px >= left - 4 && px <= right + 4 && py >= top - 4 && py <= bottom + 4;
        const { toPixels } = this;
        const points = this.found.placed.map((row) => [...toPixels(this.xs(row), this.ys(row)), row]).filter(inside);
        Object.assign(this, { spotsOf: this.found, spotsAt: stamp, allSpots: [...points, ...this.marks] });
      }
      return this.allSpots;
    }

    nearest(px, py) {
      let [best, distance] = [-1, NEAR * NEAR];
      for (const [x, y, row] of this.spots) {
        const away = (x - px) ** 2 + (y - py) ** 2;
        if (away <= distance) [best, distance] = [row, away];
      }
      return best;
    }

    hover(px, py) {
      const row = px < 0 ? -1 : this.nearest(px, py);
      this.tip.hidden = row < 0;
      if (row < 0) return;
      this.tip.replaceChildren(...this.on.lines(row).map((line) => element("div", {}, line)));
      this.tip.style.left = `${Math.max(4, Math.min(px + 14, this.canvas.clientWidth - this.tip.offsetWidth - 4))}px`;
      this.tip.style.top = `${py - this.tip.offsetHeight - 12 < 0 ? py + 16 : py - this.tip.offsetHeight - 12}px`;
    }

    click(px, py) {
      const [fromX, fromY] = this.pressed ?? [px, py];
      if (Math.abs(px - fromX) + Math.abs(py - fromY) > DRAG) return; // the end of a box
      const row = this.nearest(px, py);
      if (row >= 0) this.on.open(row);
    }

    /** Set the action of the pointer: "rect" and "polygon" select, "zoom" zooms in, "" scrolls the page. */
    setMode(mode) {
      this.mode = mode;
      this.chart?.dispatchAction({ type: "takeGlobalCursor", key: "brush", brushOption: { brushType: mode === "zoom" ? "rect" : mode || false, brushMode: "single" } });
    }

    boxed(area) {
      if (!area) return;
      this.chart.dispatchAction({ type: "brush", areas: [] });
      if (area.brushType === "polygon") {
        if (area.range.length > 2) this.on.select(this.spots.filter(([x, y]) => within(area.range, x, y)).map(([, , row]) => row));
        return;
      }
      const [[x0, x1], [y0, y1]] = area.range.map((pair) => pair.toSorted((a, b) => a - b));
      if (x1 - x0 + y1 - y0 < DRAG) return;
      if (this.mode === "zoom") this.zoom([x0, x1], [y0, y1]);
      else this.on.select(this.spots.filter(([x, y]) => x >= x0 && x <= x1 && y >= y0 && y <= y1).map(([, , row]) => row));
    }

    zoom([x0, x1], [y0, y1]) {
      const { left, right, top, bottom } = this.area;
      const share = (at, value) => this.window[at][0] + Math.max(0, Math.min(1, value)) * (this.window[at][1] - this.window[at][0]);
      const shares = [[share(0, (x0 - left) / (right - left)), share(0, (x1 - left) / (right - left))], [share(1, (bottom - y1) / (bottom - top)), share(1, (bottom - y0) / (bottom - top))]];
      if (shares.every(([from, to]) => to - from > 0.01)) this.zoomTo(shares);
    }

    zoomTo(shares) {
      ["xAxisIndex", "yAxisIndex"].forEach((id, at) => this.chart.dispatchAction({ type: "dataZoom", dataZoomId: id, startValue: this.value(at, shares[at][0]), endValue: this.value(at, shares[at][1]) }));
    }

    zoomed() {
      const before = `${this.window}`;
      this.window = this.chart.getOption().dataZoom.map(({ startValue, endValue }, at) => [this.share(at, startValue), this.share(at, endValue)]);
      if (before === `${this.window}`) return;
      const { x, y, logX, logY } = this.asked;
      const colour = PlotColours.theme(this.root);
      this.chart.setOption({ xAxis: [this.axis(x, logX, 0, colour)], yAxis: [this.axis(y, logY, 1, colour)] });
      this.below();
      this.writeWords(this.limits);
      this.on.zoom?.(this.isZoomed);
    }

    get isZoomed() {
      return this.window?.some(([from, to]) => from > 0.01 || to < 99.99) ?? false;
    }
  }

  return { View };
})();
