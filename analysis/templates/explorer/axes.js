"use strict";

/* The controls above the plot: axes, colour, size, and the action of the pointer. */
const Axes = (() => {
  const MODES = [["rect", "Box"], ["polygon", "Lasso"], ["zoom", "Zoom"]];

  class View {
    /**
     * @param {HTMLElement} root
     * @param {HTMLElement} tools
     * @param {RunsState} state
     * @param {{choose: (axis: string, name: string) => void, log: (axis: string, on: boolean) => void, mode: (name: string) => void, whole: () => void}} on
     */
    constructor(root, tools, state, on) {
      this.root = root;
      this.state = state;
      this.on = on;
      root.replaceChildren(this.control("x", "across"), this.box("X", "log"), this.control("y", "up"), this.box("Y", "log"), this.control("colour", "colour", "none"), this.control("size", "size", "none"));
      this.whole = element("button", { type: "button", class: "plain", hidden: true, onclick: () => on.whole() }, "Whole plot");
      this.modes = MODES.map(([mode, text]) => element("button", { type: "button", class: "plain", "data-mode": mode, "aria-pressed": "false", onclick: () => on.mode(mode) }, text));
      tools.replaceChildren(...this.modes, this.whole);
    }

    control(axis, label, none) {
      const options = this.state.plottable.map((column) => element("option", { value: column.name }, column.title));
      const choice = element("select", { "data-axis": axis, onchange: () => this.on.choose(axis, choice.value) }, ...(none ? [element("option", { value: "" }, none)] : []), ...options);
      return element("label", { class: "stacked" }, label, choice);
    }

    box(axis, label) {
      const box = element("input", { type: "checkbox", "data-axis": `log${axis}`, "aria-label": `${axis === "X" ? "across" : "up"}: logarithmic`, onchange: () => this.on.log(axis, box.checked) });
      return element("label", { class: "check" }, box, label);
    }

    /** @returns {HTMLSelectElement} */
    choice(axis) {
      return this.root.querySelector(`select[data-axis=${axis}]`);
    }

    /** Update the controls to the state. */
    update(mode, zoomed) {
      const { state } = this;
      for (const axis of ["x", "y", "colour", "size"]) this.choice(axis).value = state[axis];
      for (const axis of ["X", "Y"]) {
        /** @type {HTMLInputElement} */
        const box = this.root.querySelector(`input[data-axis=log${axis}]`);
        const column = state.columns.get(state[axis.toLowerCase()]);
        box.disabled = !column || PlotPoints.isStepped(column) || column.kind === "time";
        box.checked = state.onLog(axis);
      }
      for (const button of this.modes) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
      this.whole.hidden = !zoomed;
    }
  }

  return { View };
})();
