"""Memory figures: bars equal rows or the closed form, and say which; families differ in one choice only."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures import memory_by_axis, memory_timeline
from analysis.memory import axis_panels
from analysis.memory.families import AXES, countable, families
from analysis.memory.peak_split import PREDICTED, UNSPLIT
from analysis.memory.variants import steps_to_all, variant
from analysis.rows.cohorts import split
from analysis.rows.labels import MEMORY_CATEGORIES
from analysis.rows.load import load
from results.tables.schema import CONFIG_COLUMNS
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of, recorded_cohorts
from tests.analysis.drawn_bars import bars_of
from tests.analysis.figure_texts import assert_texts_fit, words
from workloads.costs.memory.estimate import estimate_memory
from workloads.rules.layout_rules import violations
from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.drawn(one_in=2)

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
RECORDED = ROOT / "results" / "recorded"
CATEGORIES = list(MEMORY_CATEGORIES)
BASE = Experiment.canonical(
    model=synthetic.MODELS[0], dp=2, zero_stage=1, tp=2, micro_batch_size=2, global_batch_size=16
)
FOLLOWS = {
    "experiment_id",
    "config_json",
    "world_size",
    "tokens_per_step",
    "dp_replicate",
    "dp_shard",
    "num_microbatches",
    "global_batch_size",
}
"""Columns of the configuration that follow from the others."""


def labelled(*rows: dict[str, Any]) -> pd.DataFrame:
    [cohort] = split(frame_of(list(rows)))
    return cohort.frame


def rows_of(*points: Experiment, **columns: Any) -> list[dict[str, Any]]:
    return [synthetic.attempt(point, i, **({"outcome": "ok"} | columns)) for i, point in enumerate(points)]


def closed_form(experiment: Experiment) -> list[int]:
    estimate = estimate_memory(experiment)
    stage = estimate.stages[estimate.peak_stage]
    return [stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.activations_bytes]


def drawn_bars(figure: Figure, panel: int = 0) -> dict[int, list[tuple[float, bool]]]:
    """By place, (bytes, whether in full colour) of each part of a bar."""
    bars: dict[int, list[tuple[float, float, bool]]] = {}
    for boxes, face in bars_of(figure.axes[panel]):
        full = any(same_color(face, colour) for colour in style.CATEGORY_COLOURS)
        for x, y, width, height in boxes:
            bars.setdefault(round(x + width / 2), []).append((y, height * 2**30, full))
    return {place: [(height, full) for _, height, full in parts] for place, parts in bars.items()}


@pytest.fixture(scope="module")
def study() -> pd.DataFrame:
    if not STUDY.exists():
        pytest.skip(f"the study's raw table is not at {STUDY}")
    [cohort] = split(load(STUDY).attempts)
    return cohort.frame


@pytest.fixture(scope="module")
def countable_frames(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of a synthetic sweep and the recorded ones, by cohort, as far as they can be counted."""
    return [countable(one) for one in (frame, *(cohort.frame for cohort in recorded_cohorts()))]


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES.values(), ids=lambda axis: axis.name)
def test_a_family_differs_in_its_axis_only(axis: Any, countable_frames: list[pd.DataFrame]) -> None:
    found = [family for one in countable_frames for family in families(one, axis)]
    for family in found:
        values = [row[axis.column] for row in family.rows]
        assert len(set(values)) == len(values) >= 2
        assert any(row["outcome"] == "ok" for row in family.rows)
        on = [row for row in family.rows if row[axis.column] != axis.off]
        for column in (column.name for column in CONFIG_COLUMNS):
            if column in FOLLOWS - {family.fixed} or column == axis.column:
                continue
            of = on if column in axis.with_it else family.rows
            values = [row.get(column) for row in of]
            assert len({None if pd.isna(value) else value for value in values}) == 1, column
    assert found or axis.name in ("seq_len", "cp")  # none of these rows differ in those


def test_a_family_has_the_most_values_that_any_rows_have(frame: pd.DataFrame) -> None:
    """Counted once more, point by point: of ZeRO, where nothing has a meaning only when it is on."""
    stages: dict[tuple[Any, ...], set[int]] = {}
    for row in frame.to_dict("records"):
        key = ("model", "dp", "tp", "pp", "micro_batch_size", "num_microbatches", "recompute")
        stages.setdefault(tuple(row[name] for name in key), set()).add(row["zero_stage"])
    for family in families(countable(frame), AXES["zero"]):
        assert len(family.rows) == max(len(found) for key, found in stages.items() if key[0] == family.model)


