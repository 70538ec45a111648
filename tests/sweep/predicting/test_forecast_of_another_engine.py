"""Forecasts of another engine: from its own rows, with the same version, or from its structure alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.predicting.codebases import key_of_engine, profiles_with
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import read_known
from tests.sweep.helpers import plan_of, store_attempt
from tests.sweep.predicting.measured_rows import H200, of, slow_rows
from tests.workloads.costs.shapes import LLAMA_1B
from workloads.rules import installed_engines
from workloads.spec.experiment import ENGINES

pytestmark = pytest.mark.slow


TITAN = {"engine": "torchtitan", "engine_version": ENGINES["torchtitan"]}


def rows_of_another(folder: Path, count: int, factor: float = 2.0) -> None:
    """Layouts of a small model that torchtitan ran, each so much longer than ours is predicted."""
    experiments = [of(model=LLAMA_1B, dp=dp, zero_stage=zero) for dp in (2, 4, 8) for zero in (2, 3)][:count]
    for experiment, time in zip(experiments, Forecast.of(H200).times(experiments), strict=True):
        assert time is not None
        step_s = factor * time.step_time_s
        store_attempt(folder / "before", experiment.replace(**TITAN), cluster="h200", step_time_s=step_s)


def test_another_engine_is_predicted_from_its_own_rows_alone(tmp_path: Path) -> None:
    ours = of(dp=8, zero_stage=3)
    theirs = ours.replace(**TITAN)
    nothing = Forecast.of(H200)
    alone = nothing.times([ours, theirs])
    assert alone[0] is not None and alone[1] is not None
    name = f"torchtitan {ENGINES['torchtitan']}"
    both = [(one.engine, one.engine_version) for one in (ours, theirs)]
    assert nothing.used_for(both[:1]) == ""
    assert nothing.used_for(both) == f"no measured experiment of {name} on h200: its structure alone"
    assert nothing.has_rows_of(ours) and not nothing.has_rows_of(theirs)
    rows_of_another(tmp_path, 6)
    forecast = Forecast.of(H200, read_known(H200, tmp_path))
    assert forecast.used == forecast.used_for(both) == f"predicted with 6 measured experiments of {name} on h200"
    assert forecast.has_rows_of(theirs)
    first, second = forecast.times([ours, theirs])
    assert first == alone[0]  # its rows say nothing of ours
    assert second is not None and 1.1 < second.step_time_s / alone[1].step_time_s < 3


def test_ours_says_nothing_of_another_engine_nor_another_version_of_it(tmp_path: Path) -> None:
    theirs = of(dp=8, zero_stage=3).replace(**TITAN)
    slow_rows("h200", tmp_path)
    assert Forecast.of(H200, read_known(H200, tmp_path)).times([theirs]) == Forecast.of(H200).times([theirs])
    older, newer = (key_of_engine("torchtitan", version) for version in ("0.2.1+1", ENGINES["torchtitan"]))
    assert older != newer and {older, newer} <= profiles_with([("torchtitan", "0.2.1+1"), *ENGINES.items()]).keys()


def test_a_compiled_layer_of_another_engine_is_faster() -> None:
    eager = of(dp=8, zero_stage=3).replace(**TITAN)
    before, after = Forecast.of(H200).times([eager, eager.replace(compile="block")])
    assert before is not None and after is not None
    assert 0.75 < after.step_time_s / before.step_time_s < 0.98


def test_a_plan_refuses_a_layout_of_another_engine_only_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_engines, "_version", lambda package: None)  # else the installed version is planned
    rows_of_another(tmp_path, 6)
    layout = ["grid.axes.model=[llama8b]", "grid.axes.zero_stage=[3]", "grid.axes.tp=[1]", "grid.axes.pp=[1]"]
    asked = [
        *("grid=llama_node", "cluster=h200", "cluster.device.memory_bytes=40e9", *layout),
        *("grid.axes.recompute=[none]", "+grid.axes.engine=[ultrasweep,torchtitan]"),
    ]
    for known, verdict in ((None, "run"), (read_known(H200, tmp_path), "predicted_oom")):
        plan = plan_of(asked, known=known)
        by = {point.experiment.engine: point for point in plan.points}
        assert by["ultrasweep"].time is not None and by["torchtitan"].time is not None
        ours, theirs = by["ultrasweep"].peak_bytes, by["torchtitan"].peak_bytes
        assert ours is not None and theirs is not None
        assert (by["ultrasweep"].verdict, by["torchtitan"].verdict) == ("predicted_oom", verdict)
        assert ("its structure alone" in plan.predicted_with) == (known is None)
