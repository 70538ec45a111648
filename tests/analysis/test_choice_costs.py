"""Costs of choices against pairs that are found one by one."""

from __future__ import annotations

import statistics
from typing import Any

import pandas as pd
import pytest

from analysis.rows import choice_costs, metrics, pairs
from tests.analysis.conftest import recorded_cohorts


def brute(frame: pd.DataFrame, axis: str, first: object, value: object) -> list[float]:
    """Ratios of every pair, each compared setting by setting."""
    rows: list[dict[str, Any]] = pairs.once(pairs.comparable(frame)).to_dict("records")
    same = [name for name in pairs.SETTINGS if name not in (axis, *choice_costs.AXES[axis])]

    def agree(one: object, two: object) -> bool:
        return bool((pd.isna(one) and pd.isna(two)) or one == two)  # type: ignore[call-overload]

    ratios = []
    for one in (row for row in rows if row[axis] == first):
        for two in (row for row in rows if row[axis] == value):
            if axis == "zero_stage" and 1 in (one["dp"], two["dp"]):
                continue
            if axis == "pp" and two["pp_schedule"] != ("1f1b" if first == 1 else one["pp_schedule"]):
                continue
            if all(agree(one[name], two[name]) for name in same):
                ratios.append(two[metrics.RANK_BY] / one[metrics.RANK_BY])
    return ratios


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["measured-h200", "rehearsed-h200", "synthetic"])
def test_every_cost_is_that_of_the_pairs_found_one_by_one(slug: str, frame: pd.DataFrame) -> None:
    if slug != "synthetic":
        frame = next(part.frame for part in recorded_cohorts() if part.slug == slug)
    told = choice_costs.table(frame)
    assert told["pairs"].gt(0).any()
    assert not (slug.startswith("rehearsed") and told["axis"].isin(["tp", "cp"]).any())
    for row in told.to_dict("records"):
        ratios = brute(frame, row["axis"], row["first"], row["value"])
        assert row["pairs"] == len(ratios), row
        if ratios:
            expected = (statistics.median(ratios), min(ratios), max(ratios))
            assert (row["median"], row["low"], row["high"]) == pytest.approx(expected)
        else:
            assert pd.isna(row["median"])


def test_without_rows_there_are_no_choices(frame: pd.DataFrame) -> None:
    assert choice_costs.table(frame[frame["outcome"] == "oom"].reset_index(drop=True)).empty
