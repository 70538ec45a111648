"use strict";

/* Scripts that are stored deflated and run on first use: the chart library, the models. */
const LateScripts = (() => {
  const asked = new Map(); // id -> promise

  /** Run the script in the element `id` (deflated text in base64); later calls do nothing more. */
  function run(id) {
    if (!asked.has(id)) asked.set(id, inflate(id));
    return asked.get(id);
  }

  async function inflate(id) {
    const text = await Data.read(id);
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
    document.getElementById(id).remove();
  }

  return { run };
})();
