"""Memory over the first steps: the closed form between operations, measured peaks of steps, and how they are read."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.figures import memory_timeline
from analysis.memory import moments
from analysis.memory.peak_split import PREDICTED
from analysis.rows.load import load
from analysis.rows.step_peaks import FIRST_PEAKS, MOST_STEPS
from results.tables import store
from results.tables.schema import MEASUREMENT_VERSION
from tests.analysis import synthetic
from tests.analysis.conftest import recorded_cohorts
from tests.analysis.figure_texts import assert_texts_fit
from tests.analysis.test_memory_figures import BASE, CATEGORIES, RECORDED, labelled, rows_of
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.params import num_params
from workloads.spec.experiment import Experiment, from_json

pytestmark = pytest.mark.slow


@pytest.mark.slow(seconds=2)
def test_recorded_rows_peaks_of_the_first_steps_are_near_the_closed_form() -> None:
    found = [memory_timeline.timeline(cohort.frame) for cohort in recorded_cohorts()]
    known = [one for one in found if one is not None and one.measured_peaks]
    assert known
    for one in known:
        assert len(one.measured_peaks) == moments.STEPS
        predicted = [sum(peak) for peak in one.predicted_peaks]
        assert predicted == pytest.approx(list(one.measured_peaks), rel=0.022)
        assert predicted[1] == predicted[3]
        captured = one.row.get("cuda_graph_run") == "step"  # the optimizer's state is there before the first step
        assert predicted[0] == predicted[1] if captured else predicted[0] < predicted[1]


def test_held_memory_stays_below_the_peak_and_ends_where_it_began(frame: pd.DataFrame) -> None:
    for text in frame["config_json"].drop_duplicates().iloc[::7]:
        experiment = from_json(text)
        estimate = estimate_memory(experiment)
        for stage, peak in enumerate(estimate.stages):
            held = moments.moments(experiment, stage)
            later = [moment for moment in held if moment.step]
            assert max(sum(moment.bytes) for moment in later if moment.name != "optimizer") <= peak.peak_bytes
            assert {moment.bytes[2] for moment in later} == {peak.optimizer_bytes}
            starts = [moment.bytes for moment in held if moment.name == "start"]
            assert starts[0][2] == 0
            assert starts[1] == starts[2] == starts[3]
            assert [moment.step + moment.at for moment in held] == sorted(moment.step + moment.at for moment in held)


def test_first_step_may_be_highest_where_the_optimizer_makes_its_state() -> None:
    wide = Experiment.canonical(model=BASE.model, micro_batch_size=8, global_batch_size=8)
    narrow = wide.replace(micro_batch_size=1, global_batch_size=1, recompute="full")
    [stage] = estimate_memory(wide).stages
    assert sum(moments.peak_of_step(wide, 0)) == stage.peak_bytes - stage.optimizer_bytes
    [stage] = estimate_memory(narrow).stages
    assert stage.peak_bytes - stage.optimizer_bytes < 2 * stage.optimizer_bytes
    # Master weights, their gradients, and two moments: four times 4 bytes a parameter.
    assert sum(moments.peak_of_step(narrow, 0)) == 16 * num_params(narrow.model)
    assert sum(moments.peak_of_step(narrow, 1)) == stage.peak_bytes


def test_timeline_shows_measured_steps_beside_the_closed_form() -> None:
    [row] = rows_of(BASE)
    frame = labelled(row)
    table = memory_timeline.data(frame)
    assert set(table["split"]) == {"measured", PREDICTED}  # without steps, the split at the peak
    peaks = [30 * 2**30, 41 * 2**30, 42 * 2**30, 43 * 2**30, 44 * 2**30]
    frame["first_steps_peak_allocated_bytes"] = [peaks]
    table = memory_timeline.data(frame)
    measured = table[(table["split"] == "measured") & (table["moment"] == "peak")]
    assert measured["total_bytes"].tolist() == peaks[: moments.STEPS]
    assert measured[CATEGORIES].isna().all(axis=None)
    [at_peak] = table[table["moment"] == "peak of the timed steps"].to_dict("records")
    assert [at_peak[name] for name in CATEGORIES] == [row[name] for name in CATEGORIES]
    predicted = table[(table["split"] == PREDICTED) & (table["moment"] == "peak")]
    assert predicted["total_bytes"].tolist()[1:] == [estimate_memory(BASE).peak_bytes] * 3
    figure = memory_timeline.draw(frame)
    assert_texts_fit(figure)
    drawn = [line for line in figure.axes[0].lines if line.get_linewidth() == 3.0]
    assert [line.get_ydata()[0] * 2**30 for line in drawn] == pytest.approx(peaks[: moments.STEPS])


def test_first_steps_are_read_of_the_fastest_run_of_each_model_only(tmp_path: Path) -> None:
    points = [BASE, BASE.replace(recompute="full"), BASE.replace(model=synthetic.MODELS[1])]
    rows = rows_of(*points)
    rows[0]["tokens_per_s_per_gpu"] = 2 * rows[1]["tokens_per_s_per_gpu"]
    for name, compact in (("parts", False), ("compacted", True)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sweep.json").write_text("{}")
        for row in rows:
            store.write_attempt(folder, row | {"sweep": name}, _steps(row, 12))
        if compact:
            store.compact(folder)
        attempts = load(folder).attempts.set_index("attempt_id")
        for column, offset in zip(FIRST_PEAKS, (0, 7), strict=True):
            kept = attempts[column]
            assert kept[rows[0]["attempt_id"]] == [100 * step + 3 + offset for step in range(MOST_STEPS)]
            assert not isinstance(kept[rows[1]["attempt_id"]], list)
            assert len(kept[rows[2]["attempt_id"]]) == MOST_STEPS


def test_steps_of_a_renamed_sweep_are_found(tmp_path: Path) -> None:
    made = shutil.copytree(RECORDED / "h200x2_llama_node", tmp_path / "another_name")
    column = load(made).attempts["first_steps_peak_allocated_bytes"]
    assert column.notna().sum() == load(RECORDED / "h200x2_llama_node").attempts[column.name].notna().sum() > 0


def test_damaged_steps_are_said_and_cost_nothing_else(tmp_path: Path) -> None:
    folder = synthetic.make_sweep(tmp_path / "sweep", rows_of(BASE))
    (folder / "steps.parquet").write_bytes(b"PAR1 this is none")
    results = load(folder)
    assert len(results.attempts) == 1
    assert [line for line in results.problems if "steps.parquet" in line]
    assert results.attempts[list(FIRST_PEAKS)].isna().all(axis=None)


def _steps(row: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Rank r of step s has a peak of 100 s + r, reserved 7 more."""
    return [
        {
            "attempt_id": row["attempt_id"],
            "experiment_id": row["experiment_id"],
            "measurement_version": MEASUREMENT_VERSION,
            "rank": rank,
            "step": step,
            "is_warmup": step < 2,
            "peak_allocated_bytes": 100 * step + rank,
            "peak_reserved_bytes": 100 * step + rank + 7,
        }
        for step, rank in itertools.product(range(count), range(4))
    ]
