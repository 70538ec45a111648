"""What one choice does by itself and where scaling loses, by hand and on the study's rows."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest

from analysis.claims import pair_claims
from analysis.figures import effects, efficiency
from analysis.rows import by_degree, choice_costs
from analysis.rows.stats import MIN_FOR_INTERVAL
from tests.analysis.figure_texts import words
from tests.analysis.test_study import study  # noqa: F401
from tests.analysis.test_why_figures import GIB, labelled, point, run

# Matched pairs


def zero_pairs(ratio: float, count: int, **second: Any) -> list[dict[str, Any]]:
    """Pairs that differ in ZeRO 0 or 1 alone, the second of ``ratio`` times the throughput and half the memory."""
    rows = []
    settings = itertools.islice(itertools.product((1, 2, 4, 8), ("none", "selective", "full"), (16, 64)), count)
    for i, (mbs, recompute, batch) in enumerate(settings):
        for zero in (0, 1):
            experiment = point(
                dp=2, tp=2, micro_batch_size=mbs, global_batch_size=batch, recompute=recompute, zero_stage=zero
            )
            rate, more = (1000.0 * (ratio if zero else 1), second if zero else {})
            rows.append(run(experiment, 2 * i + zero, rate, peak_allocated_bytes=GIB * (1 if zero else 2), **more))
    return rows


def cost(frame: pd.DataFrame, axis: str, value: object) -> pd.Series:
    """What a value of an axis costs."""
    return choice_costs.table(frame).set_index(["axis", "value"]).loc[(axis, value)]


@pytest.mark.slow
def test_costs_are_medians_over_pairs_of_whatever_batch() -> None:
    frame = labelled(*zero_pairs(0.9, 8))
    zero = cost(frame, "zero_stage", 1)
    assert (zero["pairs"], zero["memory_pairs"], zero["memory_median"]) == (8, 8, 0.5)
    assert zero[["median", "low", "high", "interval_low", "interval_high"]].tolist() == pytest.approx([0.9] * 5)
    # 1 → 2 of each recomputation, ZeRO stage and batch: the throughputs are equal.
    assert cost(frame, "micro_batch_size", 2)["pairs"] == 4
    assert effects.FIGURE.conclude is not None
    assert effects.FIGURE.conclude(frame) == "By itself ZeRO 0 → 1 costs 10 % (0.90 to 0.90, n = 8 pairs)."


@pytest.mark.slow
def test_recomputing_fewer_layers_is_a_choice_of_its_own() -> None:
    kinds = (("none", 1, 1000.0), ("full", 1, 700.0), ("full", 4, 900.0), ("norm+rope", 1, 980.0))
    rows = []
    for mbs, batch in itertools.product((1, 2, 4, 8), (16, 64)):
        for kind, every, rate in kinds:
            fields = {"micro_batch_size": mbs, "global_batch_size": batch, "recompute": kind, "recompute_every": every}
            rows.append(run(point(dp=2, tp=2, **fields), len(rows), rate))
    frame = labelled(*rows)
    ratios = {
        ("recompute", "full"): 0.7,  # of all layers alone
        ("recompute", "norm+rope"): 0.98,
        ("recompute_every", 4): 9 / 7,
    }
    for choice, expected in ratios.items():
        found = cost(frame, *choice)
        assert (found["pairs"], found["median"]) == (8, pytest.approx(expected))


@pytest.mark.slow
def test_runs_that_agree_in_everything_make_one_pair_not_many() -> None:
    rows = zero_pairs(0.9, 8)
    again = [row | {"experiment_id": f"seed-{i}", "attempt_id": f"seed-{i}"} for i, row in enumerate(rows)]
    assert cost(labelled(*rows, *again), "zero_stage", 1)["pairs"] == 8


@pytest.mark.slow
def test_the_figure_draws_every_value_that_has_a_pair() -> None:
    frame = labelled(*zero_pairs(0.9, MIN_FOR_INTERVAL - 1))
    assert pd.isna(cost(frame, "zero_stage", 1)["interval_low"])
    assert "ZeRO 0 → 1 (n = 4)" in words(effects.draw(frame))
    assert effects.FIGURE.conclude is not None and effects.FIGURE.conclude(frame) is None
    more = labelled(*zero_pairs(0.9, 8), run(point(tp=8), 99))
    table = choice_costs.table(more)
    drawn = {text for text in words(effects.draw(more)) if "(n = " in text}
    assert len(drawn) == (table["pairs"] > 0).sum() < len(table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"driver_version": "580.1"}, {"device_name": "NVIDIA B200"}, {"torch_version": "2.13.0"}]
)
def test_runs_of_other_drivers_devices_or_versions_are_no_pair(other: dict[str, str]) -> None:
    known = {"driver_version": "570.1", "device_name": "NVIDIA H200", "torch_version": "2.11.0"}
    rows = [row | known for row in zero_pairs(0.9, 8)]
    assert cost(labelled(*rows), "zero_stage", 1)["pairs"] == 8
    moved = [row | (other if row["zero_stage"] == 1 else {}) for row in rows]
    assert cost(labelled(*moved), "zero_stage", 1)["pairs"] == 0
    mixed = [row | (other if i // 2 % 2 else {}) for i, row in enumerate(rows)]
    mixed += [row | {"experiment_id": f"again-{i}"} for i, row in enumerate(mixed)]
    assert any(
        "one median has pairs from several" in " ".join(text.split()) for text in words(effects.draw(labelled(*mixed)))
    )


@pytest.mark.slow
def test_a_degree_takes_ranks_from_dp_at_the_same_batch() -> None:
    rows = [run(point(dp=8), 0, 1000), run(point(dp=4, tp=2), 1, 700), run(point(dp=2, tp=4), 2, 350)]
    rows += [run(point(dp=4, pp=2), 3, 900), run(point(dp=4, pp=2, pp_schedule="gpipe"), 4, 800)]
    rows += [run(point(dp=4, tp=2, global_batch_size=32), 5, 600)]  # another batch: pairs with nothing
    frame = labelled(*rows)
    assert cost(frame, "tp", 2)[["pairs", "median"]].tolist() == [1, 0.7]
    assert cost(frame, "tp", 4)[["pairs", "median"]].tolist() == [1, 0.35]
    assert cost(frame, "pp", 2)[["pairs", "median"]].tolist() == [1, 0.9]  # 1F1B's; GPipe is a choice of its own
    assert cost(frame, "pp_schedule", "gpipe")["pairs"] == 1


@pytest.mark.slow
def test_costs_in_the_study_agree_with_its_claim(study: pd.DataFrame) -> None:  # noqa: F811
    found = cost(study, "zero_stage", 1)
    claim = pair_claims.zero_one_matched(study).evidence
    assert f"{found['median']:.2f} (95 % interval {found['interval_low']:.2f} to" in claim
    assert f"n = {found['pairs']:.0f}" in claim


# Scaling efficiency


@pytest.mark.slow
def test_loss_by_part_sums_to_the_loss() -> None:
    def timed(dp: int, rate: float, parts: dict[str, float]) -> dict[str, Any]:
        experiment = point(dp=dp)
        step = experiment.tokens_per_step / rate / experiment.world_size
        return run(experiment, dp, rate, **{name: share * step for name, share in parts.items()})

    one = {"forward_backward_s": 0.9, "reduce_exposed_s": 0.0, "pipeline_idle_s": 0.0, "optimizer_s": 0.1}
    two = {"forward_backward_s": 0.7, "reduce_exposed_s": 0.25, "pipeline_idle_s": 0.0, "optimizer_s": 0.05}
    table = efficiency.data(labelled(timed(2, 1000.0, one), timed(4, 800.0, two)))
    assert table["layouts"].unique().tolist() == ["pure data parallelism"]  # one layout a size is no best one
    row = table[table["world_size"] == 4].iloc[0]
    assert (row["kind"], row["efficiency"], row["lost"]) == ("strong", pytest.approx(0.8), pytest.approx(0.2))
    # Time a token grew from 1 to 1.25: forward from 0.9 to 0.875, reduction by 0.3125, optimizer from 0.1 to 0.0625.
    assert row["lost to forward and backward"] == pytest.approx((0.875 - 0.9) / 1.25)
    assert row["lost to exposed reduction"] == pytest.approx(0.3125 / 1.25)
    assert row["lost to optimizer"] == pytest.approx((0.0625 - 0.1) / 1.25)
    assert row["lost to not attributed"] == 0
    parts = [name for name in table if name.startswith("lost to ")]
    assert row[parts].sum() == pytest.approx(row["lost"])


@pytest.mark.slow
def test_loss_of_runs_without_parts_is_not_attributed() -> None:
    frame = labelled(run(point(dp=2), 0, 1000.0), run(point(dp=4), 1, 700.0))
    table = efficiency.data(frame)
    assert table["lost to not attributed"].tolist() == pytest.approx([0.0, 0.3])
    figure = efficiency.draw(frame)
    assert any("not attributed: no run has timed the parts" in text for text in words(figure))
    half = labelled(
        run(point(dp=2), 0, 1000.0),
        run(point(dp=4), 1, 700.0, forward_backward_s=1.0, reduce_exposed_s=0.1, pipeline_idle_s=0.0, optimizer_s=0.1),
    )
    last = efficiency.data(half).iloc[-1]
    assert last["lost to not attributed"] == pytest.approx(0.3)
    assert pd.isna(last["lost to optimizer"])


@pytest.mark.slow
def test_weak_scaling_keeps_the_tokens_of_a_device_and_a_best_layout_needs_others() -> None:
    def swept(recomputations: tuple[str, ...]) -> pd.DataFrame:
        choices = itertools.product((2, 4), recomputations, (1, 2))
        fields = [{"dp": dp, "recompute": r, "micro_batch_size": mbs} for dp, r, mbs in choices]
        points = [point(global_batch_size=8 * each["dp"], **each) for each in fields]
        return labelled(*[run(p, i, 100.0 * p.micro_batch_size) for i, p in enumerate(points)])

    table = efficiency.data(swept(("none", "selective", "full")))
    assert set(table["kind"]) == {"weak"}
    best = table[table["layouts"] == "best layout"]
    assert (best["world_size"].tolist(), best["candidates"].tolist()) == ([2, 4], [6, 6])
    assert best["efficiency"].tolist() == [1.0, 1.0]
    few = efficiency.data(swept(("none", "full")))  # four layouts a size
    assert set(few["layouts"]) == {"pure data parallelism"}


@pytest.mark.slow
def test_the_most_efficient_size_has_100_per_cent_and_other_precisions_are_left_out() -> None:
    """A smallest size that has no memory for its best micro-batch had made others 215 % efficient."""
    rows = [run(point(dp=2), 0, 400.0), run(point(dp=4), 1, 1000.0), run(point(dp=8), 2, 700.0)]
    rows.append(run(point(dp=8, precision="fp8_tensorwise"), 3, 2000.0))
    table = efficiency.data(labelled(*rows))
    assert table["world_size"].tolist() == [2, 4, 8]
    assert table["efficiency"].tolist() == pytest.approx([0.4, 1.0, 0.7])
    said = efficiency.conclude(labelled(*rows))
    assert said is not None and "8 GPUs have 70 % of the throughput per device of 4 at the same batch" in said
    degrees = by_degree.data_parallel(labelled(*rows))
    assert degrees["tokens_per_s_per_gpu"].tolist() == [400.0, 1000.0, 700.0]
