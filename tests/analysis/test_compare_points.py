"""Which points of two results belong together, and what counts as moved."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from analysis.compare import matching, moved
from results.errors import InvalidResults
from results.statistics import ranking
from tests.analysis import synthetic
from tests.analysis.compared import MIB, POINTS, judged, points_of, run
from tests.analysis.conftest import frame_of
from tests.workloads.costs.shapes import MIXTRAL
from workloads.spec.model_spec import canonical_model


def test_points_with_the_same_id_are_matched_and_the_others_are_told() -> None:
    a = points_of(*(run(point, 100.0, i) for i, point in enumerate(POINTS[:4])))
    b = points_of(*(run(point, 100.0, i) for i, point in enumerate(POINTS[2:7])))
    found = matching.match(a, b)
    assert found.pairs["experiment_id_a"].tolist() == [point.id for point in POINTS[2:4]]
    assert set(found.pairs["matched_by"]) == {"experiment_id"}
    assert found.only_a["experiment_id"].tolist() == [point.id for point in POINTS[:2]]
    assert found.only_b["experiment_id"].tolist() == [point.id for point in POINTS[4:7]]


def test_another_engine_version_is_matched_by_the_whole_configuration() -> None:
    a = points_of(*(run(point.replace(engine_version="1"), 100.0, i) for i, point in enumerate(POINTS[:4])))
    b = points_of(*(run(point.replace(engine_version="2"), 110.0, i) for i, point in enumerate(POINTS[:4])))
    assert not set(a["experiment_id"]) & set(b["experiment_id"])
    found = matching.match(a, b)
    assert found.pairs["matched_by"].tolist() == ["configuration"] * 4
    assert (found.pairs["layout_a"] == found.pairs["layout_b"]).all()
    assert found.pairs["world_size_a"].notna().all()


def test_rows_of_one_model_are_matched_whatever_its_sizes_without_effect_were_stored_as() -> None:
    new = POINTS[0].replace(model=canonical_model(MIXTRAL))
    assert MIXTRAL.ffn_hidden_size != new.model.ffn_hidden_size
    found = matching.match(points_of(run(new.replace(model=MIXTRAL), 100.0)), points_of(run(new, 100.0)))
    assert found.pairs["experiment_id_a"].tolist() == found.pairs["experiment_id_b"].tolist() == [new.id]


@pytest.mark.slow
def test_what_only_the_stored_configuration_knows_keeps_points_apart() -> None:
    """The base of the rotary embedding is no column: it changes the losses all the same."""
    other = POINTS[0].replace(model=synthetic.llama("llama1b", 16, 2048, 32, 8192, tied=True))
    changed = json.loads(run(other, 1.0)["config_json"])
    changed["model"]["rope_theta"] = 10_000.0
    a = points_of(run(POINTS[0], 100.0))
    b = points_of(run(POINTS[0], 100.0, config_json=json.dumps(changed), experiment_id="another"))
    assert matching.match(a, b).pairs.empty
    b_without = points_of(run(POINTS[0], 100.0, config_json=None, experiment_id="another"))
    found = matching.match(a, b_without)
    assert (len(found.pairs), found.unrecorded) == (1, (matching.REST,))


def test_of_several_engine_versions_of_one_configuration_the_last_one_counts() -> None:
    a = points_of(run(POINTS[0].replace(engine_version="3"), 100.0))
    b = points_of(*(run(POINTS[0].replace(engine_version=v), 100.0, i) for i, v in enumerate(("1", "2"))))
    found = matching.match(a, b)
    assert (found.pairs["engine_version_b"].tolist(), found.older, len(found.only_b)) == (["2"], 1, 0)


@pytest.mark.slow
def test_partners_may_differ_in_an_axis_when_asked() -> None:
    eager = POINTS[0]
    compiled = eager.replace(compile="block", gradient_accumulation_fusion=False)
    a, b = points_of(run(eager, 100.0)), points_of(run(compiled, 120.0))
    assert matching.match(a, b).pairs.empty
    assert matching.why_unmatched(a, b) == {"compile": 1}
    assert len(matching.match(a, b, across=("compile",)).pairs) == 1
    both = points_of(run(eager, 100.0), run(compiled.replace(engine_version="1"), 120.0, 1))
    with pytest.raises(InvalidResults, match="A has 1 configurations with several values of compile"):
        matching.match(both, points_of(run(eager.replace(engine_version="9"), 1.0)), across=("compile",))
    with pytest.raises(InvalidResults, match="'colour' is not an axis"):
        matching.match(a, b, across=("colour",))


def test_why_a_point_has_no_partner_counts_the_model_as_one_axis() -> None:
    small, large = synthetic.MODELS[0], synthetic.MODELS[2]
    a = points_of(run(POINTS[0], 100.0))
    b = points_of(run(POINTS[0].replace(model=large), 50.0), run(POINTS[0].replace(model=small, tp=2, seed=1), 50.0, 1))
    assert matching.why_unmatched(a, b) == {"model shape": 1}


@pytest.mark.slow
def test_clusters_are_compared_with_each_other_but_never_mixed() -> None:
    def of(*clusters: str) -> pd.DataFrame:
        return points_of(*(run(POINTS[0], 100.0, i, cluster=name) for i, name in enumerate(clusters)))

    assert matching.match(of("h200"), of("h100")).crossed == ("cluster",)
    shared = matching.match(of("h200", "h100"), of("h200"))
    assert (shared.pairs["cluster_a"].tolist(), shared.only_a["cluster"].tolist()) == (["h200"], ["h100"])
    with pytest.raises(InvalidResults, match=r"share no cluster and one has several \(A: h200, h100; B: a100\)"):
        matching.match(of("h200", "h100"), of("a100"))


def test_methods_are_only_mixed_when_asked() -> None:
    a = frame_of([run(POINTS[0], 100.0), run(POINTS[0], 90.0, 1, method="rehearsed")])
    b = frame_of([run(POINTS[0], 90.0, method="rehearsed")])
    only_measured = frame_of([run(POINTS[0], 100.0)])
    assert matching.choose_methods(a, b, None) == ("rehearsed", "rehearsed")
    assert matching.choose_methods(a, a, None) == ("measured", "measured")
    assert matching.choose_methods(a, b, ("measured", "rehearsed")) == ("measured", "rehearsed")
    with pytest.raises(InvalidResults, match="use --methods measured,rehearsed"):
        matching.choose_methods(only_measured, b, None)
    with pytest.raises(InvalidResults, match="B has no measured rows, only rehearsed"):
        matching.choose_methods(a, b, ("measured", "measured"))
    with pytest.raises(InvalidResults, match="A holds no attempt"):
        matching.choose_methods(frame_of([]), b, None)


def test_repeats_become_one_point_with_their_median_and_range() -> None:
    rows = [run(POINTS[0], rate, i, spread=0.02) for i, rate in enumerate((100.0, 104.0, 98.0))]
    [point] = points_of(*rows).to_dict("records")
    assert (point["runs"], point["rate"]) == (3, 100.0)
    # The fastest step of the fastest run and the slowest of the slowest, 1 % from the median of each.
    assert point["rate_high"] == pytest.approx(104 / 0.99)
    assert point["rate_low"] == pytest.approx(98 / 1.01)
    five = points_of(*(run(POINTS[0], rate, i, spread=0.5) for i, rate in enumerate((98.0, 99.0, 100.0, 101.0, 102.0))))
    assert 98 <= five["rate_low"][0] < 100 < five["rate_high"][0] <= 102  # of the runs, however wide their steps


def test_a_run_with_other_losses_is_no_repeat_as_in_the_ranking() -> None:
    """A wrong run may be fast: the ranking gives it a place of its own, and a comparison leaves it out."""
    rows = [
        run(POINTS[0], rate, i, loss_agrees=agrees, losses=[12.0, 11.5, loss], peak_allocated_bytes=peak * MIB)
        for i, (rate, agrees, loss, peak) in enumerate(
            [(100.0, True, 11.0, 1000), (104.0, True, 11.0, 1000), (200.0, False, 7.0, 400)]
        )
    ]
    points = points_of(*rows)
    ranked = ranking.of_layouts(frame_of(rows), ["model"], "tokens_per_s_per_gpu").set_index("rank")
    assert (points["runs"][0], points["contradicting"][0], points["rate"][0]) == (2, 1, ranked["median"][1.0])
    assert (points["peak_allocated"][0], points["losses"][0][2]) == (1000 * MIB, 11.0)
    from analysis.compare import findings

    assert findings.alarms(judged(points, points_of(*rows[:2]))) == [
        "1 run of A left out: the losses contradict its own reference layout, those of other runs of the point do not."
    ]
    [alone] = points_of(*rows[2:]).to_dict("records")  # nothing else is known of the point
    assert (alone["runs"], alone["contradicting"], alone["rate"], alone["loss_agrees"]) == (1, 0, 200.0, False)


def test_a_point_run_twice_at_once_is_no_repeat_and_a_failed_try_no_run() -> None:
    rows = [
        run(POINTS[0], 100.0, 0),
        run(POINTS[0], 50.0, 1, repeat_of="0"),
        run(POINTS[0], 100.0, 2, outcome="cancelled", tokens_per_s_per_gpu=None),
    ]
    [point] = points_of(*rows).to_dict("records")
    assert (point["outcome"], point["runs"], point["rate"]) == ("ok", 1, 100.0)


def test_a_stopped_try_does_not_hide_the_failure_before_it() -> None:
    rows = [
        synthetic.attempt(POINTS[0], 0, outcome="oom"),
        synthetic.attempt(POINTS[0], 1, outcome="cancelled", sweep="again"),
    ]
    assert points_of(*rows)["outcome"].tolist() == ["oom"]


def test_interval_of_many_timed_steps_is_a_bootstrap_and_of_few_their_range() -> None:
    row = run(POINTS[0], 100.0, spread=0.4, attempt_id="x", timed_steps=9)
    median_s = row["step_time_s"]
    times = {"x": [median_s * factor for factor in (0.8, 1.2, 1, 1, 1, 1, 1, 1, 1)]}
    assert points_of(row)["rate_low"][0] == pytest.approx(100 / 1.2)
    assert points_of(row, step_times=times)["rate_low"][0] == pytest.approx(100)  # a median does not mind outliers


def test_noise_is_the_spread_of_timed_steps_or_of_repeats_whichever_is_larger() -> None:
    a = points_of(*(run(point, 100.0, i, spread=0.02) for i, point in enumerate(POINTS[:6])))
    b = points_of(*(run(point, 100.0, i, spread=0.02) for i, point in enumerate(POINTS[:6])))
    found = moved.noise_of(a, b)
    assert found.fraction == pytest.approx(1.01 / 0.99 - 1)
    assert "median of 12 points" in found.why
    assert "Neither side has repeats" in found.why
    repeated = points_of(run(POINTS[0], 100.0, 0, spread=0.02), run(POINTS[0], 110.0, 1, spread=0.02))
    assert moved.noise_of(repeated, b).fraction == pytest.approx(np.log(1.1))
    assert "1 pair of repeated runs" in moved.noise_of(repeated, b).why
    assert moved.noise_of(a, b, 0.07) == moved.Noise(0.07, "Noise: 7 %, as asked.", asked=True)


def test_a_point_is_faster_only_beyond_noise_and_beyond_its_own_spread() -> None:
    rates = {100.0: "within noise", 102.0: "within noise", 106.0: "faster", 94.0: "slower"}
    a = points_of(*(run(point, 100.0, i, spread=0.03) for i, point in enumerate(POINTS[:5])))
    rows = [run(point, rate, i, spread=0.03) for i, (point, rate) in enumerate(zip(POINTS, rates, strict=False))]
    restless = run(POINTS[4], 120.0, 4, spread=0.6)
    pairs = judged(a, points_of(*rows, restless))
    assert pairs["speed"].tolist() == [*rates.values(), "within noise"]
    assert pairs["ratio"].tolist() == pytest.approx([1.0, 1.02, 1.06, 0.94, 1.2])
    assert pairs["ratio_low"][2] == pytest.approx(1.06 * 0.985 / 1.015)


@pytest.mark.slow
def test_one_timed_step_can_differ_but_is_never_called_faster() -> None:
    once = {"timed_steps": 1, "spread": 0.0}
    a = points_of(*(run(point, 100.0, i, **once) for i, point in enumerate(POINTS[:3])))
    b = points_of(
        *(
            run(point, rate, i, **once)
            for i, (point, rate) in enumerate(zip(POINTS, (103.0, 106.0, 90.0), strict=False))
        )
    )
    assert judged(a, b)["speed"].tolist() == ["cannot say", "differs, spread unknown", "differs, spread unknown"]
    assert "unknown" in moved.noise_of(a, b).why
    assert judged(a, b, noise=0.02)["speed"].tolist() == ["faster", "faster", "slower"]  # the user knows the noise


@pytest.mark.slow
def test_memory_moves_beyond_the_allocators_granularity_and_beyond_repeats() -> None:
    peaks = (1000, 1001, 1003, 990)
    a = points_of(*(run(point, 100.0, i) for i, point in enumerate(POINTS[:4])))
    b = points_of(
        *(
            run(point, 100.0, i, peak_allocated_bytes=peak * MIB)
            for i, (point, peak) in enumerate(zip(POINTS, peaks, strict=False))
        )
    )
    assert judged(a, b)["memory"].tolist() == ["same", "same", "more", "less"]
    assert judged(a, b)["peak_change_bytes"].tolist() == [0, MIB, 3 * MIB, -10 * MIB]
    varying = points_of(*(run(POINTS[0], 100.0, i, peak_allocated_bytes=p * MIB) for i, p in enumerate((1000, 1008))))
    assert judged(a.head(1), varying)["memory"].tolist() == ["same"]
    reserved_only = [
        points.assign(**{f"peak_allocated{end}": np.nan for end in ("", "_low", "_high")}) for points in (a, b)
    ]
    assert moved.memory_kind(matching.match(*reserved_only).pairs).granularity_bytes == 20 * MIB


@pytest.mark.slow
def test_losses_that_differ_are_shouted() -> None:
    a = points_of(*(run(point, 100.0, i) for i, point in enumerate(POINTS[:3])))
    off = {"losses": [12.0, 11.5, 11.0 * (1 + 4e-4)]}
    late = {"losses": [12.0, 11.5, 11.0, 5.0]}  # a fourth step that A does not have
    b = points_of(
        run(POINTS[0], 100.0, 0, **off), run(POINTS[1], 100.0, 1, **late), run(POINTS[2], 100.0, 2, losses=None)
    )
    pairs = judged(a, b)
    assert pairs["same_losses"].tolist() == [False, True, True]  # of the third the gradient norms are known
    assert pairs["loss_difference"][0] == pytest.approx(4e-4)
    from analysis.compare import findings

    [alarm] = findings.alarms(pairs)
    assert alarm.startswith("LOSSES DIFFER in 1 of 3 points")
    assert judged(a, b, compare_losses=False)["same_losses"].isna().all()


@pytest.mark.slow
def test_the_axis_that_explains_what_moved_is_found() -> None:
    gain = {"none": 1.0, "full": 1.08}
    a = points_of(*(run(point, 100.0 + i, i) for i, point in enumerate(POINTS)))
    b = points_of(*(run(point, (100.0 + i) * gain[point.recompute], i) for i, point in enumerate(POINTS)))
    table = moved.by_axis(judged(a, b))
    assert moved.leading_axes(table) == ["recompute"]
    rows = table[table["axis"] == "recompute"].set_index("value")
    assert rows["ratio"].to_dict() == pytest.approx(gain)
    assert rows["faster"].tolist() == [rows["points"]["full"], 0]
    assert moved.leading_axes(moved.by_axis(judged(a, a))) == []


@pytest.mark.slow
def test_what_an_engine_does_by_itself_makes_no_other_layout() -> None:
    """Steps were eager and gradients rounded before version 4, and are in other engines."""
    fused = POINTS[0].replace(gradient_accumulation_fusion=POINTS[0].num_microbatches > 1)
    before = fused.replace(engine_version="3", cuda_graph="none", gradient_accumulation_fusion=False)
    found = matching.match(points_of(run(before, 100.0)), points_of(run(fused, 120.0)))
    assert found.pairs["matched_by"].tolist() == ["configuration"]
    eager = points_of(run(fused.replace(cuda_graph="none"), 110.0))
    assert matching.why_unmatched(points_of(run(before, 100.0)), eager) == {"cuda_graph": 1}
