"""Failures, device-hours, training's price and energy, and drift: by hand, and what the figures say of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pandas as pd
import pytest

from analysis.figures import cost, drift, registry
from tests.analysis import synthetic
from tests.analysis.figure_texts import words
from tests.analysis.test_study import study  # noqa: F401
from tests.analysis.test_why_figures import NAMES, labelled, point, run

# Failures and cost


@pytest.mark.slow
def test_failures_by_phase_count_points_and_hours() -> None:
    rows = [
        synthetic.attempt(point(micro_batch_size=1), 0, outcome="oom", phase="build", duration_s=450.0),
        synthetic.attempt(point(micro_batch_size=2), 1, outcome="oom", phase="build", duration_s=450.0),
        synthetic.attempt(point(micro_batch_size=4), 2, outcome="hang", phase="step", duration_s=900.0),
        synthetic.attempt(point(micro_batch_size=8), 3, outcome="crash", phase=None, duration_s=10.0),
    ]
    rows.append(rows[2] | {"attempt_id": "retried", "attempt_number": 2, "outcome": "ok"})
    frame = labelled(*rows)
    table = NAMES["failures_by_phase"].data(frame).set_index(["outcome", "phase"])
    assert table["points"].to_dict() == {("oom", "build"): 2, ("crash", "not said"): 1}
    assert table.loc[("oom", "build"), "device_hours"] == pytest.approx(2.0)  # twice 450 s on 8 GPUs
    shown = words(NAMES["failures_by_phase"].draw(frame))
    assert "2\n2 GPU-hours" in shown
    assert {"out of memory", "crash", "not said"} <= shown
    rows[0] = rows[0] | {"duration_s": None}
    again = NAMES["failures_by_phase"].data(labelled(*rows)).set_index(["outcome", "phase"])
    assert pd.isna(again.loc[("oom", "build"), "device_hours"])


@pytest.mark.slow
def test_device_hours_by_outcome_and_what_they_cost_only_with_a_price() -> None:
    rows = [
        run(point(dp=8), 0, duration_s=3600.0),
        run(point(dp=8, micro_batch_size=2), 1) | {"duration_s": None},
        synthetic.attempt(point(dp=4), 2, outcome="oom", duration_s=1800.0),
    ]
    frame = labelled(*rows)
    table = cost.spent(frame).set_index(["world_size", "outcome"])
    assert table["device_hours"].to_dict() == {(4, "oom"): 2.0, (8, "ok"): 8.0}
    assert table.loc[(8, "ok"), "attempts_without_duration"] == 1
    assert table["price"].isna().all()
    figure = NAMES["device_hours"].draw(frame)
    shown = words(figure)
    assert "10 GPU-hours, 20.0 % of them by attempts that failed" in shown
    assert any("1 attempt without a duration" in text for text in shown)
    assert cost.spent(frame, 2.5)["price"].tolist() == pytest.approx([5.0, 20.0])
    assert any("At 2.5 an hour and device: 25" in text for text in words(cost.draw_spent(frame, 2.5)))
    priced = {spec.name: spec for spec in registry.priced(2.5)}
    assert [*priced] == [*NAMES]
    assert priced["device_hours"].data(frame)["price"].tolist() == pytest.approx([5.0, 20.0])


def test_a_rehearsal_holds_one_device() -> None:
    frame = labelled(run(point(dp=8), 0, method="rehearsed", duration_s=3600.0))
    assert cost.spent(frame)["device_hours"].tolist() == [1.0]


@pytest.mark.slow
def test_what_a_trillion_tokens_take() -> None:
    frame = labelled(run(point(dp=8), 0, 10_000.0, power_w=700.0), run(point(dp=8, micro_batch_size=2), 1, 9_950.0))
    [row] = cost.training(frame).to_dict("records")
    assert row["device_hours_per_trillion_tokens"] == pytest.approx(27_777.8, abs=0.1)
    assert row["days_per_trillion_tokens"] == pytest.approx(144.7, abs=0.05)
    assert row["wh_per_million_tokens"] == pytest.approx(19.44, abs=0.01)  # 0.07 J a token
    assert row["tie"]  # steps vary by 1 %
    assert pd.isna(row["price_per_trillion_tokens"])
    assert not any("Price" in text for text in words(NAMES["training_cost"].draw(frame)))
    assert cost.training(frame, 3.0)["price_per_trillion_tokens"].tolist() == pytest.approx([83_333.3], abs=0.1)
    assert "Price of 10¹² tokens, 3 an hour" in words(cost.draw_training(frame, 3.0))
    cold = labelled(run(point(), 0, power_w=None))
    assert cost.training(cold)["wh_per_million_tokens"].isna().all()
    assert not any("energy" in text for text in words(NAMES["training_cost"].draw(cold)))


# Drift


def repeated(count: int, apart_s: float, slower: float = 0.0, **columns: Any) -> list[dict[str, Any]]:
    """Repeats of one experiment, each slower than the one before by a share of the first."""
    start = synthetic.attempt(point(), 0)["started_at"]
    return [
        run(
            point(),
            i,
            1000.0 * (1 - slower * i),
            started_at=start + timedelta(seconds=apart_s * i),
            attempt_number=i + 1,
            attempt_id=f"run-{i:03d}",
            **{name: value[i % len(value)] for name, value in columns.items()},
        )
        for i in range(count)
    ]


def test_repeats_are_compared_with_their_median() -> None:
    rows = repeated(5, 60, 0.1)
    table = drift.data(labelled(*rows[::-1]))
    assert table["order"].tolist() == [1, 2, 3, 4, 5]
    assert table["relative"].tolist() == pytest.approx([1 / 0.8, 0.9 / 0.8, 1, 0.7 / 0.8, 0.6 / 0.8])
    assert table["compared_with"].unique().tolist() == ["repeats"]


def test_others_are_compared_with_their_prediction_scaled_over_runs_alike() -> None:
    found = [1.0, 1.1, 1.5]  # seconds; predicted 0.9 of each but the last, which is slower than it should be
    rows = [
        run(point(micro_batch_size=mbs), i, step_time_s=step, predicted_step_time_s=0.9 * step if i < 2 else 0.9)
        for i, (mbs, step) in enumerate(zip((1, 2, 4), found, strict=True))
    ]
    rows.append(run(point(dp=4, tp=2), 3, step_time_s=1.0, predicted_step_time_s=0.5))  # alone of its degrees
    table = drift.data(labelled(*rows))
    assert table["relative"].tolist()[:3] == pytest.approx([1.0, 1.0, (0.9 / 1.5) / 0.9])
    assert pd.isna(table["relative"].iloc[3])
    assert table["compared_with"].tolist()[:3] == ["prediction"] * 3


@pytest.mark.slow
def test_short_sweeps_say_so_and_long_ones_tell_a_trend() -> None:
    few = drift.data(labelled(*repeated(5, 3600)))
    assert str(drift.too_short(few)).startswith("5 comparable runs, fewer than 20")
    quick = drift.data(labelled(*repeated(30, 10)))
    assert drift.too_short(quick) == "30 comparable runs within 5 minutes: too short a time to tell drift"
    assert drift.trend(quick) is None
    long = drift.data(labelled(*repeated(30, 600, 0.001)))
    correlation, chance = drift.trend(long) or (0.0, 1.0)
    assert correlation == pytest.approx(-1.0)
    assert chance < 0.01
    flat = drift.data(labelled(*repeated(30, 600)))
    assert drift.trend(flat) is None
    assert any("all equal" in text for text in words(NAMES["drift"].draw(labelled(*repeated(30, 600)))))


@pytest.mark.slow
def test_a_trend_of_predictions_by_several_commits_is_said_not_to_be_the_nodes() -> None:
    rows = [
        row | {"experiment_id": f"e{i}", "predicted_step_time_s": 1.0, "git_commit": "ab"[i % 2]}
        for i, row in enumerate(repeated(210, 600, 0.001))
    ]
    for i, row in enumerate(rows):
        row["step_time_s"] = 1.0 + 0.001 * i
    text = next(text for text in words(NAMES["drift"].draw(labelled(*rows))) if "rank correlation" in text)
    assert "(p < 0.001 without drift)" in text
    assert "Predictions are of 2 commits: a change of the planner between them also shows as a trend" in text
    same = [row | {"git_commit": "a"} for row in rows]
    assert not any("commits" in text for text in words(NAMES["drift"].draw(labelled(*same))))


def test_nodes_stand_apart_with_their_medians() -> None:
    rows = repeated(12, 600, nodes=(["a"], ["b"], ["b"]))
    for row in rows:
        if row["nodes"] == ["b"]:
            row["tokens_per_s_per_gpu"] *= 0.9
    frame = labelled(*rows)
    nodes = drift.by_node(drift.data(frame))
    assert {name: count for name, (count, _) in nodes.items()} == {"a": 4, "b": 8}
    assert nodes["a"][1] is None  # four runs: no median
    slow = nodes["b"][1]
    assert slow is not None
    assert slow.median == pytest.approx(1.0)  # most runs are b's: they are the median
    shown = words(NAMES["drift"].draw(frame))
    assert "a: n = 4, too few for a median" in shown
    assert any(text.startswith("b: median 1.00 (95 % interval") for text in shown)


@pytest.mark.slow
def test_unknown_clock_events_are_not_none(frame: pd.DataFrame) -> None:
    shown = words(NAMES["drift"].draw(frame))
    assert {"no clock event seen", "clocks throttled (sw_power_cap)"} <= shown
    assert "clock events not known" not in shown
    unknown = frame.assign(throttle_reasons=None)
    assert "clock events not known" in words(NAMES["drift"].draw(unknown))
    assert "no clock event seen" not in words(NAMES["drift"].draw(unknown))


@pytest.mark.slow
def test_the_study_shows_its_two_networks_in_order(study: pd.DataFrame) -> None:  # noqa: F811
    table = drift.data(study)
    assert table["job_id"].is_monotonic_increasing
    known = table[table["network_regime"].notna()]
    fast = known["network_regime"] == "fast"
    # Contiguous blocks: far fewer changes than a shuffled order would have.
    assert (fast != fast.shift()).sum() < 0.25 * 2 * len(known) * fast.mean() * (1 - fast.mean())
    shown = words(NAMES["drift"].draw(study))
    assert {f"fast regime (n = {int(fast.sum()):,})", f"slow regime (n = {int((~fast).sum()):,})"} <= shown
