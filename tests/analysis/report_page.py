"""What tests of the report's page share: pages of the study and of recorded rows, and what a reader does in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import report
from analysis.options import Options
from analysis.rows import cohorts
from analysis.rows.cohorts import Cohort
from analysis.rows.load import load
from tests.analysis.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "recorded"
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
WORDS = Options(figures=("outcomes",), price_per_gpu_hour=2.5)
"""One figure, and a price."""


def built(source: Path, out: Path, options: Options = WORDS) -> Path:
    """The page of some results. Skips where the study's table is not here."""
    if not source.exists():
        pytest.skip(f"{source.name} is not here")
    return report.build(source, out, options)


def parts_of(source: Path) -> list[Cohort]:
    return cohorts.split(load(source).attempts)


def opened(browser: Browser, page: Path, fragment: str = "", **options: Any) -> Browser:
    browser.open(page, fragment, **options)
    browser.wait("window.Report?.ready")
    return browser


def choose(browser: Browser, field: str, value: object) -> None:
    """Choose from a list of the finder, or type into one of its fields."""
    browser.js(
        "((e, v) => { e.value = v; for (const type of ['input', 'change'])"
        " e.dispatchEvent(new Event(type, { bubbles: true })); })(document.getElementById(arguments[0]), arguments[1])",
        field,
        str(value),
    )


def cell(workload: str, size: int) -> str:
    """Selector of a cell of the map."""
    return f'#map button[data-m="{workload}"][data-g="{size}"]'


def answers(browser: Browser, queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page's `Answer` says to queries (of the part that is chosen), as plain data."""
    script = """JSON.stringify(JSON.parse(arguments[0]).map((query) => {
      const part = window.Report.state.part, found = Answer.find(part, query);
      const told = ({ row, rate, tied, unknown, behind }) =>
        ({ attempt: part.value("attempt_id", row), rate, tied, unknown, behind });
      return {
        points: found.points, outOfMemory: found.outOfMemory, failed: found.failed, finished: found.finished,
        fits: found.fits, batch: found.batch, fasterAt: found.fasterAt, list: found.list.map(told),
        changes: found.best ? Answer.changes(part, found).map((row) =>
          ({ ...row, run: row.run ? part.value("attempt_id", row.run.row) : null })) : [],
      };
    }))"""
    found: list[dict[str, Any]] = json.loads(browser.js(script, json.dumps(queries)))
    return found
