"use strict";

/* Data that Python put into the page: deflated JSON in base64 (`analysis/page/embed.py`). */
const Data = (() => {
  /**
   * The object in the script element `id`. Rejects in browsers without `DecompressionStream` (before 2023).
   * @param {string} id
   */
  async function read(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  return { read };
})();
