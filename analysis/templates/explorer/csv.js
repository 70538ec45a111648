"use strict";

/* Rows as a CSV file (RFC 4180): column names as headings, values as on the page, empty fields for unknown values. */
const Csv = (() => {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\r\n]/.test(String(value)) || value === "" ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const time = (seconds) => new Date(seconds * 1000).toISOString();

  /** CSV text of `rows` (row numbers), all columns, in the units of the report's tables. */
  function text(columns, rows) {
    const shown = [...columns.values()];
    const lines = [shown.map((column) => cell(column.name)).join(",")];
    for (const row of rows) {
      lines.push(shown.map((column) => {
        const value = column.value(row);
        return cell(column.kind === "time" && value !== null ? time(value) : value);
      }).join(","));
    }
    return `${lines.join("\r\n")}\r\n`;
  }

  function download(name, content) {
    const link = element("a", { download: name, href: URL.createObjectURL(new Blob([content], { type: "text/csv;charset=utf-8" })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  return { text, download };
})();
