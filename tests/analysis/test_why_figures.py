"""Fronts, parts of a step and schedules by hand; and every figure of why, cost and trust where it cannot be drawn."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pandas as pd
import pytest

from analysis.drawing import style
from analysis.figures import (
    breakdown,
    breakdown_by_kind,
    cost,
    drift,
    effects,
    efficiency,
    failures_by_phase,
    panels,
    pareto,
    registry,
    schedules,
)
from analysis.rows import pipeline_bubble, step_parts
from analysis.rows.cohorts import split
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from tests.analysis.drawn_bars import bars_of
from tests.analysis.figure_texts import assert_texts_fit, words
from tests.analysis.test_study import study  # noqa: F401
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PipelineSchedule

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]

GIB = 2**30
MODEL = synthetic.MODELS[2]
NAMES = {spec.name: spec for spec in registry.FIGURES}
WHY = [
    spec.name
    for spec in (
        *(
            pareto.FIGURE,
            *breakdown.FIGURES,
            breakdown_by_kind.FIGURE,
            schedules.FIGURE,
            effects.FIGURE,
            efficiency.FIGURE,
        ),
        *(*cost.FIGURES, failures_by_phase.FIGURE, drift.FIGURE),
    )
]


def point(**fields: Any) -> Experiment:
    given = {"model": MODEL, "dp": 8, "tp": 1, "pp": 1, "micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096}
    return Experiment.canonical(**{**given, **fields})


def run(experiment: Experiment, index: int = 0, rate: float = 1000.0, **columns: Any) -> dict[str, Any]:
    """A finished run of a throughput in tokens/s/GPU, without the parts of its step unless given."""
    step = experiment.tokens_per_step / rate / experiment.world_size
    times = {"step_time_s": step, "step_time_min_s": 0.99 * step, "step_time_max_s": 1.01 * step}
    parts = dict.fromkeys([*step_parts.MEASURED, "breakdown_step_time_s"])
    return synthetic.attempt(
        experiment, index, **{"outcome": "ok", "tokens_per_s_per_gpu": rate, **times, **parts, **columns}
    )


def labelled(*rows: dict[str, Any]) -> pd.DataFrame:
    [cohort] = split(frame_of(list(rows)))
    return cohort.frame


# Pareto front


def test_front_has_what_nothing_beats_and_equals_stand_together() -> None:
    #         memory, rate: the front is (10, 5), twice (20, 8), (40, 9)
    points = [(10, 5), (12, 5), (15, 4), (20, 8), (20, 8), (20, 7), (40, 9), (50, 9), (60, 3)]
    variants = itertools.product((1, 2, 4, 8), (0, 1, 3))
    rows = [
        run(point(dp=8, micro_batch_size=mbs, zero_stage=zero), i, rate, peak_allocated_bytes=gib * GIB)
        for i, ((gib, rate), (mbs, zero)) in enumerate(zip(points, variants, strict=False))
    ]
    table = pareto.data(labelled(*rows))
    front = table[table["on_front"]]
    assert [(row.memory_bytes / GIB, row.tokens_per_s_per_gpu) for row in front.itertuples()] == [
        *((10, 5), (20, 8), (20, 8), (40, 9))
    ]
    assert len(table) == len(points)


def test_fronts_of_two_sizes_do_not_touch_each_other() -> None:
    rows = [
        run(point(dp=8), 0, 10, peak_allocated_bytes=10 * GIB),
        run(point(dp=4), 1, 1, peak_allocated_bytes=20 * GIB),
    ]
    assert pareto.data(labelled(*rows))["on_front"].tolist() == [True, True]


def test_reserved_memory_serves_where_nothing_else_is_known() -> None:
    rows = [run(point(), 0, peak_allocated_bytes=None, peak_reserved_bytes=7 * GIB, device_memory_bytes=None)]
    frame = labelled(*rows)
    assert pareto.data(frame)["memory_kind"].tolist() == ["peak reserved memory"]
    figure = pareto.draw(frame)
    assert "Peak reserved memory, GiB" in words(figure)
    assert "memory of the device" not in words(figure)


def test_the_named_layouts_of_a_front_are_its_ends_and_its_knee() -> None:
    rates = {2: 10.0, 10: 80.0, 20: 90.0, 40: 100.0}
    rows = [
        run(point(micro_batch_size=mbs), mbs, rate, peak_allocated_bytes=gib * GIB)
        for (gib, rate), mbs in zip(rates.items(), (1, 2, 4, 8), strict=True)
    ]
    shown = "\n".join(words(pareto.draw(labelled(*rows))))
    assert "a  dp8 z0 · mbs 1×8\nb  dp8 z0 · mbs 2×4\nc  dp8 z0 · mbs 8×1" in shown


def test_every_model_gets_a_panel_before_one_gets_two(frame: pd.DataFrame) -> None:
    rows = pareto.data(frame)
    groups, left_out = panels.chosen_groups(rows, 3)
    assert [name for name, _ in groups] == ["llama1b", "llama3b", "llama8b"]
    assert left_out is not None
    assert left_out.startswith("3 of 11 ")
    groups, left_out = panels.chosen_groups(rows, 11)
    assert (len(groups), left_out) == (11, None)


# Breakdown


def test_shares_of_a_step_by_hand_and_what_is_left() -> None:
    parts = {"forward_backward_s": 1.2, "reduce_exposed_s": 0.2, "pipeline_idle_s": 0.4, "optimizer_s": 0.1}
    frame = labelled(run(point(dp=4, pp=2), 0, step_time_s=2.0, **parts))
    row = breakdown.data(frame).iloc[0]
    found = [row[name] for name in (*step_parts.MEASURED.values(), step_parts.REST)]
    assert found == pytest.approx([0.6, 0.1, 0.2, 0.05, 0.05])


def test_rehearsed_rows_have_compute_and_modelled_communication() -> None:
    columns = {"method": "rehearsed", "step_time_s": 2.0, "compute_time_s": 1.5, "communication_time_s": 0.5}
    frame = labelled(run(point(), 0, **columns))
    row = breakdown.data(frame).iloc[0]
    assert [row[name] for name in (*step_parts.REHEARSED.values(), step_parts.REST)] == pytest.approx([0.75, 0.25, 0.0])


def test_families_along_an_axis_differ_in_nothing_else() -> None:
    def timed(experiment: Experiment, index: int, rate: float, reduction: float) -> dict[str, Any]:
        step = experiment.tokens_per_step / rate / experiment.world_size
        parts = {"reduce_exposed_s": reduction * step, "pipeline_idle_s": 0.0, "optimizer_s": 0.0}
        return run(experiment, index, rate, forward_backward_s=(1 - reduction) * step, **parts)

    rows = [
        timed(point(dp=8, zero_stage=1), 0, 1000.0, 0.2),
        timed(point(dp=4, tp=2, zero_stage=1), 1, 800.0, 0.1),
        timed(point(dp=1, tp=8), 2, 500.0, 0.0),  # has nothing to shard: it ends the family of any stage
        timed(point(dp=4, tp=2, zero_stage=3), 3, 9000.0, 0.5),
        timed(point(dp=2, tp=4, zero_stage=1, micro_batch_size=2), 4, 9000.0, 0.0),
    ]
    table = breakdown.data_along_axes(labelled(*rows))
    assert table["axis"].unique().tolist() == ["tp"]
    assert table["degree"].tolist() == [1, 2, 8]
    assert table["tokens_per_s_per_gpu"].tolist() == [1000.0, 800.0, 500.0]
    # 1e6 / 1000 µs a token, a fifth of it reduction; 1e6 / 800, a tenth.
    assert table["exposed reduction"].tolist() == pytest.approx([200.0, 125.0, 0.0], abs=1e-6)
    assert table["forward and backward"].tolist() == pytest.approx([800.0, 1125.0, 2000.0])


# Schedules


def test_schedules_of_equal_stages_wait_by_the_closed_form() -> None:
    p, m = 4, 8
    rows = [run(point(dp=2, pp=4, micro_batch_size=4), 0, forward_backward_s=2.4, recompute="none")]
    assert rows[0]["num_microbatches"] == m
    frame = labelled(*rows)
    table = schedules.data(frame)
    assert {"gpipe", "1f1b"} <= set(table["schedule"])
    for name, held in (("gpipe", m), ("1f1b", p)):
        own = table[table["schedule"] == name]
        assert own["bubble_share"].unique() == pytest.approx([(p - 1) / (m + p - 1)])
        assert own["most_in_flight"].unique().tolist() == [held]
        assert len(own) == 2 * p * m
        # 2.4 s over 8 micro-batches: 0.1 s forward, 0.2 s backward; together m + p - 1 of both.
        assert own["end"].max() == pytest.approx((m + p - 1) * 0.3)
        assert own["unit"].unique().tolist() == ["s"]


def test_every_schedule_is_drawn_with_its_chunks_and_halves_of_backwards() -> None:
    p, m = 4, 8
    frame = labelled(run(point(dp=2, pp=4, micro_batch_size=4), 0, forward_backward_s=2.4))
    table = schedules.data(frame)
    names = [name for name in get_args(PipelineSchedule) if name != "none"]
    assert table["schedule"].unique().tolist() == names
    # A rank holds up to 2 (p - 1) + (v - 1) p + 1 = 11 of its chunks under interleaved 1F1B, 8 and 9 in a V.
    most = {"interleaved_1f1b": 5.5, "interleaved_zero_bubble": 4, "zero_bubble_v": 4, "dualpipe_v": 4.5}
    for name, held in most.items():
        own = table[table["schedule"] == name]
        assert own["v"].unique().tolist() == [2]
        assert own["most_held"].unique().tolist() == [held]
        counts = own.groupby(["stage", "kind"]).size().unstack(fill_value=0)
        assert counts.index.tolist() == list(range(2 * p))
        assert (counts["F"] == m).all()
        assert (counts.get("B", 0) + counts.get("W", 0) == m).all()
        assert (own["end"] - own["start"]).groupby(own["rank"]).sum().tolist() == pytest.approx([2.4] * p)
        assert own["bubble_share"].max() < 0.16 < 3 / 11
    figure = NAMES["schedules"].draw(frame)
    assert_texts_fit(figure)
    shown = "\n".join(words(figure))
    assert "ZB-V: 5.9 % idle, at most 4 micro-batches held by a rank" in shown


def test_the_bubble_of_a_row_is_its_schedules() -> None:
    # p = 4, m = 8, in working time of a rank: 1F1B 3 / 8, interleaved 3 / 16, ZB-V 1.5 of 24; see the table of
    # workloads.costs.time.pipeline, which has them of the whole time. What is not known is taken as 1F1B.
    known = {
        "gpipe": 3 / 8,
        "1f1b": 3 / 8,
        "interleaved_1f1b": 3 / 16,
        "zero_bubble_v": 1.5 / 24,
        "breadth_first": 3 / 8,
    }
    rows = pd.DataFrame({"pp_schedule": list(known), "virtual_stages": [None, 1.0, 2.0, 2.0, 2.0]})
    rows = rows.assign(pp=4, num_microbatches=8).iloc[::-1]
    found = pipeline_bubble.of_rows(rows)
    assert found.index.tolist() == rows.index.tolist()
    assert found.tolist() == pytest.approx(list(known.values())[::-1])


def test_an_interleaved_run_is_drawn_with_its_own_chunks() -> None:
    own = {"pp_schedule": "interleaved_1f1b", "virtual_stages": 4}
    pipeline = schedules.representative(labelled(run(point(dp=2, pp=4, **own), 0)))
    assert pipeline is not None
    assert [pipeline.chunks(name) for name in ("interleaved_1f1b", "interleaved_zero_bubble", "1f1b")] == [4, 2, 1]


def test_without_times_a_schedule_is_in_forwards_and_recomputation_makes_backwards_longer() -> None:
    frame = labelled(run(point(dp=4, pp=2, recompute="full"), 0))
    pipeline = schedules.representative(frame)
    assert pipeline is not None
    assert (pipeline.forward, pipeline.backward, pipeline.unit) == (1.0, 3.0, "forwards")
    assert (pipeline.ranks, pipeline.micro_batches) == (2, 16)
    deep = labelled(run(point(dp=1, pp=8), 0), run(point(dp=4, pp=2), 1, 5000.0))
    chosen = schedules.representative(deep)
    assert chosen is not None
    assert (chosen.ranks, chosen.row["num_microbatches"], chosen.micro_batches) == (
        8,
        64,
        schedules.MOST_MICRO_BATCHES,
    )
    shown = "\n".join(words(NAMES["schedules"].draw(deep)))
    assert "drawn with 16 of 64 micro-batches" in shown
    assert f"{100 * 7 / 71:.1f} %" in shown


# All of them


# Kinds of a profiled step


def profiled(**columns: Any) -> dict[str, Any]:
    """A profiled step of 1 s: 0.7 s of compute, 0.1 s exposed on tp and 0.05 s on cp, a bubble and gaps."""
    parts = {
        "matmul": 0.5,
        "attention": 0.1,
        "memory_bound": 0.06,
        "optimizer": 0.04,
        "bubble": 0.1,
        "launch_gaps": 0.05,
    }
    by_axis = [
        {"axis": "tp", "exposed_s": 0.1, "hidden_s": 0.2},
        {"axis": "cp", "exposed_s": 0.05, "hidden_s": 0.0},
        {"axis": "pp", "exposed_s": None, "hidden_s": 0.02},
    ]
    given = {f"breakdown_{name}_s": value for name, value in parts.items()}
    given |= {"breakdown_step_time_s": 1.0, "breakdown_comm_exposed_s": 0.15, "breakdown_comm_hidden_s": 0.22}
    return {**given, "breakdown_comm_by_axis": by_axis, **columns}


def test_efficiency_is_stacked_by_kind_where_steps_are_profiled() -> None:
    small, large = point(dp=2), point(dp=4)
    slower = profiled(breakdown_step_time_s=1.25, breakdown_launch_gaps_s=profiled()["breakdown_launch_gaps_s"] + 0.25)
    frame = labelled(run(small, 0, 1000.0, **profiled()), run(large, 1, 800.0, **slower))
    table = efficiency.data(frame)
    row = table[table["world_size"] == 4].iloc[0]
    assert row["efficiency"] == pytest.approx(0.8) and row["matmul"] == pytest.approx(
        profiled()["breakdown_matmul_s"] / 1.25
    )
    assert row["lost to launch gaps"] == pytest.approx(0.2), "the whole loss, since nothing else took longer"
    assert row["lost to matmul"] == pytest.approx(0.0) == row["lost to not attributed"]
    legend = {text.get_text() for text in efficiency.draw(frame).legends[0].get_texts()}
    assert {"matmul", "launch gaps", "exposed tp"} <= legend


def test_each_model_is_split_as_more_of_its_own_runs_are() -> None:
    """Three profiled runs of one model do not take the parts of another's two, which no one profiled."""
    other = {"model": synthetic.MODELS[0]}
    phases = {"forward_backward_s": 0.9, "reduce_exposed_s": 0.0, "pipeline_idle_s": 0.0, "optimizer_s": 0.1}

    def timed(dp: int, index: int, rate: float) -> dict[str, Any]:
        experiment = point(dp=dp, **other)
        step = experiment.tokens_per_step / rate / experiment.world_size
        return run(experiment, index, rate, **{name: share * step for name, share in phases.items()})

    frame = labelled(
        *(run(point(dp=dp), dp, rate, **profiled()) for dp, rate in ((2, 1000.0), (4, 900.0), (8, 800.0))),
        *(timed(2, 20, 5000.0), timed(4, 21, 4000.0)),
    )
    table = efficiency.data(frame).set_index(["workload", "world_size"])
    kinds, parts = table.loc[(MODEL.name, 4)], table.loc[(other["model"].name, 4)]
    assert kinds["matmul"] == pytest.approx(0.5) and pd.isna(kinds["forward and backward"])
    assert parts["forward and backward"] == pytest.approx(0.9) and pd.isna(parts["matmul"])
    assert kinds["lost to not attributed"] == parts["lost to not attributed"] == 0
    figure = efficiency.draw(frame)
    assert {"matmul", "forward and backward"} <= {text.get_text() for text in figure.legends[0].get_texts()}
    below = figure.axes[2:]
    tops = [max((boxes[:, 1] + boxes[:, 3]).max() for boxes, _ in bars_of(ax)) for ax in below]
    assert sorted(tops) == pytest.approx([1e6 / 4000, 1e6 / 800]), "stacks are as high as a token takes"


