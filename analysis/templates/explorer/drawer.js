"use strict";

/* The drawer at the side: all values of one row, its memory in closed form, its pipeline. Without a row, the last two. */
const Drawer = (() => {
  const VIEWS = [["run", "Run"], ["memory", "Memory"], ["pipeline", "Pipeline"]];
  const MODELS = "runs-models"; // the script element with both models

  class View {
    /** Views already built for the shown row. @type {Set<string>} */
    made;

    /**
     * @param {HTMLElement} root
     * @param {RunsData} data
     * @param {ColumnMap} columns
     * @param {{open: (row: number) => void, close: () => void, view: (name: string) => void}} on
     */
    constructor(root, data, columns, on) {
      this.root = root;
      this.data = data;
      this.columns = columns;
      this.on = on;
      this.row = -1;
      this.heading = element("div", {});
      this.tabs = VIEWS.map(([name, text]) => element("button", { type: "button", role: "tab", id: `runs-tab-${name}`, "aria-controls": `runs-view-${name}`, "data-view": name, onclick: () => on.view(name) }, text));
      this.views = VIEWS.map(([name]) => element("div", { role: "tabpanel", id: `runs-view-${name}`, "aria-labelledby": `runs-tab-${name}`, "data-view": name, hidden: true }));
      const list = element("div", { role: "tablist", "aria-label": "Views of the run", class: "tabs", onkeydown: (event) => this.key(event) }, ...this.tabs);
      root.replaceChildren(
        element("header", {}, this.heading, element("button", { type: "button", class: "plain close", "aria-label": "Close", onclick: () => on.close() }, "✕")),
        list, ...this.views);
      this.panel = new Panel.View(this.views[0], data, columns, { open: (row) => on.open(row) });
    }

    /** Show `row` (-1: none) in `view`. */
    show(row, view) {
      const fresh = row !== this.row || this.root.hidden;
      const shown = row < 0 && view === "run" ? "memory" : view;
      this.row = row;
      this.root.hidden = false;
      this.root.classList.toggle("wide", shown !== "run");
      if (fresh) {
        this.made = new Set();
        this.head(row);
        this.root.scrollTop = 0;
      }
      this.tabs.forEach((tab, at) => {
        const chosen = VIEWS[at][0] === shown;
        tab.setAttribute("aria-selected", String(chosen));
        tab.tabIndex = chosen ? 0 : -1;
        tab.hidden = VIEWS[at][0] === "run" && row < 0;
        this.views[at].hidden = !chosen;
      });
      if (!this.made.has(shown)) this.make(shown);
    }

    make(view) {
      this.made.add(view);
      if (view === "run") return this.panel.show(this.row);
      const root = this.views[VIEWS.findIndex(([name]) => name === view)];
      root.replaceChildren(element("p", { class: "quiet" }, "One moment …"));
      const row = this.row;
      return LateScripts.run(MODELS).then(() => {
        if (row === this.row && this.made.has(view)) this[view](root);
      });
    }

    /** @param {string} name */
    read(name) {
      return this.columns.get(name)?.value(this.row) ?? null;
    }

    /** Value of a column of texts. @param {string} name */
    said(name) {
      return /** @type {string|null} */ (this.read(name));
    }

    memory(root) {
      const read = (name) => this.read(name);
      const made = this.row < 0 ? null : RowExperiment.of(read, this.data.widget);
      const place = element("div", {});
      const said = this.row < 0 ? null : made.missing ? `${made.missing} Below is another layout, to try.` : (made.experiment.engine === this.data.engine.name ? "" : `In closed form for this project's engine; the run is ${made.experiment.engine}'s, which keeps other buffers.`);
      const found = ["peak_allocated_bytes", "peak_reserved_bytes"].filter((name) => read(name) !== null).map((name) => `${this.columns.get(name).label} ${this.columns.get(name).text(this.row)} ${this.columns.get(name).unit}`);
      const steps = this.row < 0 ? null : MemorySteps.of(this.data.series?.[this.row], read);
      root.replaceChildren(
        ...(said ? [element("p", { class: "warning" }, said)] : []),
        ...(this.row >= 0 && found.length ? [element("p", { class: "quiet", "data-part": "found" }, `Found on the device: ${found.join(", ")}.`)] : []),
        ...(steps ? [steps] : []), place);
      const experiment = made && !made.missing ? { ...made.experiment, ...this.data.widget.engine } : null;
      Memory.mount(place, this.data.widget, experiment);
    }

    pipeline(root) {
      const run = this.row < 0 ? null : PipelineMeasured.of((name) => this.read(name), this.data.series?.[this.row]);
      const place = element("div", {});
      root.replaceChildren(...(this.row >= 0 && !run ? [element("p", { class: "quiet" }, "This run has no pipeline; below is one to try.")] : []), place);
      Pipeline.mount(place, run);
    }

    head(row) {
      const { columns, data } = this;
      const text = (name) => columns.get(name)?.text(row) ?? "";
      if (row < 0) {
        this.heading.replaceChildren(element("h3", { id: "runs-drawer-title", class: "title" }, "A layout of your own"));
        return;
      }
      const [verdict, outcome] = [this.said("verdict"), this.said("outcome")];
      const [word, good] = verdict !== null ? [verdict.replaceAll("_", " "), verdict === "run" || verdict === "cached"] : [outcome === "ok" ? "finished" : (data.outcomes[outcome] ?? outcome), outcome === "ok"];
      const gpus = this.read("world_size");
      this.heading.replaceChildren(
        element("h3", { id: "runs-drawer-title", class: "title" }, `${text("workload")}${gpus === null ? "" : ` on ${text("world_size")} GPU${gpus === 1 ? "" : "s"}`}`),
        element("p", { class: "layout" }, text("layout")),
        element("p", { class: "quiet" }, element("span", { class: `badge ${good ? "good" : outcome === "oom" ? "oom" : "bad"}` }, word), ` ${text("cohort")}`));
    }

    key(event) {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const shown = this.tabs.filter((tab) => !tab.hidden);
      const at = shown.findIndex((tab) => tab === document.activeElement);
      if (!step || at < 0) return;
      const next = shown[(at + step + shown.length) % shown.length];
      this.on.view(next.dataset.view);
      next.focus();
      event.preventDefault();
    }

    hide() {
      this.root.hidden = true;
    }

    focus() {
      this.root.focus({ preventScroll: true });
    }
  }

  return { View };
})();
