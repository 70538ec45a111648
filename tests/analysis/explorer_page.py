"""What tests of the explorer share: pages of recorded and made-up rows, and the moves that a user makes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.explorer import row_data, write_explorer
from analysis.rows import cohorts
from analysis.rows.load import Results, load
from results import store
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.conftest import frame_of

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "recorded"
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
HOSTILE = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>\"'&amp;</script>"
POINTS = list(synthetic.experiments(micro_batch_sizes=(1, 4)))


def results_of(attempts: pd.DataFrame, path: Path) -> Results:
    return Results(path=path, sweeps=(), attempts=attempts, ledger=store.empty_ledger().to_pandas(), problems=())


def written(results: Results, folder: Path) -> Path:
    return write_explorer.write(results, cohorts.split(results.attempts), folder / "explorer.html")


def without_rows(folder: Path) -> Path:
    """An explorer of nothing: memory and pipelines need no rows."""
    return written(results_of(frame_of([]), folder), folder)


def of_recorded(folder: Path) -> tuple[Path, pd.DataFrame]:
    """The page of the recorded sweeps, and their rows in its order."""
    results = load(RECORDED)
    parts = cohorts.split(results.attempts)
    return write_explorer.write(results, parts, folder / "recorded.html"), row_data.table(parts)


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