def test_kinds_of_a_profiled_step_add_up_to_it() -> None:
    twice = profiled(breakdown_step_time_s=2.0)
    layouts = point(dp=4, tp=2), point(dp=2, tp=4), point(dp=8)
    rows = [run(layouts[0], 0, 900.0, **profiled()), run(layouts[1], 1, 800.0, **twice), run(layouts[2], 2, 1000.0)]
    frame = labelled(*rows)
    table = breakdown_by_kind.data(frame)
    assert table["rank"].tolist() == [2, 3], "the fastest run was not profiled"
    kinds = [name for name in style.STEP_KINDS if name in table]
    assert {"exposed tp", "exposed cp"} < set(kinds) and "exposed pp" not in table
    first = table.iloc[0]
    assert first[kinds].sum() == pytest.approx(1.0)
    assert (first["matmul"], first["exposed tp"], first["bubble"]) == (0.5, 0.1, 0.1)
    assert first[breakdown_by_kind.HIDDEN] == pytest.approx(0.22)
    assert table.iloc[1]["exposed cp"] == pytest.approx(0.025)
    figure = breakdown_by_kind.draw(frame)
    assert {"exposed tp", "launch gaps", "900", "800"} < set(words(figure))
    assert_texts_fit(figure)


def test_every_axis_that_may_be_exposed_has_a_colour() -> None:
    axes = ["dp_replicate", "dp_shard", "cp", "tp", "world", "tied", None]
    entries = [{"axis": axis, "exposed_s": 0.1, "hidden_s": 0.0} for axis in axes]
    table = breakdown_by_kind.data(labelled(run(point(), **profiled(breakdown_comm_by_axis=entries))))
    exposed = {name for name in table if name.startswith("exposed ")}
    assert len(exposed) == len(axes) and exposed <= set(style.STEP_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHY)
def test_what_cannot_be_drawn_says_why_and_leaves_an_empty_table(name: str) -> None:
    rows = [synthetic.attempt(p, i, outcome="crash") for i, p in enumerate([point(), point(micro_batch_size=2)])]
    unknown = {"phase": None, "duration_s": float("nan"), "started_at": pd.NaT, "predicted_step_time_s": float("nan")}
    frame = labelled(*rows).assign(**unknown)
    with pytest.raises(style.NothingToDraw, match=r"^no "):
        NAMES[name].draw(frame)
    data = NAMES[name].data
    assert data is not None
    assert data(frame).empty
    assert len(data(frame).columns) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WHY)
def test_figures_of_the_studys_rows_fit(name: str, study: pd.DataFrame) -> None:  # noqa: F811
    try:
        figure = NAMES[name].draw(study)
    except style.NothingToDraw:
        assert name in ("breakdown", "breakdown_by_axis", "breakdown_by_kind", "device_hours", "failures_by_phase")
        return
    assert_texts_fit(figure)
