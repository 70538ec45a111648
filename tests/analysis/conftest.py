"""Labelled frames of a synthetic sweep, built once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from analysis.page import draw_figures
from analysis.rows.cohorts import split
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS
from tests.analysis import synthetic

if TYPE_CHECKING:
    from tests.analysis.browser import Browser


def frame_of(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Rows as analysis reads them from disk."""
    return table_from_rows(rows, ATTEMPTS).to_pandas()


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
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report's page of the study, for the files of one group of pytest-xdist, which only read it."""
    from tests.analysis.report_page import STUDY, built

    return built(STUDY, tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium, one for each file of tests; skips where there is none."""
    from tests.analysis.browser import chromium

    with chromium() as found:
        yield found
