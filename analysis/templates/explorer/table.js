"use strict";

/* The table: sortable, of any length, since only the rows in sight are elements. One tab stop: arrows move the current
   row, Enter opens it, Space selects it. */
const Table = (() => {
  const AHEAD = 8; // rows drawn above and below those in sight

  class View {
    /** Height of a row in pixels; 0 before the first drawing. */
    height = 0;
    /** Key of the state for which the head was drawn. */
    headKey = "";

    /**
     * @param {HTMLElement} root
     * @param {{move: (row: number) => void, open: (row: number) => void, toggle: (row: number, extend: boolean) => void, sort: (name: string) => void}} on
     */
    constructor(root, on) {
      this.on = on;
      this.order = new Int32Array(0);
      /** @type {Set<number>} */
      this.selected = new Set();
      this.current = -1;
      /** @type {Column[]} */
      this.columns = [];
      this.head = element("div", { role: "row", class: "row head" });
      this.body = element("div", { class: "body", role: "presentation" });
      this.grid = element(
        "div",
        { class: "grid", role: "grid", tabindex: "0", "aria-label": "Rows", "aria-multiselectable": "true" },
        element("div", { role: "rowgroup", class: "headgroup" }, this.head),
        element("div", { role: "rowgroup" }, this.body),
      );
      root.replaceChildren(this.grid);
      this.grid.addEventListener("scroll", () => this.draw());
      this.grid.addEventListener("keydown", (event) => this.key(event));
      this.body.addEventListener("click", (event) => this.click(event));
      new ResizeObserver(() => this.draw()).observe(this.grid);
    }

    /** @param {{columns: Column[], order: Int32Array, selected: Set<number>, current: number, sort: Sort}} shown */
    show({ columns, order, selected, current, sort }) {
      Object.assign(this, { order, selected, current });
      this.height ||= parseFloat(getComputedStyle(this.grid).getPropertyValue("--row-px")) || 30;
      const key = columns.map((column) => column.name).join() + sort.name + sort.descending;
      if (key !== this.headKey) this.drawHead(columns, sort, key);
      this.body.style.height = `${order.length * this.height}px`;
      this.grid.setAttribute("aria-rowcount", String(order.length + 1));
      this.grid.setAttribute("aria-colcount", String(columns.length + 1));
      this.draw();
    }

    drawHead(columns, sort, key) {
      this.headKey = key;
      this.columns = columns;
      const widths = columns.map((column) => (column.name === "layout" || column.name === "cohort" ? (innerWidth < 800 ? 11.5 : 15) : column.isText ? Math.min(11, Math.max(5, 1.6 + 0.44 * longest(column))) : Math.max(4, 1.8 + 0.44 * column.title.length)));
      this.grid.style.setProperty("--columns", ["2.2rem", ...widths.map((width) => `minmax(${width}rem, ${width}fr)`)].join(" "));
      this.grid.style.setProperty("--width", `${widths.reduce((sum, width) => sum + width, 2.2)}rem`);
      const focused = document.activeElement?.getAttribute("data-sort");
      this.head.replaceChildren(
        element("span", { role: "columnheader", class: "tick" }, element("span", { class: "unseen" }, "Selected")),
        ...columns.map((column) => {
          const sorted = column.name === sort.name ? (sort.descending ? "descending" : "ascending") : null;
          const button = element(
            "button",
            { type: "button", "data-sort": column.name, title: column.description || null, onclick: () => this.on.sort(column.name) },
            column.title,
            element("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (sort.descending ? "▼" : "▲") : ""),
          );
          return element("span", { role: "columnheader", class: column.isText ? "" : "number", "aria-sort": sorted ?? "none" }, button);
        }),
      );
      /** @type {HTMLElement|null} */
      const again = focused ? this.head.querySelector(`[data-sort="${CSS.escape(focused)}"]`) : null;
      again?.focus();
    }

    draw() {
      if (!this.height) return;
      const inSight = this.grid.clientHeight;
      const first = Math.max(0, Math.floor(this.grid.scrollTop / this.height) - AHEAD);
      const last = Math.min(this.order.length, Math.ceil((this.grid.scrollTop + inSight) / this.height) + AHEAD);
      const rows = [];
      for (let place = first; place < last; place++) rows.push(this.row(place));
      this.body.replaceChildren(...rows);
      const drawn = this.order.indexOf(this.current);
      const visible = drawn >= first && drawn < last;
      if (visible) this.grid.setAttribute("aria-activedescendant", `runs-row-${this.current}`);
      else this.grid.removeAttribute("aria-activedescendant");
    }

    row(place) {
      const row = this.order[place];
      const chosen = this.selected.has(row);
      const cells = this.columns.map((column, index) =>
        element("span", { role: "gridcell", class: column.isText ? "" : "number", "data-name": column.name, "aria-colindex": String(index + 2), title: column.isText ? column.text(row) : null }, column.text(row)),
      );
      const node = element(
        "div",
        { role: "row", id: `runs-row-${row}`, class: "row", "aria-rowindex": String(place + 2), "aria-selected": String(chosen), "data-row": String(row) },
        element("span", { role: "gridcell", class: "tick", "aria-colindex": "1" }, chosen ? "✓" : ""),
        ...cells,
      );
      if (row === this.current) node.classList.add("current");
      node.style.top = `${place * this.height}px`;
      return node;
    }

    click(event) {
      const node = event.target.closest("[data-row]");
      if (!node) return;
      const row = Number(node.dataset.row);
      if (event.target.classList.contains("tick") || event.ctrlKey || event.metaKey || event.shiftKey) this.on.toggle(row, event.shiftKey);
      else this.on.open(row);
    }

    key(event) {
      if (event.target !== this.grid || !this.order.length) return;
      const page = Math.max(1, Math.floor(this.grid.clientHeight / this.height) - 2);
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
      const place = this.order.indexOf(this.current);
      if (event.key in steps) {
        const target = place < 0 ? (event.key === "End" ? Infinity : 0) : place + steps[event.key];
        this.on.move(this.order[Math.min(this.order.length - 1, Math.max(0, target))]);
      } else if (event.key === "Enter" && place >= 0) this.on.open(this.current);
      else if (event.key === " " && place >= 0) this.on.toggle(this.current, false);
      else return;
      event.preventDefault();
    }

    /** Scroll as little as needed to bring a row into sight. */
    reveal(row) {
      const place = this.order.indexOf(row);
      if (place < 0) return;
      const top = place * this.height;
      const room = this.grid.clientHeight - this.head.offsetHeight;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      else if (top + this.height > this.grid.scrollTop + room) this.grid.scrollTop = top + this.height - room;
    }

    focus() {
      this.grid.focus({ preventScroll: true });
    }
  }

  /** @param {Column} column */
  const longest = (column) => column.levels.map((level) => String(level).length).reduce((most, length) => Math.max(most, length), column.title.length);

  /** Rows that `keep` accepts, sorted; unknown values come last in both directions. */
  function order(rows, keep, column, descending) {
    /** @type {number[]} */
    const kept = [];
    for (let row = 0; row < rows; row++) if (keep(row)) kept.push(row);
    if (column) {
      const { keys } = column;
      const sign = descending ? -1 : 1;
      kept.sort((a, b) => {
        const [x, y] = [keys[a], keys[b]];
        if (x === y || (x !== x && y !== y)) return a - b;
        if (x !== x) return 1;
        if (y !== y) return -1;
        return sign * (x - y);
      });
    }
    return Int32Array.from(kept);
  }

  return { View, order };
})();
