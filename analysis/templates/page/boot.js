"use strict";

/* Runs the page's scripts, which are stored deflated (two thirds smaller). In browsers that cannot unpack them the page
   says so, and the tables written by Python stay. */
LateScripts.run("page-scripts").catch(() => {
  document.getElementById("old-browser").hidden = false;
});
