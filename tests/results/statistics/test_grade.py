"""Predictions against measurements: statistics by hand, and pairs and grades from rows written here."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest

from results.errors import InvalidResults
from results.statistics.errors_of_predictions import (
    coverage,
    refusals,
    regret,
    relative_difference,
    relative_errors,
    summary,
)
from results.statistics.grade import (
    grades,
    measured_points,
    oom_curve,
    pairs_of_predictions,
    pairs_of_rows,
    with_rehearsals,
)
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def test_errors_in_short_by_hand() -> None:
    found = summary(relative_errors([1.1, 0.8, 1.0, math.nan, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0, 0.0, math.nan]))
    assert found is not None and found.n == 3
    assert (found.mape, found.bias) == (pytest.approx(0.1), pytest.approx(-0.1 / 3))
    assert found.median == pytest.approx(0.0)
    assert found.p90 == pytest.approx(0.1 + 0.8 * 0.1)  # between the second and the third of 0, 0.1 and 0.2
    assert summary([]) is None
    assert relative_difference(1.0, 0.0) > 1e9 and relative_difference(2.2, 2.0) == pytest.approx(0.1)


def test_regret_is_what_the_tries_missed() -> None:
    rates = [10.0, 9.0, 8.0, 4.0]
    assert regret([4, 3, 2, 1], rates, 1) == 0
    assert regret([1, 2, 3, 4], rates, 1) == pytest.approx(0.6)
    assert regret([1, 2, 3, 4], rates, 3) == pytest.approx(0.1)
    assert regret([1, 2, 3, 4], rates, 4) is None, "every point is tried"
    assert regret([1, 1, 1, 1], rates, 1) == pytest.approx(0.6), "alike: the worst of them may be tried first"


def test_regret_falls_with_tries_and_order_of_rows_changes_nothing() -> None:
    draw = random.Random(4)
    for _ in range(50):
        n = draw.randint(3, 12)
        one, two = ([draw.randint(1, 6) * 1.0 for _ in range(n)] for _ in range(2))
        found = [regret(one, two, tries) for tries in range(1, n)]
        values = [value for value in found if value is not None]
        assert len(values) == n - 1 and values == sorted(values, reverse=True) and 0 <= values[-1] <= values[0] < 1
        order = draw.sample(range(n), n)
        again = [regret([one[i] for i in order], [two[i] for i in order], tries) for tries in range(1, n)]
        assert again == found


def test_intervals_cover_with_their_ends() -> None:
    assert coverage([1, 1, 1, math.nan], [2, 2, 2, 2], [2, 3, 1.5, 1.5]) == pytest.approx(2 / 3)
    assert coverage([math.nan], [math.nan], [1.0]) is None


def test_refusals_by_hand() -> None:
    table = refusals([0.5, 0.9, 1.0, 1.2, math.nan], [False, True, False, True, True], cuts=(0.8, 1.0, 1.3))
    assert table["fitting_refused"].tolist() == [1, 0, 0]
    assert table["oom_kept"].tolist() == [0, 1, 2]
    assert table["right"].tolist() == [0.75, 0.75, 0.5]
    assert set(table["oom"]) == {2} and set(table["fitting"]) == {2}


def row(name: str, method: str = "measured", outcome: str = "ok", **columns: Any) -> dict[str, Any]:
    fixed = {
        "experiment_id": name,
        "attempt_id": f"{name}-{method}-{columns.get('started_at', '')}",
        "method": method,
        "outcome": outcome,
        "cluster": "lab",
        "measurement_version": 2,
        "model": "m",
        "seq_len": 128,
        "world_size": 2,
        "tp": 1,
        "started_at": BEGIN,
        "device_memory_bytes": 100,
        "tokens_per_step": 1000,
    }
    return {**fixed, **columns}


def points_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    known = {field.name: field for field in ATTEMPTS}
    filled = [
        {name: one.get(name, None if field.nullable else "") for name, field in known.items()}
        | {"schema_version": 8, "attempt_number": 1, "will_retry": False, "world_size": one["world_size"]}
        for one in rows
    ]
    return measured_points(with_rehearsals(table_from_rows(filled, ATTEMPTS).to_pandas()))


def test_repeats_are_one_point_and_a_rehearsal_is_matched_on_its_cluster() -> None:
    later = BEGIN + timedelta(hours=1)
    points = points_of(
        [
            row("a", step_time_s=1.0, peak_allocated_bytes=50, predicted_step_time_s=0.9, predicted_peak_bytes=49),
            row("a", step_time_s=3.0, peak_allocated_bytes=60, predicted_step_time_s=1.8, started_at=later),
            row("a", method="rehearsed", step_time_s=2.2, peak_allocated_bytes=60),
            row("a", method="rehearsed", step_time_s=9.0, peak_allocated_bytes=9, cluster="other"),
            row("a", method="rehearsed_fake", step_time_s=7.0, peak_allocated_bytes=30),
            row("b", outcome="oom", predicted_peak_bytes=120, device_memory_bytes=None),
            row("c", outcome="crash", predicted_step_time_s=1.0),
        ]
    )
    assert points["experiment_id"].tolist() == ["b", "a"]
    pairs = pairs_of_rows(points)
    found = {(p.depth, p.quantity): (p.predicted, p.measured) for p in pairs.itertuples()}
    assert found == {
        ("closed_form", "step_time"): (1.8, 2.0),
        ("rehearsed", "step_time"): (2.2, 2.0),
        ("rehearsed", "peak_memory"): (60, 60),
        ("traced", "peak_memory"): (30, 60),
    }
    curve = oom_curve(points).set_index("cut")
    assert (curve.loc[1.0, "oom"], curve.loc[1.0, "oom_kept"], curve.loc[1.3, "oom_kept"]) == (1, 0, 1)


def test_closed_form_times_are_held_to_the_interval_that_their_row_recorded() -> None:
    later = BEGIN + timedelta(hours=1)
    ends = ("predicted_step_time_low_s", "predicted_step_time_high_s")
    rows = [
        row("inside", tp=1, step_time_s=1.0, predicted_step_time_s=0.9) | dict(zip(ends, (0.8, 1.0), strict=True)),
        row("above", tp=1, step_time_s=1.3, predicted_step_time_s=0.9) | dict(zip(ends, (0.8, 1.2), strict=True)),
        row("below", tp=2, step_time_s=0.7, predicted_step_time_s=0.9) | dict(zip(ends, (0.8, 1.2), strict=True)),
        # Repeats are one point, held to the newest prediction: 2.0 s in the middle, outside the first interval alone.
        row("again", tp=2, step_time_s=1.0, predicted_step_time_s=1.0) | dict(zip(ends, (0.9, 1.1), strict=True)),
        row("again", tp=2, step_time_s=3.0, predicted_step_time_s=2.0, started_at=later)
        | dict(zip(ends, (1.8, 2.2), strict=True)),
        row("older", tp=2, step_time_s=1.0, predicted_step_time_s=0.9, peak_allocated_bytes=9, predicted_peak_bytes=9),
        row("inside", method="rehearsed", step_time_s=0.5),
    ]
    pairs = pairs_of_rows(points_of(rows))
    assert pairs.loc[pairs["depth"] == "rehearsed", ["low", "high"]].isna().all(axis=None)
    table = grades(pairs)
    whole = table[table["axis"].isna()].set_index(["depth", "quantity"])
    times = whole.loc[("closed_form", "step_time")]
    assert (times["n"], times["intervals"], times["coverage"]) == (5, 4, 0.5)
    assert pd.isna(whole.loc[("closed_form", "peak_memory"), "coverage"])
    assert (whole.loc[("rehearsed", "step_time"), "intervals"]) == 0
    by_tp = table[(table["axis"] == "tp") & (table["depth"] == "closed_form")].set_index("value")
    assert by_tp["intervals"].tolist() == [2, 2] and by_tp["coverage"].tolist() == [0.5, 0.5]


def test_grades_have_the_whole_and_each_value_of_each_axis() -> None:
    rows = [
        row(f"{tp}-{i}", tp=tp, step_time_s=1.0 + i, predicted_step_time_s=(1.0 + i) * (1.1 if tp == 1 else 0.8))
        for tp in (1, 2)
        for i in range(4)
    ]
    table = grades(pairs_of_rows(points_of(rows)))
    [whole] = table[table["axis"].isna()].to_dict("records")
    assert (whole["n"], whole["cells"]) == (8, 1)
    assert (whole["mape"], whole["bias"]) == (pytest.approx(0.15), pytest.approx(-0.05))
    by_tp = table[table["axis"] == "tp"].set_index("value")
    assert by_tp["bias"].tolist() == pytest.approx([0.1, -0.2])
    assert by_tp["spearman"].tolist() == pytest.approx([1.0, 1.0])
    assert by_tp["top1_regret"].tolist() == [0, 0]
    assert table["coverage"].isna().all() and (table["intervals"].fillna(0) == 0).all()
    assert set(table["axis"].dropna()) == {"tp"}, "an axis of one value tells nothing apart"


def test_predictions_are_matched_by_row_or_by_id() -> None:
    measured = pd.DataFrame({"outcome": ["ok", "oom", "ok"], "step_time_s": [1.0, np.nan, 2.0]})
    predictions = pd.DataFrame(
        {"step_time_s": [1.1, 5.0, 1.8], "step_time_low_s": [0.9, 4.0, 1.7], "step_time_high_s": [1.2, 6.0, 1.9]}
    )
    [whole] = grades(pairs_of_predictions(predictions, measured)).to_dict("records")
    assert (whole["n"], whole["mape"], whole["coverage"], whole["intervals"]) == (2, pytest.approx(0.1), 0.5, 2)
    names = ["x", "y", "z"]
    by_id = pairs_of_predictions(
        predictions.assign(experiment_id=names).iloc[::-1], measured.assign(experiment_id=names)
    )
    assert by_id["predicted"].tolist() == [1.1, 1.8] and by_id["low"].tolist() == [0.9, 1.7]
    with pytest.raises(
        InvalidResults, match="3 predictions have no experiment_id and cannot be matched with 2 measured"
    ):
        pairs_of_predictions(predictions, measured.iloc[:2])
