"""A search on another engine: the best of forty layouts in few runs, with nothing measured before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from results.tables.load import load
from sweep.composing.search_settings import Settings
from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import READ, Known, ran_layouts
from sweep.searching.planned import PlannedSpace, planned_space
from sweep.searching.recorded import RecordedSpace
from sweep.searching.replay import replay
from sweep.searching.surrogate import KERNEL, covariance
from tests.sweep.helpers import plan_of
from workloads.rules import installed_engines
from workloads.spec.experiment import Experiment


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the plan takes the version that is installed, which has other layouts."""
    monkeypatch.setattr(installed_engines, "_version", lambda package: None)


RECORDED = Path(__file__).resolve().parents[3] / "results" / "recorded"
GRID = (
    *("+grid=one_point", "cluster=h200", "grid.axes.model=[llama8b]", "grid.axes.global_batch_size=16"),
    *("grid.axes.dp_shard=[2,4,8]", "grid.axes.tp=[1,2,4]", "grid.axes.cp=[1,2]", "grid.axes.zero_stage=[2,3]"),
    *("grid.axes.micro_batch_size=[1,2]", "grid.axes.compile=[none,block]"),
    "+grid.where={devices: 'world_size == 8'}",
)


def recorded_engine(sweep: str) -> Forecast:
    """The engine as recorded: fitted to every row of a sweep."""
    rows = load(RECORDED / sweep).table.to_pandas()
    rows = rows[(rows["engine"] == "torchtitan") & (rows["outcome"] == "ok")][READ]
    values = rows.astype(object).where(rows.notna(), None).to_dict("records")
    known = Known(ran_layouts({str(name): value for name, value in row.items()} for row in values))
    return Forecast.of(read_clusters()["h200"], known)


def as_run(planned: PlannedSpace, engine: Forecast, seed: int) -> RecordedSpace:
    """What runs would show: the engine as recorded, off by something smooth that no prediction knows, and by noise."""
    experiments = [point.experiment for point in planned.points]
    random = np.random.default_rng(seed)
    off = 0.08 * random.standard_normal(3)

    def factor(e: Experiment) -> float:
        return float(off @ (np.log2(e.tp), np.log2(e.cp), e.zero_stage - 2) + 0.02 * random.standard_normal())

    times = [time.step_time_s for time in engine.times(experiments) if time is not None]
    seconds = np.array(times) * np.exp([factor(one) for one in experiments])
    return RecordedSpace(
        space=planned.space, outcome=np.full(len(seconds), "ok"), step_time_s=seconds,
        log_expected=planned.space.log_time.copy(), names=("all",), points=None,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.slow(seconds=8)
def test_the_best_of_forty_layouts_of_another_engine_in_twelve_runs() -> None:
    plan = plan_of([*GRID, "+grid.axes.engine=[torchtitan]"])
    assert plan.predicted_with.endswith("its structure alone")
    planned, engine = planned_space(plan), recorded_engine("h200x4_engines")
    assert len(planned.points) == 40 and not planned.blind.any()
    for seed in range(3):
        (found,) = replay(as_run(planned, engine, seed), Settings(), seed=seed)
        assert len(set(found.runs)) <= 12 and found.regret[-1] <= 0.005, (
            "the best, or one that repeats cannot tell from it"
        )


def test_engines_are_searched_apart_and_share_nothing() -> None:
    asked = [*GRID, "grid.axes.compile=none", "+grid.axes.engine=[ultrasweep,torchtitan]"]
    planned = planned_space(plan_of([one for one in asked if not one.endswith("block]")]))
    space = planned.space
    assert sorted(planned.names.values()) == [
        "llama8b on 8, 4,096 tokens, batch 16", "llama8b with torchtitan on 8, 4,096 tokens, batch 16",
    ]  # fmt: skip
    ours, theirs = (space.of(cell) for cell in space.cells)
    assert len(ours) == len(theirs) == 20
    assert not covariance(space, ours, theirs, KERNEL).any()
    assert (covariance(space, ours, ours, KERNEL) > 0).all()
