"""Labelled frames of a synthetic sweep, built once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from analysis.page import draw_figures
from analysis.rows.cohorts import Cohort, split
from analysis.rows.load import load
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS
from tests.analysis import synthetic

if TYPE_CHECKING:
    from tests.analysis.browser import Browser


RECORDED = Path(__file__).resolve().parents[2] / "results" / "recorded"


def frame_of(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Rows as analysis reads them from disk."""
    return table_from_rows(rows, ATTEMPTS).to_pandas()


@cache
def recorded_cohorts() -> tuple[Cohort, ...]:
    """The recorded sweeps, read once by a process; their frames are only read."""
    return tuple(split(load(RECORDED).attempts))


@pytest.fixture(autouse=True, scope="session")
def strict_figures() -> None:
    """Errors of figures fail tests."""
    draw_figures.STRICT = True


@pytest.fixture(scope="session")
def frame() -> pd.DataFrame:
    """Measured rows of three models on 1 to 8 GPUs, failures of several kinds included."""
    [cohort] = split(frame_of(synthetic.attempts(list(synthetic.experiments(micro_batch_sizes=(1, 4))))))
    return cohort.frame


@pytest.fixture(scope="session")
def recorded_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    """The explorer's page of the recorded sweeps, and their rows in its order: for one group, as `study_page`."""
    from tests.analysis.explorer_page import of_recorded

    return of_recorded(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report's page of the study, for the files of one group of pytest-xdist, which only read it."""
    from tests.analysis.report_page import STUDY, built

    return built(STUDY, tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def chromium_of_worker() -> Iterator[Browser]:
    """Headless Chromium, started once by a process: a start takes nearly two seconds of a processor."""
    from tests.analysis.browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def browser(chromium_of_worker: Browser) -> Iterator[Browser]:
    """Headless Chromium, for one file of tests, which leaves no page open; skips where there is none."""
    yield chromium_of_worker
    chromium_of_worker.driver.get("about:blank")
