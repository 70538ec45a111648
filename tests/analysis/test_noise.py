"""Noise and ties: what repeats and timed steps say of a lead, by hand and over simulated sweeps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.figures import best_configurations
from analysis.page import sentences, tables
from analysis.rows import labels, metrics
from results.statistics import noise
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from tests.analysis.figure_texts import words
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.slow

ONE_B = synthetic.MODELS[0]
TRUE_RATES = (1000.0, 995.0, 985.0, 960.0, 900.0, 700.0)
"""Of the six layouts of every simulated sweep."""


def point(mbs: int = 1, model: Any = ONE_B, **fields: Any) -> Experiment:
    given = {"dp": 2, "zero_stage": 1, "global_batch_size": 64, "micro_batch_size": mbs} | fields
    return Experiment.canonical(model=model, **given)


def run(experiment: Experiment, index: int, rate: float, spread: float = 0.0, **columns: Any) -> dict[str, Any]:
    """A finished run whose slowest timed step is ``spread`` slower than its fastest."""
    step = experiment.tokens_per_step / rate / experiment.world_size
    times = {"step_time_s": step, "step_time_min_s": step, "step_time_max_s": step * (1 + spread)}
    return synthetic.attempt(experiment, index, outcome="ok", tokens_per_s_per_gpu=rate, **times, **columns)


def labelled(*rows: dict[str, Any]) -> pd.DataFrame:
    return labels.add_labels(frame_of(list(rows)))


def layouts() -> list[tuple[int, str]]:
    return list(itertools.product((1, 2), ("none", "selective", "full")))


def simulated(models: int, repeats: int, sigma: float, *, by_seed: bool) -> pd.DataFrame:
    """Sweeps of six layouts whose true rates are `TRUE_RATES`, each run ``repeats`` times with normal noise."""
    rng = np.random.default_rng(7)
    rows = []
    for model in range(models):
        shape = synthetic.llama(f"m{model:02d}", 16, 2048, 32, 8192)
        for (mbs, recompute), rate in zip(layouts(), TRUE_RATES, strict=True):
            for again in range(repeats):
                e = point(mbs, shape, recompute=recompute, **({"seed": again} if by_seed else {}))
                sweep = {} if by_seed else {"sweep": f"s{again}"}
                rows.append(run(e, len(rows), rate * math.exp(sigma * rng.standard_normal()), timed_steps=1, **sweep))
    return labelled(*rows)


@pytest.mark.slow
@pytest.mark.parametrize("by_seed", [False, True])
def test_seven_noisy_repeats_make_sets_that_hold_the_fastest(by_seed: bool) -> None:
    frame = simulated(30, 7, 0.04, by_seed=by_seed)
    assert len(metrics.ranked(frame)) == 30 * len(TRUE_RATES)
    best = metrics.best_configurations(frame)
    assert set(best["noise_from"]) == {"repeats of this layout"}
    assert 0.015 < best["noise"].median() < 0.055
    fastest, slowest = ("dp2 z1 · mbs 1×32", "dp2 z1 · mbs 2×16, rc full")
    held = [fastest in (row["layout"], *str(row["tied_layouts"]).split("; ")) for row in best.to_dict("records")]
    assert sum(held) >= 28  # 95 % of 30
    assert best["tie"].sum() >= 21  # 995 and 985 of 1000 cannot be told apart by seven runs with 4 %
    assert not best["tied_layouts"].fillna("").str.contains(slowest, regex=False).any()  # 30 % slower


def test_without_repeats_the_timed_steps_tell_and_say_so() -> None:
    close = labelled(run(point(1), 0, 100.0, 0.02), run(point(2), 1, 99.0, 0.02), run(point(4), 2, 70.0, 0.02))
    [best] = metrics.best_configurations(close).to_dict("records")
    # Five steps that spread by 2 % have a standard deviation of 2 % / 2.36, Blom's range of five normal values.
    assert best["noise"] == pytest.approx(math.log(1.02) / 2.36, rel=0.01)
    assert (best["noise_from"], best["tie"], best["tied"]) == ("its timed steps", True, 1)
    assert (best["runner_up"], best["tied_layouts"]) == ("dp2 z1 · mbs 2×16", "dp2 z1 · mbs 2×16")
    assert best["slower_by"] == pytest.approx(0.01)
    apart = labelled(run(point(1), 0, 100.0, 0.002), run(point(2), 1, 99.0, 0.002))
    [best] = metrics.best_configurations(apart).to_dict("records")
    assert (best["tie"], best["tied"]) == (False, 0)
    assert pd.isna(best["tied_layouts"])


def test_one_timed_step_without_a_repeat_is_unknown_and_not_false() -> None:
    frame = labelled(run(point(1), 0, 100.0, timed_steps=1), run(point(2), 1, 99.9, timed_steps=1))
    best = metrics.best_configurations(frame)
    assert best[["tie", "tied", "noise"]].isna().all(axis=None)
    assert tables.best_rows(frame)[1][0][-1] == "not known"
    assert "the share of noise in this difference is unknown" in " ".join(sentences.what_is_best(frame))
    assert any("noise not known" in text for text in words(best_configurations.draw(frame)))


def test_repeats_come_before_steps_and_count_for_the_layouts_that_ran_once() -> None:
    rates = (100.0, 104.0, 96.0, 102.0, 98.0)
    repeated = [run(point(1), i, rate, 1e-4, sweep=f"s{i}") for i, rate in enumerate(rates)]
    once = [run(point(2), 9, 97.0, 1e-4), run(point(4), 10, 60.0, 1e-4)]
    ranked = metrics.ranked(labelled(*repeated, *once)).set_index("micro_batch_size")
    assert ranked["noise_from"].to_dict() == {
        1: "repeats of this layout",
        2: "repeats of its model and size",
        4: "repeats of its model and size",
    }
    own = np.log(rates).std(ddof=1)
    assert ranked.loc[1, "noise"] == pytest.approx(own)
    assert ranked.loc[2, "noise"] == pytest.approx(own / (1 - 2 / 36) ** 1.5)
    other = run(point(1, synthetic.MODELS[1]), 20, 50.0, 1e-4)
    ranked = metrics.ranked(labelled(*repeated, other)).set_index("model")
    assert ranked.loc["llama3b", "noise_from"] == "repeats of other models and sizes"


def test_steps_that_differ_more_come_before_the_repeats_of_others() -> None:
    """Five quiet repeats of another model must not make winners of runs whose own steps spread by 10 %."""
    quiet = [run(point(1), i, 100.0 + 0.1 * i, 1e-4, sweep=f"s{i}") for i in range(5)]
    loud = [run(point(mbs, synthetic.MODELS[1]), 9 + mbs, 50.0 - mbs, 0.1) for mbs in (1, 2)]
    ranked = metrics.ranked(labelled(*quiet, *loud)).set_index("model")
    assert ranked.loc["llama1b", "noise_from"] == "repeats of this layout"
    borrowed = ranked.loc["llama3b"]
    assert set(borrowed["noise_from"]) == {"its timed steps, which differ more than repeats of other models and sizes"}
    assert borrowed["noise"].tolist() == pytest.approx([math.log(1.1) / 2.36] * 2, rel=0.01)
    few = [run(point(mbs, synthetic.MODELS[1]), 9 + mbs, 50.0 - mbs, 0.1, timed_steps=3) for mbs in (1, 2)]
    ranked = metrics.ranked(labelled(*quiet, *few)).set_index("model")
    source = "timed steps of its model and size, which differ more than repeats of other models and sizes"
    assert set(ranked.loc["llama3b", "noise_from"]) == {source}
    best = metrics.best_configurations(labelled(*quiet, *few)).set_index("model")
    assert best.loc["llama3b", "tie"]
    alone = metrics.ranked(labelled(*quiet, few[0])).set_index("model").loc["llama3b"]
    assert alone["noise_from"] == "its timed steps, which differ more than repeats of other models and sizes"
    calm = run(point(1, synthetic.MODELS[1]), 10, 50.0, 1e-4)
    assert metrics.ranked(labelled(*quiet, calm))["noise_from"].tolist()[-1] == "repeats of other models and sizes"


def test_one_odd_layout_does_not_make_everything_a_tie() -> None:
    steady = [run(point(mbs), mbs, 100.0 - mbs, 0.004) for mbs in (1, 2, 4, 8, 16)]
    odd = run(point(32), 99, 50.0, 0.9, timed_steps=2)
    assert not metrics.best_configurations(labelled(*steady, odd))["tie"].iloc[0]


def test_what_sets_machines_apart_is_no_noise() -> None:
    rows = [
        run(point(1), i, rate, driver_version=driver, timed_steps=1, sweep=f"s{i}")
        for i, (rate, driver) in enumerate(itertools.product((100.0, 100.2, 99.8, 100.1), ("570", "580")))
    ]
    for row in rows:
        if row["driver_version"] == "580":
            row["tokens_per_s_per_gpu"] *= 0.8
    [row] = metrics.ranked(labelled(*rows)).to_dict("records")
    assert row["repeats"] == 8
    assert row["repeat_spread"] == pytest.approx(100.2 / 79.84 - 1)
    assert row["noise"] < 0.003


def test_an_even_number_of_repeats_is_pooled_by_the_middle_of_both() -> None:
    frame = labelled(
        run(point(1), 0, 100.0, sweep="a", mfu_palm=0.40),
        run(point(1), 1, 110.0, sweep="b", mfu_palm=0.44),
        run(point(2), 2, 104.0),
    )
    rows = metrics.ranked(frame)
    assert rows["micro_batch_size"].tolist() == [1, 2]
    [first, _] = rows.to_dict("records")
    assert (first["tokens_per_s_per_gpu"], first["mfu_palm"]) == pytest.approx((105.0, 0.42))
    assert first["step_time_s"] == pytest.approx(point(1).tokens_per_step / 105.0 / 2)


def test_the_luckiest_seed_is_not_the_winner() -> None:
    lucky = [run(point(1, seed=seed), seed, rate) for seed, rate in enumerate((90.0, 91.0, 120.0))]
    frame = labelled(*lucky, run(point(2), 9, 100.0))
    best = metrics.best_configurations(frame)
    assert best["micro_batch_size"].tolist() == [2]
    assert best["candidates"].tolist() == [2]


def test_quantiles_of_students_t() -> None:
    found = noise.quantiles(np.array([0.975, 0.995, 0.95, 0.9, 0.998]), np.array([4.0, 10.0, 1e6, math.nan, 4.0]))
    assert found[:3] == pytest.approx([2.776, 3.169, 1.645], rel=0.002)  # from any table
    assert math.isnan(found[3])
    assert found[4] == pytest.approx(5.95, rel=0.02)


def test_the_winners_set_is_in_the_table_the_figure_and_the_sentences() -> None:
    frame = labelled(*(run(point(mbs), mbs, rate, 0.02) for mbs, rate in ((1, 100.0), (2, 99.5), (4, 99.0), (8, 70.0))))
    header, [cells], _ = tables.best_rows(frame)
    told = dict(zip(header, cells, strict=True))
    assert told["Slower by"] == "0.5 %"
    assert told["Within the noise"] == "2 more (noise 0.8 %, from its timed steps): dp2 z1 · mbs 2×16; dp2 z1 · mbs 4×8"
    data = best_configurations.data(frame)
    assert data[data["rank_by"] == "tokens_per_s"]["tied"].tolist() == [2]
    assert "≈ 2 more" in words(best_configurations.draw(frame))
    [said, *_] = sentences.what_is_best(frame)
    assert "and 2 more layouts within the noise may be as fast: dp2 z1 · mbs 2×16 and dp2 z1 · mbs 4×8" in said
    assert "up to 1.0 % slower (noise 0.8 %, from its timed steps)" in said
    assert any("Noise used to judge the order" in text for text in sentences.how_far_to_trust(frame))


def test_the_second_of_two_runs_at_once_is_no_repeat() -> None:
    """A pilot that was taken for dead woke up and finished the point, too, perhaps on the devices of the other."""
    first = run(point(1), 0, 100.0, 0.002)
    second = run(point(1), 1, 60.0, 0.002, repeat_of=first["attempt_id"])
    ranked = metrics.ranked(labelled(first, second, run(point(2), 2, 90.0, 0.002)))
    assert ranked["tokens_per_s_per_gpu"].tolist() == [100.0, 90.0]
    assert ranked["repeats"].tolist() == [1, 1]
    alone = metrics.ranked(labelled(second))
    assert alone.empty


def test_a_point_that_was_run_again_is_a_repeat() -> None:
    again = [run(point(1), i, rate, attempt_number=i + 1) for i, rate in enumerate((100.0, 104.0))]
    [row] = metrics.ranked(labelled(*again)).to_dict("records")
    assert (row["repeats"], row["tokens_per_s_per_gpu"]) == (2, 102.0)
    [row] = metrics.ranked(labelled(run(point(1), 0, 100.0), run(point(1), 1, 100.0))).to_dict("records")
    assert row["repeats"] == 2  # equal times can be measured twice


@pytest.mark.parametrize("method", ["rehearsed", "rehearsed_fake"])
def test_stages_that_a_rehearsal_took_over_are_not_measured_again(method: str) -> None:
    """Other seeds and retries have the stages of the first, so that five rows would be a noise of exactly zero."""
    fields: dict[str, Any] = {"method": method, "step_time_min_s": None, "step_time_max_s": None}
    taken_over = [run(point(1, seed=i), i, 100.0) | fields for i in range(6)]
    other = run(point(2), 9, 99.0) | fields
    ranked = metrics.ranked(labelled(*taken_over, other))
    assert ranked["repeats"].tolist() == [1, 1]
    assert ranked[["noise", "noise_freedom"]].isna().all(axis=None)
    assert metrics.best_configurations(labelled(*taken_over, other))["tie"].isna().all()
    elsewhere = run(point(1), 20, 103.0, sweep="another") | fields
    assert metrics.ranked(labelled(*taken_over, elsewhere))["repeats"].tolist() == [2]
