"""What the command ``run`` does to the queue, and which cluster it takes; no pilot is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launchers.local
from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import SweepDir, entry_names, key_of, read_point
from launchers.status.run_summary import RunSummary
from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.composing import machine
from tests.sweep.helpers import plan_of, store_attempt

pytestmark = [pytest.mark.usefixtures("machine_without_gpus"), pytest.mark.drawn(one_in=2)]


class Pilots:
    """Stands for `run_local`: notes what it was given, and finishes points as a test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[SweepDir, LaunchSettings]] = []
        self.finish: Callable[[SweepDir], None] = lambda sweep: None
        self.interrupted = False

    def __call__(self, sweep: SweepDir, settings: LaunchSettings, **_: Any) -> RunSummary:
        self.calls.append((sweep, settings))
        self.finish(sweep)
        waiting = len(entry_names(sweep.todo))
        return RunSummary(outcomes={}, attempts=1, left=waiting, too_wide=0, interrupted=self.interrupted)


@pytest.fixture
def pilots(monkeypatch: pytest.MonkeyPatch) -> Pilots:
    double = Pilots()
    monkeypatch.setattr(launchers.local, "run_local", double)
    return double


def finish_all(sweep: SweepDir) -> None:
    for name in entry_names(sweep.todo):
        point = read_point(sweep.todo / name)
        (sweep.todo / name).rename(sweep.done / name.replace(".json", "@ok.json"))
        marker = sweep.marker.read_text()
        store_attempt(sweep.path, point.experiment, cluster="cpu", method=point.method)
        sweep.marker.write_text(marker)


@pytest.mark.slow
def test_run_queues_the_plan_in_its_order(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "+grid=tiny", "measure=quick"]) == 0
    sweep, settings = pilots.calls[0]
    assert sweep.path == Path("results/tiny")
    plan = plan_of(["+grid=tiny"])
    queued = [read_point(sweep.todo / name) for name in entry_names(sweep.todo)]
    assert [point.experiment for point in queued] == [point.experiment for point in plan.to_run]
    assert [point.predicted_peak_bytes for point in queued] == [point.peak_bytes for point in plan.to_run]
    assert {point.method for point in queued} == {"measured"}
    assert all(point.deadline_s > 0 for point in queued)
    assert (settings.device, settings.method, settings.cluster.name) == ("cpu", "measured", "cpu")
    assert settings.measure.timed_steps == 3
    assert read_ledger(sweep.path).num_rows == len(plan.points)
    assert f"{len(plan.points)} points: run {len(plan.points)}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_run_of_a_finished_grid_runs_nothing(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    pilots.finish = finish_all
    assert main(["run", "+grid=tiny"]) == 0
    capsys.readouterr()
    assert main(["run", "+grid=tiny"]) == 0
    told = capsys.readouterr().out
    assert "nothing to run" in told
    assert "cached 15" in told
    assert entry_names(pilots.calls[1][0].todo) == []


