"""What tests of the explorer share: pages of recorded and made-up rows, and the moves that a user makes in them.

Their page holds the report's section "Every run" alone: it opens on its first view and draws at once, and a page of
fifty thousand rows is made without the report's sentences and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.explorer import parts, row_data
from analysis.page.embed import deflated
from analysis.page.render import environment, source
from analysis.rows import cohorts
from analysis.rows.cohorts import Cohort
from analysis.rows.load import LoadedResults, load
from results.tables import store
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.conftest import frame_of

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "recorded"
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
HOSTILE = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>\"'&amp;</script>"
POINTS = list(synthetic.experiments(micro_batch_sizes=(1, 4)))

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'">
<link rel="icon" href="data:,">
<title>Every run</title>
{% for style in styles %}<style>
{{ style | safe }}
</style>
{% endfor %}</head>
<body>
<header><h1>{{ name }}</h1><button type="button" id="theme">Theme</button></header>
<main><h2>Every run</h2>
{% include "explorer/runs.html" %}
</main>
<script type="text/plain" id="data">{{ data }}</script>
{% for script in scripts %}<script>
{{ script | safe }}
</script>
{% endfor %}</body>
</html>
"""
STYLE = """* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
header { display: flex; justify-content: space-between; padding: 8px 12px; border-bottom: 1px solid var(--rule); }
header h1 { font-size: 14px; margin: 0; overflow-wrap: anywhere; min-width: 0; }
header button { font: inherit; color: inherit; background: var(--bg); border: 1px solid var(--strong); }
main { padding: 12px 20px 32px; max-width: 1440px; margin: 0 auto; }
main h2 { font-size: 20px; margin: 0 0 4px; }
@media (max-width: 50rem) { main { padding: 8px 12px 32px; } }
"""
START = """(async () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = dark.matches ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    window.dispatchEvent(new Event("themechange"));
  });
  const data = await Data.read("data"), columns = Columns.unpack(data);
  window.Explorer = { data, columns, ...Runs.mount({ root: document.getElementById("runs"), data, columns }) };
})();
"""


def results_of(attempts: pd.DataFrame, path: Path) -> LoadedResults:
    return LoadedResults(path=path, sweeps=(), attempts=attempts, ledger=store.empty_ledger().to_pandas(), problems=())


def rendered(results: LoadedResults, split: Sequence[Cohort], path: Path) -> Path:
    """Write the page of ``results``, split into cohorts, to ``path``; returns ``path``."""
    data = parts.page_data(results, row_data.table(split), split, path.parent)
    html = (
        environment()
        .from_string(PAGE)
        .render(
            name=results.path.resolve().name,
            styles=[source("page/colours.css"), STYLE, *map(source, parts.STYLES)],
            runs=parts.late(),
            scripts=[*map(source, parts.SCRIPTS), START],
            data=deflated(data),
        )
    )
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def written(results: LoadedResults, folder: Path) -> Path:
    return rendered(results, cohorts.split(results.attempts), folder / "explorer.html")


def without_rows(folder: Path) -> Path:
    """An explorer of nothing: memory and pipelines need no rows."""
    return written(results_of(frame_of([]), folder), folder)


def of_recorded(folder: Path) -> tuple[Path, pd.DataFrame]:
    """The page of the recorded sweeps, and their rows in its order."""
    results = load(RECORDED)
    split = cohorts.split(results.attempts)
    return rendered(results, split, folder / "recorded.html"), row_data.table(split)


def many(rows: int) -> pd.DataFrame:
    """The rows of a synthetic sweep over and over, each an attempt of its own."""
    frame = frame_of(synthetic.attempts(POINTS))
    frame = pd.concat([frame] * (rows // len(frame) + 1), ignore_index=True).head(rows)
    noise = 1 + np.arange(rows) / (50 * rows)
    return frame.assign(
        attempt_id=[f"{n:07d}" for n in range(rows)],
        tokens_per_s_per_gpu=frame["tokens_per_s_per_gpu"] * noise,
        peak_allocated_bytes=frame["peak_allocated_bytes"] * noise,
    )


def opened(browser: Browser, page: Path, fragment: str = "", **options: Any) -> Browser:
    browser.open(page, fragment, **options)
    browser.wait("window.Explorer?.timing.plotted")
    return browser


def shown(browser: Browser) -> int:
    """Rows that the page says it shows."""
    return int(browser.text("#runs-count").split(" of ")[0].replace(",", ""))


def chip(column: str, value: object) -> str:
    return f'[data-column="{column}"] input[value="{value}"]'


def set_value(browser: Browser, selector: str, value: str) -> None:
    """Type into a field, or choose from a list."""
    browser.js(
        "((e, v) => { e.value = v; for (const type of ['input', 'change'])"
        " e.dispatchEvent(new Event(type, { bubbles: true })); })(document.querySelector(arguments[0]), arguments[1])",
        selector,
        value,
    )
