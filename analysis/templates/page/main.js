"use strict";

/* The page: one state, the sections that show it, and what each action does to it. */
(async () => {
  const by = (id) => document.getElementById(id);
  const SHAPE = ["num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"];
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const timing = {};
  window.Report = { timing, ready: false };
  startTheme();

  const data = await Data.read("data");
  timing.inflated = performance.now();
  const columns = Columns.unpack(data);
  const parts = data.page.parts.map((packed) => new Part(packed, columns));
  if (!parts.length) return;
  const state = new State.Model(parts, data.page.price, Address.claim("page", State.KEYS));
  let answers = new Map(); // of the cells under today's limits
  let runs = null;

  /** The answer of a cell under the reader's limits. */
  function found(cell) {
    if (!answers.has(cell)) answers.set(cell, Answer.find(state.part, state.query(cell)));
    return answers.get(cell);
  }

  const act = {
    /** Change what is asked for: any of State.Model's fields. */
    set(changes) {
      if (changes.cell && changes.cell !== state.cell) changes = { batch: null, ...changes };
      Object.assign(state, changes);
      render();
      if (changes.cell) focusRuns();
      if (changes.measure) document.querySelector(`[data-by=${changes.measure}]`).focus();
    },
    choose(cell) {
      CellMap.hide();
      act.set({ cell });
      document.querySelector("#map [aria-pressed=true]")?.focus({ preventScroll: true });
    },
    failures(cell) {
      act.set({ cell });
      const outcome = state.part.valuesOf("outcome", cell.points).filter((name) => name !== "ok");
      runs?.focus({ cohort: state.part.title, workload: cell.workload, world_size: cell.size, outcome });
      by("explore").scrollIntoView();
    },
  };

  function render() {
    answers = new Map();
    top();
    below();
    state.write();
  }

  function top() {
    Finder.showForm(state);
    Finder.showAnswer(state, found(state.cell), act, command);
    CellMap.show(state, found, act);
  }

  function below() {
    TopTen.show(state, found(state.cell), open);
    Why.show(state, found(state.cell));
    Cost.show(state, found);
    Failed.show(state, act);
    for (const node of document.querySelectorAll("[data-part]")) node.hidden = node.dataset.part !== state.part.slug;
    by("part").value = state.part.slug;
  }

  /** The command that measures a row's layout: as it ran, or with this project's engine where another one ran it. */
  function command(row) {
    const read = state.part.reader(row);
    if (read("engine") === data.engine.name) return Rerun.command(read, data.engine);
    const model = data.widget.models.find((shape) => SHAPE.every((name) => shape[name] === read(name)));
    if (!model) return { missing: `No model file of this project has the shape of ${read("model")}: no command can be given.` };
    const own = { model: model.name, engine: data.engine.name, engine_version: data.engine.version, warmup_steps: null, timed_steps: null };
    const asked = Rerun.command((name) => (name in own ? own[name] : read(name) ?? Rerun.DEFAULTS[name] ?? null), data.engine);
    return asked.missing ? asked : { ...asked, notes: [`It runs this layout with this project's engine; the row is of ${read("engine")}.`] };
  }

  function open(row) {
    runs?.open(columns.get("attempt_id").value(row));
  }

  function focusRuns() {
    runs?.focus({ cohort: state.part.title, workload: state.cell.workload, world_size: state.cell.size });
  }

  // ---- controls ------------------------------------------------------------------------------------------------

  function listen() {
    by("part").addEventListener("change", (event) => {
      state.choosePart(event.target.value);
      render();
      focusRuns();
    });
    by("f-model").addEventListener("change", (event) => act.set({ cell: state.nearest(event.target.value) }));
    by("f-gpus").addEventListener("change", (event) => act.set({ cell: state.part.at(state.cell.workload, Number(event.target.value)) }));
    by("f-batch").addEventListener("change", ({ target }) => act.set({ batch: target.value === Answer.ANY ? Answer.ANY : State.positive(target.value) }));
    for (const [id, column] of [["f-net", "network_regime"], ["f-engine", "engine_version"]]) {
      by(id).addEventListener("change", ({ target }) => {
        const { [column]: gone, ...only } = state.only;
        act.set({ only: target.value ? { ...only, [column]: target.value } : only });
      });
    }
    for (const [id, field, none] of [["f-mem", "memory", null], ["f-price", "price", null], ["f-tok", "trillions", 1]]) {
      by(id).addEventListener("input", ({ target }) => act.set({ [field]: State.positive(target.value) ?? none }));
    }
    by("more-limits").addEventListener("click", ({ target }) => {
      const open = by("finder").classList.toggle("open");
      target.textContent = open ? "Fewer limits" : "More limits";
      target.setAttribute("aria-expanded", String(open));
    });
    window.addEventListener("hashchange", () => {
      if (document.getElementById(location.hash.slice(1))) return state.write(); // a link to a section
      state.read();
      return render();
    });
    window.addEventListener("themechange", () => CellMap.show(state, found, act));
    document.querySelector("nav").addEventListener("click", jump);
    document.addEventListener("scroll", CellMap.hide, { passive: true });
  }

  /** To a section without losing the view that the hash holds. */
  function jump(event) {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    const section = by(link.hash.slice(1)), heading = section.querySelector("h2");
    section.scrollIntoView();
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
  }

  function spy() {
    const links = [...document.querySelectorAll("nav a")];
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
    Object.assign(window.Report, { ready: true, runs, state, found, act, command });
  };
  requestAnimationFrame(() => setTimeout(rest));
})();
