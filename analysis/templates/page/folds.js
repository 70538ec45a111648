"use strict";

/* On a phone, the sections below the runs fold to their headings, which open them. Wider screens and paper show all. */
const Folds = (() => {
  const FOLDED = ["why", "cost", "failed", "trust", "files"];
  const narrow = window.matchMedia("(max-width: 640px)");

  function start() {
    for (const id of FOLDED) {
      const section = document.getElementById(id), heading = section.querySelector("h2");
      const button = element("button", { type: "button", "aria-expanded": "false" }, heading.textContent);
      button.addEventListener("click", () => set(section, !section.classList.contains("open")));
      heading.replaceChildren(button);
      section.classList.add("folds");
    }
    narrow.addEventListener("change", show);
    show();
  }

  /** Make headings buttons only where they fold a section. */
  function show() {
    for (const button of document.querySelectorAll(".folds > h2 > button")) /** @type {HTMLButtonElement} */ (button).disabled = !narrow.matches;
  }

  /**
   * @param {Element} section
   * @param {boolean} open
   */
  function set(section, open) {
    section.classList.toggle("open", open);
    section.querySelector("h2 > button")?.setAttribute("aria-expanded", String(open));
  }

  /**
   * Open the section that holds a part of the page about to be shown.
   * @param {Element|null} inside
   */
  function open(inside) {
    const section = inside?.closest(".folds");
    if (section) set(section, true);
  }

  return { start, open };
})();
