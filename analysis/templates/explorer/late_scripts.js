"use strict";

/* Scripts that the page holds deflated and runs when they are first needed: the chart library, the models. */
const LateScripts = (() => {
  const asked = new Map(); // id -> promise

  /** Run the script in the element `id` (text, deflated, in base64); once, however often it is asked for. */
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
