"""The command line: bad input in one line and exit code 2, no torch, quick, and what a run does to the queue."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

import launchers.local
import sweep.cli
from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import SweepDir, entry_names, key_of, read_point
from launchers.status.run_summary import RunSummary
from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.cli.command import Command
from sweep.cli.commands import COMMANDS
from sweep.composing import machine
from tests.sweep.helpers import plan_of, store_attempt

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that the default results_dir is empty
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))  # so that the default launcher is local on every machine


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "+grid=nope"], "no grid called 'nope'"),
        (["plan"], "no grid given"),
        (["pla", "+grid=tiny"], "no command 'pla'; did you mean 'plan'"),
        (["plan", "+grid=llama8b_8gpu", "grid.axes.tpp=[1]"], "no axis is called 'tpp'; did you mean 'tp'"),
        (["plan", "+grid=llama8b_8gpu", "grid.axes.world_size=7"], "no point has world_size=7: dp = "),
        (["plan", "+grid=llama8b_8gpu", "--where", "tp = 3"], "cannot read 'tp = 3'"),
        (["plan", "+grid=llama8b_8gpu", "--where", "tpp < 3"], "uses 'tpp', which is no axis; did you mean 'tp'"),
        (["plan", "+grid=tiny", "grid.axes.engine=foo"], "axis engine='foo'; it may be ultrasweep"),
        (["plan", "+grid=tiny", "grid.axes.seed=abc"], "axis seed='abc' must be a whole number"),
        (["plan", "+grid=tiny", "grid.axes.sequence_parallel=maybe"], "='maybe'; it may be true or false"),
        (["plan", "+grid=tiny", "grid.axes.engine_version=7"], "axis engine_version='7'; it may be 3"),
        (["plan", "+grid=tiny", f"grid.axes.seed={'9' * 5000}"], "cannot read|must be a whole number"),
        (["plan", "+grid=tiny", "grid.axes=[1]", "model=tiny"], "cannot be composed|a grid has no|must be a mapping"),
        (["plan", "+grid=one_gpu", "model=llama405b"], "no point fits in memory"),
        (["plan", "+grid=tiny", "launcher=slurm", "launcher.time_min=0"], "time_min=0 must be a whole number of at le"),
        (
            ["plan", "+grid=tiny", "launcher=slurm", "launcher.num_devices=4"],
            "num_devices is an option of launcher=local and launcher=rehearse; this sweep has launcher=slurm",
        ),
        (
            ["plan", "+grid=tiny", "launcher=slurm", "+launcher.partitoin=a"],
            "'partitoin'; did you mean 'partition'",
        ),
        (["run", "+grid=tiny", "launcher=slurm", "launcher.dry=maybe"], "launcher.dry='maybe' must be true or false"),
        (
            ["run", "+grid=tiny", "launcher.dry=true"],
            "dry is an option of launcher=slurm; this sweep has",
        ),
        (
            ["plan", "+grid=tiny", "launcher.dry_run=true"],
            "no option 'dry_run' in launcher; known: breaker",
        ),
        (["plan", "+grid=tiny", "+launcher.lease=3"], "launcher: no option 'lease'; did you mean 'lease_s'"),
        (["plan", "+grid=tiny", "launcher.lease_s=abc"], "lease_s='abc' must be a number of seconds above 0"),
        (["run", "+grid=tiny", "--detach"], "--detach needs launcher=slurm"),
        (["run", "+grid=tiny", "+launcher.environment.a-b=1"], "'a-b' cannot be the name of a variable"),
        (["plan", "+grid=tiny", "--outt", "x"], "unrecognized arguments: --outt.* --help$"),
        (["run", "+grid=tiny", "--gpus=8"], "the number of GPUs of a node is cluster.devices_per_node=N"),
        (["run", "+grid=tiny", "--partition", "main"], "write launcher.partition=main$"),
        (["search", "+grid=tiny", "--time=60"], "use launcher.time_min$"),
        (["plan", "--grid=tiny"], r"write \+grid=tiny$"),
        (["probe", "--cluster", "h200"], "write cluster=h200$"),
        (["advise", "model=llama8b", "--gpus=8"], "write gpus=8$"),
        (["plan", "+grid=tiny", "--top", "0"], "argument --top: .* whole number of at least 1"),
        (["plan", "+grid=tiny", "--out", "x.txt"], "the ledger is a Parquet or a CSV file; name it x.parquet or x.csv"),
        (["plan", "+grid=tiny", "--out", "no/x.parquet"], "there is no folder no"),
        (["plan", "+grid=tiny", "--conf", "nope"], "--conf nope: no such folder"),
        (["run", "+grid=one_gpu"], "has CUDA devices and this machine has none"),
        (["run", "+grid=tiny", "results_dir=file"], "results_dir=file is a file"),
        (["run", "+grid=tiny", "name=occupied", "results_dir=."], "occupied exists and is not a sweep"),
        (["plan", "+grid=../grid/tiny"], "no grid called '../grid/tiny'"),
        (["plan", "+grid=tiny", "+seed=1"], "no option 'seed' at the top level"),
        (["plan", "+grid=tiny", "name='a\nb'"], "must be usable as the name of one folder"),
        (["plan", "+grid=tiny", "name=[a]"], "must be one word"),
        (["plan", "+grid=tiny", "name=-v"], "must be usable as the name of one folder"),
        (["plan", "+grid=tiny", f"name={'x' * 300}"], "has 300 bytes; a folder's name has at most 255"),
        (["plan", "+grid=tiny", "results_dir=null"], "results_dir=None must name the folder"),
        (["run", "+grid=tiny", "launcher.num_devices=abc"], "num_devices='abc' must be a whole number"),
        (["run", "+grid=tiny", "launcher.lease_s=abc"], "lease_s='abc' must be a number of seconds above 0"),
        (["run", "+grid=tiny", "launcher.max_attempts=0"], "max_attempts=0 must be a whole number of at least 1"),
        (["status"], "results does not exist"),
        (["status", "occupied"], "occupied holds no sweep"),
        (["retry", "shipped/recorded/s"], "shipped/recorded/s is an archived sweep: it has rows but no queue"),
        (["watch", "shipped/recorded/s"], "shipped/recorded/s is an archived sweep: it has rows but no queue"),
        (["retry", "occupied"], "occupied is not a sweep"),
        (["retry"], "arguments are required: path"),
        (["retry", "occupied", "--outcome", "hnag"], "--outcome hnag: no such outcome; did you mean 'hang'"),
        (["watch", "occupied"], "occupied is not a sweep"),
        (["cancel", "occupied"], "occupied is not a sweep"),
        (["cancel"], "arguments are required: path"),
        (["logs", "abc", "--results", "occupied"], "occupied holds no sweep"),
        (["logs", "abc", "--rank", "-1"], "argument --rank: |expected one argument"),
        (["explain", "abc", "--results", "occupied"], "occupied holds no sweep"),
        (["explain", "abc", "--results", "file"], "file cannot be read"),
        (["diff", "abc"], "arguments are required: second"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not parquet")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.txt").write_text("")
    shutil.rmtree(SweepDir.create(tmp_path / "shipped" / "recorded" / "s", {}).path / "queue")
    (tmp_path / "shipped" / "recorded" / "SHIPPED").write_text("")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("ultrasweep: ")
    assert re.search(message, captured.err), captured.err


def test_every_command_is_in_the_table_under_its_name() -> None:
    modules = [import_module(f"sweep.cli.{found.name}") for found in iter_modules(sweep.cli.__path__)]
    made = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, Command)}
    assert sorted(one.name for one in made.values()) == sorted(COMMANDS)
    assert all(name == command.name for name, command in COMMANDS.items())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for word in (*(f"\n  {name} " for name in COMMANDS), "+grid=", "budget.gpu_hours"):
        assert word in told
    with pytest.raises(SystemExit) as done:
        main(["plan", "--help"])
    assert done.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_of_the_study_is_quick_and_needs_no_torch() -> None:
    program = (
        "import sys, resource\n"
        "from sweep.__main__ import main\n"
        "code = main(['plan', '+grid=playbook'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = [m for m in ('torch', 'pandas', 'matplotlib', 'triton') if m in sys.modules]\n"
        "print(f'CODE {code} HEAVY {heavy} CPU {used.ru_utime + used.ru_stime:.1f}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "playbook: 10,611 points of playbook"
    assert lines[-1].startswith("CODE 0 HEAVY []"), lines[-1]
    assert float(lines[-1].split()[-1]) < 10  # seconds of CPU time, 3.3 here, whatever else runs beside it
    told = done.stdout
    for word in ("run", "invalid", "pp_layers", "predicted_oom", "64 nodes, 512 GPUs", "expected GPU-h", "llama469b"):
        assert word in told


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "explain", "diff", "retry"])
def test_reading_commands_need_no_torch(command: str, tmp_path: Path) -> None:
    points = plan_of(["+grid=tiny"]).to_run
    SweepDir.create(tmp_path / "s", {})
    for point in points[:2]:
        store_attempt(tmp_path / "s", point.experiment)
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({"format": 1, "name": "s", "created_at": 0, "settings": {}}))
    first, second = (point.experiment.id for point in points[:2])
    arguments = {
        "status": ["s"],
        "retry": ["s"],
        "explain": [first, "--results", "s"],
        "diff": [first, second, "--results", "s"],
    }[command]
    program = (
        "import sys; from sweep.__main__ import main\n"
        f"code = main({[command, *arguments]!r})\n"
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == "False 0", done.stdout + done.stderr


@pytest.mark.slow
def test_plan_writes_the_ledger_that_explain_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+grid=llama8b_8gpu", "cluster=h100_efa", "--out", "plan.parquet"]) == 0
    assert "ledger: plan.parquet" in capsys.readouterr().out
    rows = read_ledger(Path("plan.parquet")).to_pylist()
    pruned = next(row for row in rows if row["verdict"] == "predicted_oom")
    digest = pruned["experiment_id"].rsplit("-", 1)[1]
    assert main(["explain", digest, "--results", "plan.parquet"]) == 0
    told = capsys.readouterr().out
    assert pruned["experiment_id"] in told
    assert "predicted_oom" in told
    assert "(limit 75.0)" in told
    assert "no attempt yet" in told
    assert main(["explain", "llama8b", "--results", "plan.parquet"]) == 2
    assert "is part of" in capsys.readouterr().err
    other = next(row["experiment_id"] for row in rows if row["verdict"] == "run" and row["tp"] != pruned["tp"])
    assert main(["diff", digest, other, "--results", "plan.parquet"]) == 0
    told = capsys.readouterr().out
    assert "tp " in told
    assert "vocab_size" not in told


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


def test_what_the_machine_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "results/tiny/ledger.parquet")

    monkeypatch.setattr("results.tables.store.write_ledger", full)
    assert main(["run", "+grid=tiny"]) == 2
    assert capsys.readouterr().err == "ultrasweep: cannot use results/tiny/ledger.parquet: No space left on device\n"


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