def test_what_context_parallelism_shrinks_is_what_its_caption_says() -> None:
    caption = next(spec.caption for spec in memory_by_axis.FIGURES if spec.name == "memory_by_cp")
    told = ("activations", "from stage 1 on", "gradients from stage 2 on", "parameters at stage 3", "Without ZeRO only")
    assert all(part in caption for part in told)
    fields: dict[str, Any] = {"model": synthetic.MODELS[0], "dp": 2, "micro_batch_size": 1, "global_batch_size": 8}
    parts, shrinks = ("parameters", "gradients", "optimizer", "activations"), {}
    for stage in (0, 1, 2, 3):
        one, two = (estimate_memory(Experiment.canonical(**fields, cp=cp, zero_stage=stage)).stages[0] for cp in (1, 2))
        shrinks[stage] = {name for name in parts if getattr(two, f"{name}_bytes") < getattr(one, f"{name}_bytes")}
    assert shrinks[0] == {"activations"}
    assert shrinks[1] == {"activations", "optimizer", "parameters"}  # the master weights are among the parameters
    assert shrinks[2] == shrinks[3] == {*shrinks[1], "gradients"}


def test_one_data_parallel_rank_belongs_to_every_stage_as_it_was_run() -> None:
    points = [variant(BASE.replace(zero_stage=3), "dp", dp) for dp in (1, 2, 4)]
    frame = labelled(*rows_of(*[point for point in points if point]))
    [family] = families(countable(frame), AXES["dp"])
    assert [row["dp"] for row in family.rows] == [1, 2, 4]
    assert [row["zero_stage"] for row in family.rows] == [0, 3, 3]
    assert family.fixed == "num_microbatches"


def test_replicas_beside_shards_are_another_family() -> None:
    hybrid = Experiment(**{**_fields(BASE), "dp_replicate": 2, "dp_shard": 2, "zero_stage": 3, "global_batch_size": 32})
    plain = [
        Experiment.canonical(**{**_plain(BASE), "dp": 4, "zero_stage": z, "global_batch_size": 32}) for z in (0, 1, 2)
    ]
    frame = labelled(*rows_of(hybrid, *plain))
    [family] = families(countable(frame), AXES["zero"])
    assert [row["zero_stage"] for row in family.rows] == [0, 1, 2]
    along_zero = variant(hybrid, "zero", 2)
    assert along_zero is not None
    assert (along_zero.dp_replicate, along_zero.dp_shard) == (2, 2)
    stacks = memory_by_axis.data(labelled(*rows_of(hybrid)), "dp")["stack_bytes"]
    assert stacks.is_monotonic_decreasing  # all ranks of a bar shard together, those of the run's own degree too


def test_replicas_count_along_every_axis() -> None:
    shared = {"zero_stage": 3, "global_batch_size": 32}
    hybrid = Experiment(**{**_fields(BASE), "dp_replicate": 2, "dp_shard": 2, **shared})
    plain = Experiment.canonical(**{**_plain(BASE), "dp": 4, "recompute": "full", **shared})
    assert families(countable(labelled(*rows_of(hybrid, plain))), AXES["recompute"]) == []
    assert (
        len(families(countable(labelled(*rows_of(hybrid, hybrid.replace(recompute="full")))), AXES["recompute"])) == 1
    )


def test_bars_are_the_rows_own_where_they_finished_and_the_closed_form_where_not() -> None:
    points = [variant(BASE, "recompute", kind) for kind in ("none", "selective", "full")]
    assert all(points)
    rows = rows_of(*[point for point in points if point])
    rows[0] = synthetic.attempt(points[0], 0, outcome="oom")  # type: ignore[arg-type]
    frame = labelled(*rows)
    table = memory_by_axis.data(frame, "recompute")
    assert table["value"].tolist() == ["none", "selective", "full"]
    assert table["split"].tolist() == [PREDICTED, "measured", "measured"]
    assert table["basis"].tolist() == ["rows"] * 3
    assert table.loc[0, CATEGORIES].tolist() == closed_form(points[0])  # type: ignore[arg-type]
    assert table.loc[1:, CATEGORIES].to_numpy().tolist() == [[row[name] for name in CATEGORIES] for row in rows[1:]]
    figure = memory_by_axis.draw(frame, "recompute")
    bars = drawn_bars(figure)
    for place, line in enumerate(table.to_dict("records")):
        measured = line["split"] == "measured"
        own = [height for height, full in bars[place] if full == measured]
        assert own == pytest.approx([line[name] for name in CATEGORIES])
        beside = [height for height, full in bars[place] if full != measured]  # the closed form of the same layout
        assert beside == (pytest.approx(closed_form(points[place])) if measured else [])  # type: ignore[arg-type]
        assert measured == (line["closed_form_bytes"] == sum(closed_form(points[place])))  # type: ignore[arg-type]
    assert {"none\nOOM", "full colour: measured", "pale: closed form, not measured"} <= words(figure)
    assert any(line.get_ydata()[0] == pytest.approx(synthetic.H200_BYTES / 2**30) for line in figure.axes[0].lines)
    assert_texts_fit(figure)