@pytest.mark.slow
def test_a_new_sweep_measures_unless_it_is_told_to_reuse(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    pilots.finish = finish_all
    assert main(["run", "+grid=tiny"]) == 0
    pilots.finish = lambda _: None
    assert main(["run", "+grid=tiny", "name=again"]) == 0
    assert len(entry_names(pilots.calls[1][0].todo)) == 15
    capsys.readouterr()
    assert main(["plan", "+grid=tiny", "name=third", "plan.reuse=true"]) == 0
    line = "rows of other sweeps used instead of a run (plan.reuse=true): tiny (15)"
    assert line in capsys.readouterr().out
    assert main(["run", "+grid=tiny", "name=third", "plan.reuse=true"]) == 0
    assert line in capsys.readouterr().out
    assert entry_names(pilots.calls[2][0].todo) == []
    assert set(read_ledger(Path("results/third"))["cached_sweep"].to_pylist()) == {"tiny"}


@pytest.mark.slow
def test_finished_points_whose_rows_are_lost_are_told(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    pilots.finish = finish_all
    assert main(["run", "+grid=tiny"]) == 0
    for part in Path("results/tiny/parts").rglob("*.parquet"):
        part.write_bytes(part.read_bytes()[:100])
    capsys.readouterr()
    assert main(["run", "+grid=tiny"]) == 0
    assert "the rows of 15 cannot be read; python -m sweep retry results/tiny ok" in capsys.readouterr().out


def test_an_interrupted_run_says_how_to_go_on(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    pilots.interrupted = True
    assert main(["run", "+grid=tiny", "grid.axes.tp=[1,2]"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "interrupted, 15 points left; go on with: python -m sweep run +grid=tiny 'grid.axes.tp=[1,2]'"


@pytest.mark.slow
def test_what_waits_and_is_no_longer_planned_is_taken_off(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "+grid=tiny"]) == 0
    assert main(["run", "+grid=tiny", "--where", "world_size <= 2"]) == 0
    sweep = pilots.calls[1][0]
    assert {read_point(sweep.todo / name).experiment.world_size for name in entry_names(sweep.todo)} == {1, 2}
    assert "are not in this plan and were removed from the queue" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_plan_of_the_same_name_is_refused_while_the_first_runs(
    pilots: Pilots, capsys: pytest.CaptureFixture[str]
) -> None:
    refused: list[int] = []

    def somebody_else(sweep: SweepDir) -> None:
        pilots.finish = lambda sweep: None
        before = sorted((path, path.stat().st_mtime_ns) for path in sweep.path.rglob("*.*") if path.is_file())
        refused.append(main(["run", "+grid=tiny", "name=ours", "--where", "world_size <= 2"]))
        refused.append(main(["run", "+grid=tiny", "name=ours"]))  # the same plan a second time
        after = sorted((path, path.stat().st_mtime_ns) for path in sweep.path.rglob("*.*") if path.is_file())
        assert [one for one in before if one[0].name != "ledger.parquet"] == [
            one for one in after if one[0].name != "ledger.parquet"
        ]

    pilots.finish = somebody_else
    assert main(["run", "+grid=tiny", "name=ours"]) == 0
    assert refused == [2, 0]
    told = capsys.readouterr().err
    assert f"results/ours is in use: process {os.getpid()} on {socket.gethostname()} runs" in told
    assert "that this plan does not have; give this run another name=NAME" in told and len(told.splitlines()) == 1
    pilots.finish = lambda sweep: None
    assert main(["run", "+grid=tiny", "name=ours", "--where", "world_size <= 2"]) == 0  # nobody runs it any more


@pytest.mark.slow
def test_a_run_whose_points_were_taken_out_of_the_queue_fails(
    pilots: Pilots, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(sweep: SweepDir) -> None:
        first, second, *others = entry_names(sweep.todo)
        (sweep.todo / first).unlink()
        (sweep.todo / second).unlink()
        for name in others:
            (sweep.todo / name).rename(sweep.done / name.replace(".json", "@ok.json"))

    pilots.finish = take
    assert main(["run", "+grid=tiny"]) == 1
    assert (
        "2 of the 15 points of this plan were not run: another command with name=tiny took" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_retried_points_stay_in_the_queue_although_their_row_is_known(pilots: Pilots) -> None:
    pilots.finish = finish_all
    assert main(["run", "+grid=tiny"]) == 0
    sweep = pilots.calls[0][0]
    name = entry_names(sweep.done)[0]
    pilots.finish = lambda _: None
    assert main(["retry", "results/tiny", "ok"]) == 0
    assert len(entry_names(sweep.todo)) == 15
    assert main(["run", "+grid=tiny"]) == 0
    assert key_of(name) in {key_of(waiting) for waiting in entry_names(sweep.todo)}


@pytest.mark.slow
def test_a_rehearsal_without_a_gpu(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+grid=llama70b_512gpu", "launcher=rehearse", "budget.gpu_hours=0.5", "grid.axes.tp=8"]
    assert main(["run", *words]) == 0
    sweep, settings = pilots.calls[0]
    assert sweep.path == Path("results/llama70b_512gpu-rehearsed")
    assert (settings.method, settings.device, settings.num_devices) == ("rehearsed_fake", "cpu", 1)
    assert settings.cluster.name == "h100_efa"
    queued = entry_names(sweep.todo)
    assert queued
    assert all(key_of(name).endswith("+rehearsed_fake") for name in queued)
    verdicts = read_ledger(sweep.path)["verdict"].to_pylist()
    assert verdicts.count("run") == len(queued)
    assert "over_budget" in verdicts
    assert "step times are estimates" in capsys.readouterr().out


@pytest.mark.slow
def test_a_rehearsal_on_a_cluster_without_rates_promises_no_times(
    pilots: Pilots, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "+grid=tiny", "launcher=rehearse", "cluster=cpu"]) == 0
    assert "step times are unknown (the file of cluster cpu has no rates)" in capsys.readouterr().out


def gpus(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: count)
    monkeypatch.setattr(machine, "_gpu_name", lambda: name)


@pytest.mark.slow
def test_a_real_run_takes_the_cluster_of_this_machine(
    pilots: Pilots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, "NVIDIA B200", 4)
    words = ["+grid=llama8b_8gpu", "grid.axes.world_size=[4,8]", "grid.axes.compile=none", "grid.axes.recompute=none"]
    assert main(["run", *words]) == 0
    sweep, settings = pilots.calls[0]
    assert (settings.cluster.name, settings.device, settings.num_devices) == ("b200", "cuda", 4)
    assert "cluster=b200: this machine has NVIDIA B200" in capsys.readouterr().out
    ledger = read_ledger(sweep.path).to_pylist()
    assert {row["rule"] for row in ledger if row["world_size"] == 8} == {"launcher_devices"}
    assert {read_point(sweep.todo / name).experiment.world_size for name in entry_names(sweep.todo)} == {4}
    # The same folder later, on another machine, with a point begun: the numbers would not belong together.
    first = entry_names(sweep.todo)[0]
    (sweep.todo / first).rename(sweep.claimed / first.replace(".json", "@p.json"))
    gpus(monkeypatch, "NVIDIA H200", 4)
    assert main(["run", *words]) == 2
    assert "holds runs for NVIDIA B200, this run is for NVIDIA H200: give it another name" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cluster_that_is_not_this_machines_is_refused(
    pilots: Pilots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, "NVIDIA H200", 8)
    assert main(["run", "+grid=llama8b_8gpu", "cluster=h100_efa"]) == 2
    assert "this machine has NVIDIA H200, cluster h100_efa describes NVIDIA H100 80GB HBM3; use cluster=h200" in (
        capsys.readouterr().err
    )
    gpus(monkeypatch, "NVIDIA H100 80GB HBM3", 8)
    assert main(["run", "+grid=llama8b_8gpu"]) == 2
    assert "use cluster=h100_efa or cluster=h100_ib400" in capsys.readouterr().err
    gpus(monkeypatch, "Quadro P400", 1)
    assert main(["run", "+grid=llama8b_8gpu"]) == 2
    assert "no cluster file describes it" in capsys.readouterr().err
    assert pilots.calls == []


@pytest.mark.slow
def test_status_of_a_sweep(pilots: Pilots, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "+grid=tiny"]) == 0
    capsys.readouterr()
    assert main(["status"]) == 0
    told = capsys.readouterr().out
    assert "results/tiny" in told
    assert "not begun" in told
