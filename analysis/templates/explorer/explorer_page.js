"use strict";

/* The explorer as a page of its own: theme and start. */
(async () => {
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");

  function setTheme(choice) {
    const theme = choice ?? (prefersDark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
    window.dispatchEvent(new Event("themechange"));
  }

  setTheme(null);
  button.addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", () => setTheme(null));
  const data = await Data.read("data");
  const columns = Columns.unpack(data);
  window.Explorer = { data, columns, ...Runs.mount({ root: document.getElementById("runs"), data, columns }) };
})();