def test_repeats_are_one_bar_of_the_middle_run() -> None:
    points = [variant(BASE, "recompute", kind) for kind in ("none", "full")]
    rows = rows_of(*[point for point in points if point])
    rows += [
        rows[0] | {"attempt_id": f"again{i}", "sweep": f"other{i}", "peak_allocated_bytes": peak}
        for i, peak in enumerate((rows[0]["peak_allocated_bytes"] - 5, rows[0]["peak_allocated_bytes"] + 5))
    ]
    table = memory_by_axis.data(labelled(*rows), "recompute")
    assert table["repeats"].tolist() == [3, 1]
    assert table["attempt_id"].tolist() == [rows[0]["attempt_id"], rows[1]["attempt_id"]]
    assert "none\nn = 3" in words(memory_by_axis.draw(labelled(*rows), "recompute"))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [*AXES, axis_panels.ALL_AXES])
def test_one_row_gives_the_closed_form_and_says_so(axis: str) -> None:
    frame = labelled(*rows_of(BASE))
    table = memory_by_axis.data(frame, axis)
    own = table["basis"] == axis_panels.ROWS
    assert own.sum() == (axis == axis_panels.ALL_AXES)
    assert (table.loc[~own, "split"] == PREDICTED).all()
    assert table.loc[~own, "attempt_id"].isna().all()
    figure = memory_by_axis.draw(frame, axis)
    assert_texts_fit(figure)
    assert "pale: closed form, not measured" in words(figure)
    if axis != axis_panels.ALL_AXES:
        [legend] = figure.legends
        assert legend.get_title().get_text() == "Closed form: no rows differ only in this"
    for line in table[table["variant"] != "without sequence parallelism"].to_dict("records"):
        value = line["value"].replace(",", "")
        if axis in ("seq_len", "cp", "pp", "tp"):
            changes: dict[str, Any] = {axis: int(value)}
        elif axis == "recompute":
            changes = {axis: value}
        else:
            continue
        expected = Experiment.canonical(**(_fields(BASE) | changes))
        assert [line[name] for name in CATEGORIES] == closed_form(expected)


def test_data_parallel_and_zero_variants_keep_the_micro_batches() -> None:
    for axis, value in (("dp", 8), ("zero", 3)):
        point = variant(BASE, axis, value)
        assert point is not None
        assert point.num_microbatches == BASE.num_microbatches
        assert point.micro_batch_size == BASE.micro_batch_size
    table = memory_by_axis.data(labelled(*rows_of(BASE)), "zero")
    expected = [Experiment.canonical(**{**_plain(BASE), "dp": 2, "zero_stage": stage}) for stage in range(4)]
    assert table[CATEGORIES].to_numpy().tolist() == [closed_form(point) for point in expected]


def test_runs_without_sequence_parallelism_stand_beside_those_with_it() -> None:
    wide = [variant(BASE, "tp", tp, sequence_parallel=True) for tp in (1, 2, 4)]
    bare = variant(BASE, "tp", 4, sequence_parallel=False)
    frame = labelled(*rows_of(*[point for point in [*wide, bare] if point]))
    without, with_it = axis_panels.along(frame, AXES["tp"])
    assert (without.variant, with_it.variant) == ("without sequence parallelism", "with sequence parallelism")
    assert [bar.stack.source for bar in with_it.bars] == ["measured"] * 3
    assert [bar.stack.source for bar in without.bars] == ["measured", PREDICTED, "measured"]
    assert without.bars[0].row == with_it.bars[0].row  # one rank divides nothing
    flipped = BASE.replace(sequence_parallel=False)
    assert list(without.bars[1].stack.bytes) == closed_form(flipped)
    assert without.bars[2].row is not None
    assert not without.bars[2].row["sequence_parallel"]


def test_all_axes_one_after_another() -> None:
    steps = steps_to_all(BASE, same_batch=False)
    assert [name.replace("\n", " ") for name, _ in steps] == [
        *("one device", "+ dp 2", "+ ZeRO 1", "+ tp 2", "+ pp 2", "+ cp 2"),
    ]
    assert steps[0][1].world_size == 1
    last = steps[-1][1]
    assert (last.dp, last.zero_stage, last.tp, last.pp, last.cp) == (2, 1, 2, 2, 2)
    assert {point.num_microbatches for _, point in steps} == {BASE.num_microbatches}
    frame = labelled(*rows_of(*[point for name, point in steps if "dp" in name or "tp" in name]))
    table = memory_by_axis.data(frame, axis_panels.ALL_AXES)
    assert table["split"].tolist() == [PREDICTED, "measured", PREDICTED, "measured", PREDICTED, PREDICTED]
    predicted = table[table["split"] == PREDICTED].index
    assert table.loc[predicted, CATEGORIES].to_numpy().tolist() == [closed_form(steps[i][1]) for i in predicted]


