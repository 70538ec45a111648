"""Costs of choices against pairs that are found one by one."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pandas as pd
import pytest

from analysis.figures import conclusions
from analysis.index_page import page_data
from analysis.rows import choice_costs, metrics, pairs
from analysis.rows.stats import MIN_FOR_INTERVAL
from tests.analysis.conftest import recorded_cohorts
from tests.analysis.test_why_figures import labelled, point, run
from tests.sampling import SEED, sampled

SPLITS: tuple[dict[str, Any], ...] = ({}, {"pp_split": "even"}, {"pp_schedule": "gpipe", "pp_split": "even"})


def differ_only_in(axis: str, one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two rows agree in every setting but the axis and what may differ with it, setting by setting."""
    free, _, needs = choice_costs.AXES[axis]
    if needs and 1 in (one[needs], two[needs]):
        return False
    return all(same(name, one, two) for name in pairs.SETTINGS if name not in (axis, *free))


def same(setting: str, one: dict[str, Any], two: dict[str, Any]) -> bool:
    degree, usual = pairs.USUAL.get(setting, ("", ""))
    plain = [bool(degree) and (row[degree] == 1 or pd.isna(row[setting])) for row in (one, two)]
    ours, theirs = (usual if is_plain else row[setting] for is_plain, row in zip(plain, (one, two), strict=True))
    return bool((pd.isna(ours) and pd.isna(theirs)) or ours == theirs)


def brute(frame: pd.DataFrame, axis: str, first: object, value: object) -> list[tuple[float, float]]:
    """Ratios of throughput and memory of every pair, each compared setting by setting."""
    rows: list[dict[str, Any]] = pairs.once(pairs.comparable(frame)).to_dict("records")
    columns = (metrics.RANK_BY, metrics.memory_column(frame))
    ratios = []
    for one in (row for row in rows if row[axis] == first):
        for two in (row for row in rows if row[axis] == value):
            if differ_only_in(axis, one, two):
                rate, memory = (two[name] / one[name] for name in columns)
                ratios.append((rate, memory))
    return ratios


def _some_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows drawn by the seed; the time to compare all recorded rows with each other grows with their square."""
    chosen = random.Random(SEED).sample(range(len(frame)), min(600, len(frame)))
    return frame.iloc[sorted(chosen)].reset_index(drop=True)


@pytest.mark.slow
@pytest.mark.parametrize("slug", sampled(["measured-h200", "rehearsed-h200", "synthetic"], 1, seconds=8))
def test_every_cost_is_that_of_the_pairs_found_one_by_one(slug: str, frame: pd.DataFrame) -> None:
    if slug != "synthetic":
        frame = _some_rows(next(part.frame for part in recorded_cohorts() if part.slug == slug))
    told = choice_costs.table(frame)
    assert told["pairs"].gt(0).any()
    assert not (slug.startswith("rehearsed") and told["axis"].isin(["tp", "cp"]).any())
    for row in told.to_dict("records"):
        ratios = brute(frame, row["axis"], row["first"], row["value"])
        rates = [rate for rate, _ in ratios]
        memory = [ratio for _, ratio in ratios if not pd.isna(ratio)]
        assert (row["pairs"], row["memory_pairs"]) == (len(rates), len(memory)), row
        assert pd.notna(row["interval_low"]) == (len(rates) >= MIN_FOR_INTERVAL)
        for prefix, found in (("", rates), ("memory_", memory)):
            told_of = [row[f"{prefix}{name}"] for name in ("median", "low", "high")]
            if found:
                assert told_of == pytest.approx([statistics.median(found), min(found), max(found)])
            else:
                assert all(pd.isna(told_of))


@pytest.mark.slow
def test_layouts_of_other_kinds_of_context_parallelism_or_splits_are_no_pair() -> None:
    """One stage agrees with the usual schedule and split, one rank of a sequence with ring attention."""
    kinds = [{}, {"cp_kind": "ulysses"}, {"cp_kind": "ulysses", "recompute": "full"}]
    rows = [run(point(dp=2, cp=2, **fields), place, 100.0 - 10 * place) for place, fields in enumerate(kinds)]
    rows += [run(point(dp=4), 3, 200.0)]
    rows += [run(point(dp=2, pp=2, **fields), 4 + place, 50.0 - place) for place, fields in enumerate(SPLITS)]
    told = choice_costs.table(labelled(*rows)).set_index(["axis", "value"])
    known = told[told["pairs"] > 0]["median"].to_dict()
    expected = {
        ("pp_schedule", "gpipe"): 48 / 49,
        ("cp", 2): 0.5,
        ("recompute", "full"): 80 / 90,
        ("cp_kind", "ulysses"): 0.9,
        ("pp", 2): 0.25,
    }
    assert known == pytest.approx(expected)


def test_without_rows_there_are_no_choices(frame: pd.DataFrame) -> None:
    assert choice_costs.table(frame[frame["outcome"] == "oom"].reset_index(drop=True)).empty


@pytest.mark.slow
def test_values_of_fractions_and_degrees_are_written_alike() -> None:
    """Where the axes that vary have numbers alone, as where one has words."""
    shares = [
        run(point(dp=2, optimizer_offload=share), i, 100.0 - 40 * share) for i, share in enumerate((0.0, 0.5, 1.0))
    ]
    frame = labelled(*shares, run(point(tp=2), 3, 90.0))
    told = page_data.choices_of(frame, ("axis", "first", "value"))
    assert [tuple(one.values()) for one in told] == [
        ("tp", "1", "2"),
        ("optimizer_offload", "0", "0.5"),
        ("optimizer_offload", "0", "1"),
    ]
    table = choice_costs.table(frame)
    assert [conclusions.choice(row) for row in table.to_dict("records")] == [
        "tp 1 → 2",
        "offloaded states 0 → 0.5",
        "offloaded states 0 → 1",
    ]
    assert [line.split(",")[:3] for line in table.to_csv(index=False).splitlines()[1:]] == [
        ["tp", "1", "2"],
        ["optimizer_offload", "0", "0.5"],
        ["optimizer_offload", "0", "1"],
    ]
