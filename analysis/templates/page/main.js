"use strict";

/* The page: one state, the sections that show it, and the actions that change it. */
(async () => {
  const by = (id) => document.getElementById(id);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  /** @type {Timing} */
  const timing = {};
  /** @type {PageWindow} */
  const reach = Object.assign(window, { Report: /** @type {ReportOnPage} */ ({ timing, ready: false }) });
  startTheme();

  const data = await Data.read("data");
  timing.inflated = performance.now();
  const columns = Columns.unpack(data);
  const parts = data.page.parts.map((packed) => new Part(packed, columns));
  if (!parts.length) return;
  const state = new State.Model(parts, data.page.price, data.page.opens, Address.claim("page", State.KEYS));
  /** Answers of the cells under the current limits. @type {Map<Cell, Found>} */
  let answers = new Map();
  /** @type {RunsSection|null} */
  let runs = null;

  /** The answer of a cell under the reader's limits. @param {Cell} cell */
  function found(cell) {
    if (!answers.has(cell)) answers.set(cell, Answer.find(state.part, state.query(cell)));
    return answers.get(cell);
  }

  /** @type {Act} */
  const act = {
    /** Change fields of State.Model. */
    set(changes) {
      if (changes.cell && changes.cell !== state.cell) changes = { batch: null, ...changes };
      Object.assign(state, changes);
      render();
      if (changes.cell) focusRuns();
      if (changes.measure) focus(`[data-by=${changes.measure}]`);
    },
    choose(cell) {
      CellMap.hide();
      act.set({ cell });
      focus("#map [aria-pressed=true]", { preventScroll: true });
    },
    failures(cell) {
      act.set({ cell });
      const outcome = state.part.valuesOf("outcome", cell.points).filter((name) => name !== "ok");
      runs?.focus({ cohort: state.part.title, workload: cell.workload, world_size: cell.size, outcome });
      by("explore").scrollIntoView();
    },
  };

  function focus(selector, how = {}) {
    /** @type {HTMLElement|null} */
    const node = document.querySelector(selector);
    node?.focus(how);
  }

  function render() {
    answers = new Map();
    top();
    below();
    state.write();
  }

  function top() {
    Finder.showForm(state);
    Finder.showAnswer(state, found(state.cell), act, command, data.page.command);
    CellMap.show(state, found, act);
  }

  function below() {
    TopTen.show(state, found(state.cell), open);
    Why.show(state, found(state.cell));
    Cost.show(state, found);
    Failed.show(state, act);
    /** @type {NodeListOf<HTMLElement>} */
    const ofParts = document.querySelectorAll("[data-part]");
    for (const node of ofParts) node.hidden = node.dataset.part !== state.part.slug;
    by("trust").hidden = !document.querySelector("#trust > .lead, #trust > [data-part]:not([hidden]) li");
    for (const link of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("nav a"))) link.hidden = by(link.hash.slice(1)).hidden;
    /** @type {HTMLSelectElement} */ (by("part")).value = state.part.slug;
  }

  /**
   * The command that measures a row's layout: as it ran, or with this project's engine if another engine ran it.
   * @param {number} row
   * @returns {Command}
   */
  function command(row) {
    return Rerun.anywhere(state.part.reader(row), data);
  }

  /** @param {number} row */
  function open(row) {
    runs?.open(String(columns.get("attempt_id").value(row)));
  }

  function focusRuns() {
    const fit = state.part.isPlan ? { fit: "fits" } : {};
    runs?.focus({ cohort: state.part.title, workload: state.cell.workload, world_size: state.cell.size, ...fit });
  }

  // ---- controls ------------------------------------------------------------------------------------------------

  /**
   * @param {string} id
   * @param {"change"|"input"} event
   * @param {(value: string) => void} then Called with the value of the field.
   */
  function onField(id, event, then) {
    const field = /** @type {HTMLInputElement|HTMLSelectElement} */ (by(id));
    field.addEventListener(event, () => then(field.value));
  }

  function listen() {
    Folds.start();
    Folds.open(document.getElementById(location.hash.slice(1)));
    onField("part", "change", (slug) => {
      state.choosePart(slug);
      render();
      focusRuns();
    });
    onField("f-model", "change", (base) => act.set({ cell: state.ofBase(base) }));
    onField("f-seq", "change", (name) => act.set({ cell: state.nearest(name) }));
    onField("f-gpus", "change", (size) => act.set({ cell: state.part.at(state.cell.workload, Number(size)) }));
    onField("f-batch", "change", (tokens) => act.set({ batch: tokens === Answer.ANY ? Answer.ANY : State.positive(tokens) }));
    for (const [key, column] of Object.entries(State.FILTER_KEYS)) {
      onField(`f-${key}`, "change", (value) => {
        const { [column]: gone, ...only } = state.only;
        act.set({ only: value ? { ...only, [column]: value } : only });
      });
    }
    onField("f-mem", "input", (text) => act.set({ memory: State.positive(text) }));
    onField("f-price", "input", (text) => act.set({ price: State.positive(text) }));
    onField("f-tok", "input", (text) => act.set({ trillions: State.positive(text) ?? 1 }));
    const more = by("more-limits");
    more.addEventListener("click", () => {
      const open = by("finder").classList.toggle("open");
      more.textContent = open ? "Fewer limits" : "More limits";
      more.setAttribute("aria-expanded", String(open));
    });
    window.addEventListener("hashchange", () => {
      const linked = document.getElementById(location.hash.slice(1));
      if (linked) {
        Folds.open(linked);
        return state.write();
      }
      state.read();
      return render();
    });
    window.addEventListener("themechange", () => CellMap.show(state, found, act));
    document.querySelector("nav").addEventListener("click", jump);
    document.addEventListener("scroll", CellMap.hide, { passive: true });
  }

  /**
   * Scroll to a section without losing the view stored in the hash.
   * @param {MouseEvent} event
   */
  function jump(event) {
    const link = /** @type {Element} */ (event.target).closest("a");
    if (!link) return;
    event.preventDefault();
    const section = by(link.hash.slice(1)), heading = section.querySelector("h2");
    Folds.open(section);
    section.scrollIntoView();
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
  }

  function spy() {
    /** @type {NodeListOf<HTMLAnchorElement>} */
    const links = document.querySelectorAll("nav a");
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries.filter(({ isIntersecting }) => isIntersecting)) {
        for (const link of links) link.toggleAttribute("aria-current", link.hash === `#${entry.target.id}`);
      }
    }, { rootMargin: "-30% 0px -60% 0px" });
    for (const link of links) watch.observe(by(link.hash.slice(1)));
  }

  function startTheme() {
    const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
    const told = () => window.dispatchEvent(new Event("themechange"));
    by("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      told();
    });
    prefersDark.addEventListener("change", told);
  }

  // ---- start ---------------------------------------------------------------------------------------------------

  by("part").replaceChildren(...parts.map((part) => element("option", { value: part.slug }, `${part.title} · ${Words.fixed(part.rows)} rows`)));
  top();
  timing.answer = performance.now();
  listen();
  const rest = () => {
    below();
    const asked = new Set(location.hash.slice(1).split("&").map((pair) => pair.split("=")[0]));
    runs = Runs.mount({ root: by("runs"), data, columns });
    if (![...asked].some((key) => key.startsWith("r."))) focusRuns();
    state.write();
    spy();
    timing.all = performance.now();
    Object.assign(reach.Report, { ready: true, runs, state, found, act, command });
  };
  requestAnimationFrame(() => setTimeout(rest));
})();
