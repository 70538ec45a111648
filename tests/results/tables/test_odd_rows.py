"""Rows with values that no run can have."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from results.tables.files import nullable
from results.tables.odd_rows import without_odd_rows
from results.tables.schema import ATTEMPTS
from results.tables.store import runs_of
from tests.analysis import synthetic
from tests.analysis.pages import POINTS

GOOD = synthetic.attempts(POINTS[:3])


def table(**odd: Any) -> pa.Table:
    """Three rows, the second with odd values."""
    rows = [GOOD[0], {**GOOD[1], "attempt_id": "second", **odd}, GOOD[2]]
    return pa.Table.from_pylist(rows, nullable(ATTEMPTS))


def test_ordinary_rows_stay_as_they_are() -> None:
    before = table(step_time_s=math.nan, host_lead_s=-1e-5, loss_max_difference=math.inf, losses=[math.inf, math.nan])
    after, problems = without_odd_rows(before)
    assert after is before and not problems
    assert without_odd_rows(before.slice(0, 0)) == (before.slice(0, 0), [])


def test_a_few_columns_are_enough_and_warnings_name_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = table(step_time_s=-1.0).select(["attempt_id", "step_time_s"])
    assert runs_of(few, tmp_path).num_rows == 2
    assert f"{tmp_path}: 1 row left out: step_time_s=-1.0 (attempt second)" in caplog.text


def test_a_table_of_odd_rows_only_is_empty() -> None:
    after, [problem] = without_odd_rows(table(world_size=0).slice(1, 1))
    assert after.num_rows == 0 and problem.startswith("1 row left out: world_size=0")


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("step_time_s", -1.0, "-1.0"),
        ("step_time_s", math.inf, "inf"),
        ("tokens_per_s_per_gpu", 0.0, "0.0"),
        ("world_size", 0, "0"),
        ("num_layers", 2**60, str(2**60)),
        ("zero_stage", -1, "-1"),
        ("outcome", "exploded", "exploded"),
        ("method", "guessed", "guessed"),
        ("model", "m" * 300, "m" * 59 + "…"),
        ("cluster", "a\0b", r"'a\x00b'"),
        ("config_json", "[" * 2000, "[" * 59 + "…"),
    ],
)
def test_a_row_that_cannot_be_is_left_out(column: str, value: Any, shown: str) -> None:
    after, problems = without_odd_rows(table(**{column: value}))
    assert [row["attempt_id"] for row in after.to_pylist()] == [GOOD[0]["attempt_id"], GOOD[2]["attempt_id"]]
    assert problems == [f"1 row left out: {column}={shown} (attempt second) is no value that a run can have"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("phase", "party"),
        ("build_s", -1.0),
        ("mfu_palm", math.inf),
        ("power_w", 1e308),
        ("timed_steps", 2**62),
        ("peak_allocated_bytes", -1),
        ("started_at", datetime(9999, 12, 31, tzinfo=UTC)),
        ("forward_by_stage_s", [0.1, math.inf]),
        ("breakdown_comm_by_axis", [None]),
        ("breakdown_comm_by_axis", [{"axis": "tp", "exposed_s": -1.0, "hidden_s": None}]),
        ("traffic", [None]),
    ],
)
def test_an_odd_measurement_is_left_out_and_its_row_stays(column: str, value: Any) -> None:
    after, [problem] = without_odd_rows(table(**{column: value}))
    assert after[column].to_pylist() == [GOOD[0][column], None, GOOD[2][column]]
    assert problem.startswith(f"1 value left out: {column}=") and "(attempt second)" in problem
