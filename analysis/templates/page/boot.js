"use strict";

/* Runs the page's scripts, which it holds deflated: two thirds smaller. Browsers that cannot unpack them say so; the tables
   that Python has written stay. */
LateScripts.run("page-scripts").catch(() => {
  document.getElementById("old-browser").hidden = false;
});