@pytest.mark.slow
def test_bars_far_above_the_device_are_cut_and_say_how_high_they_are() -> None:
    model = synthetic.llama("llama70b", 80, 8192, 64, 28672)
    point = Experiment.canonical(model=model, dp=8, zero_stage=3, tp=8, micro_batch_size=1, global_batch_size=8)
    figure = memory_by_axis.draw(labelled(*rows_of(point)), axis_panels.ALL_AXES)
    highest = memory_by_axis.data(labelled(*rows_of(point)), axis_panels.ALL_AXES)["stack_bytes"].max() / 2**30
    assert f"↑ {highest:,.0f}" in words(figure)
    assert figure.axes[0].get_ylim()[1] < highest
    assert_texts_fit(figure)


def test_variants_are_those_that_the_planner_accepts() -> None:
    link = LinkSpec(bandwidth=1e9, latency_s=1e-6)
    device = DeviceSpec(name="any", memory_bytes=None)
    cluster = ClusterSpec(
        name="any", backend="cuda", device=device, devices_per_node=8, intra_node=link, inter_node=link
    )
    bases = [
        Experiment.canonical(
            model=model, dp=dp, zero_stage=zero, tp=tp, pp=pp, micro_batch_size=1, global_batch_size=16, seq_len=seq
        )
        for model, dp, zero, tp, pp, seq in itertools.product(
            synthetic.MODELS[:2], (1, 4), (0, 3), (1, 2), (1, 4), (80, 4096)
        )
    ]
    refused = 0
    for base, axis in itertools.product(bases, AXES.values()):
        for value in (*axis.values, *((3, 12) if axis.column in ("tp", "pp", "cp") else ())):
            point = variant(base, axis.name, value)
            if point is not None:
                assert {found.rule for found in violations(point, cluster)} <= {"engine_support"}
                continue
            refused += 1
            forced = Experiment.canonical(**(_fields(base) | {axis.column: value}))
            assert {found.rule for found in violations(forced, cluster)} - {"engine_support"}
    assert refused > 50


@pytest.mark.slow
def test_study_rows_have_what_they_reserved_and_no_closed_form_of_another_engine(study: pd.DataFrame) -> None:
    finished = study[study["outcome"] == "ok"].set_index("attempt_id")
    for axis in ("dp", "zero", "tp", "pp"):
        table = memory_by_axis.data(study, axis)
        assert len(table) >= 4
        assert set(table["basis"]) == {axis_panels.ROWS}
        assert set(table["split"]) == {UNSPLIT}
        reserved = finished.loc[table["attempt_id"], "peak_reserved_bytes"]
        assert table["stack_bytes"].tolist() == reserved.tolist()
        assert table[[*CATEGORIES, "closed_form_bytes", "peak_allocated_bytes"]].isna().all(axis=None)
        figure = memory_by_axis.draw(study, axis)
        assert_texts_fit(figure)
        assert "peak, measured by nanotron" in words(figure)
    assert set(memory_by_axis.data(study, "seq_len")["model"]) == {
        "8.86B",
        "80B",
        "469B",
    }  # no other shapes under their labels
    with pytest.raises(style.NothingToDraw, match=r"^no finished run"):
        memory_timeline.draw(study)


@pytest.mark.slow
def test_what_cannot_be_drawn_says_why() -> None:
    frame = labelled(*rows_of(BASE, outcome="crash"))
    for spec in (memory_timeline.FIGURE, *memory_by_axis.FIGURES):
        with pytest.raises(style.NothingToDraw, match=r"^no finished run"):
            spec.draw(frame)
        assert spec.data is not None
        assert spec.data(frame).empty
        assert len(spec.data(frame).columns)


def test_unknown_shapes_are_left_out() -> None:
    rows = rows_of(BASE, BASE.replace(recompute="full"), config_json=None, **dict.fromkeys(CATEGORIES))
    assert len(memory_by_axis.data(labelled(*rows), "recompute")) == 2  # from the columns alone
    rows[0]["num_kv_heads"] = None
    assert memory_by_axis.data(labelled(*rows), "recompute")["basis"].unique().tolist() == [axis_panels.CLOSED_FORM]
    rows[1]["ffn_hidden_size"] = None
    with pytest.raises(style.NothingToDraw):
        memory_by_axis.draw(labelled(*rows), "recompute")


def _fields(experiment: Experiment) -> dict[str, Any]:
    return {name: getattr(experiment, name) for name in Experiment.__slots__}


def _plain(experiment: Experiment) -> dict[str, Any]:
    """Fields of a layout from which others are made: gradients are added as each usually does."""
    fields = _fields(experiment) | {"gradient_accumulation_fusion": None}
    return {name: value for name, value in fields.items() if name not in ("dp_replicate", "dp_shard")}
