"""A plan that was made before: its peaks are not computed again, and its ledger is not written again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from results.tables.store import read_ledger
from sweep.composing.config import compose_sweep
from sweep.composing.machine import Machine
from sweep.planning import earlier_peaks, point_verdict
from sweep.planning.assemble import plan_sweep
from sweep.planning.plan import Plan
from sweep.running.launch import launch_settings
from sweep.running.run import Prepared, enqueue
from workloads.costs.memory.estimate import StageMemory, peak_stage
from workloads.spec.experiment import Experiment


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the experiments whose peak is computed."""
    ids: list[str] = []

    def compute(experiment: Experiment) -> StageMemory:
        ids.append(experiment.id)
        return peak_stage(experiment)

    monkeypatch.setattr(point_verdict, "peak_stage", compute)
    return ids


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Plan]:
    """Plans some points and queues them."""

    def plan_and_queue(*words: str) -> Plan:
        config = compose_sweep(["+grid=one_gpu", "launcher=local", f"results_dir={tmp_path}", *words])
        made = plan_sweep(config, "measured", None, 1)
        settings = launch_settings(config, Machine(gpu_name="NVIDIA H200", num_gpus=1))
        enqueue(Prepared(plan=made, settings=settings, slurm=None, dry=False, notes=()))
        return made

    return plan_and_queue


def test_the_same_plan_takes_its_peaks_from_the_ledger_and_leaves_it(
    tmp_path: Path, run: Callable[..., Plan], computed: list[str]
) -> None:
    first = run()
    assert computed
    ledger = tmp_path / "one_gpu" / "ledger.parquet"
    written = ledger.stat().st_ino
    computed.clear()
    again = run()
    assert again.points == first.points
    # Only sentences about points that do not fit name the stage, which a ledger does not hold.
    assert set(computed) == {one.experiment.id for one in first.points if one.verdict == "predicted_oom"}
    assert ledger.stat().st_ino == written
    run("plan.deadline.base_s=200")
    assert ledger.stat().st_ino != written, "another deadline is another price"


@pytest.mark.slow
def test_peaks_of_other_code_are_not_used(
    run: Callable[..., Plan], computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run()
    predicted = [one.experiment.id for one in first.points if one.peak_bytes is not None]
    computed.clear()
    monkeypatch.setattr(earlier_peaks, "_digest_of_code", lambda: "of another version")
    run()
    assert sorted(computed) == sorted(predicted)


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"PAR1 cut"])
def test_a_damaged_ledger_is_written_again(tmp_path: Path, run: Callable[..., Plan], content: bytes) -> None:
    first = run()
    (tmp_path / "one_gpu" / "ledger.parquet").write_bytes(content)
    assert run().points == first.points
    assert read_ledger(tmp_path / "one_gpu" / "ledger.parquet").num_rows == len(first.points)
