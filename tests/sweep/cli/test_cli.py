"""The command line: bad input in one line and exit code 2, help, no torch, quick."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import sweep.cli
from launchers.state.sweep_dir import SweepDir
from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.cli.command import Command
from sweep.cli.commands import COMMANDS
from tests.sweep.helpers import plan_of, store_attempt

ROOT = Path(__file__).resolve().parents[3]


pytestmark = pytest.mark.usefixtures("machine_without_gpus")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "+grid=nope"], "no grid called 'nope'"),
        (["plan"], "no grid given"),
        (
            ["search", "--replay", "t.csv", "--where", "tp == 1"],
            "--where tp == 1: a replay looks at all rows of its tab",
        ),
        (
            ["advise", "model=llama8b", "cluster=h200", "gpus=8", "dp=8"],
            "no option 'dp'; it follows from gpus and the ot",
        ),
        (["advise", "model=llama8b", "cluster=h200", "gpus=[]"], r"advise: gpus=\[\] is empty"),
        (["pla", "+grid=tiny"], "no command 'pla'; did you mean 'plan'"),
        (["plan", "+grid=llama8b_8gpu", "grid.axes.tpp=[1]"], "no axis is called 'tpp'; did you mean 'tp'"),
        (["plan", "+grid=llama8b_8gpu", "grid.axes.world_size=7"], "no point has world_size=7: dp = "),
        (["plan", "+grid=llama8b_8gpu", "--where", "tp = 3"], "cannot read 'tp = 3'"),
        (["plan", "+grid=llama8b_8gpu", "--where", "tpp < 3"], "uses 'tpp', which is no axis; did you mean 'tp'"),
        (["plan", "+grid=tiny", "grid.axes.engine=foo"], "axis engine='foo'; it may be ultrasweep"),
        (["plan", "+grid=tiny", "grid.axes.seed=abc"], "axis seed='abc' must be a whole number"),
        (["plan", "+grid=tiny", "grid.axes.sequence_parallel=maybe"], "='maybe'; it may be true or false"),
        (["plan", "+grid=tiny", "grid.axes.engine_version=6"], "axis engine_version='6'; it may be 7"),
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


@pytest.mark.slow(seconds=7)
def test_plan_of_the_study_is_quick_and_needs_no_torch() -> None:
    program = (
        "import sys, time\n"
        "from tests.fixed_task import fixed_task_seconds\n"
        "before, start = fixed_task_seconds(), time.process_time()\n"
        "from sweep.__main__ import main\n"
        "code = main(['plan', '+grid=playbook'])\n"
        "used, after = time.process_time() - start, fixed_task_seconds()\n"
        "heavy = [m for m in ('torch', 'pandas', 'matplotlib', 'triton') if m in sys.modules]\n"
        "print(f'CODE {code} HEAVY {heavy} FIXED TASKS {2 * used / (before + after):.1f}')\n"
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
    assert float(lines[-1].split()[-1]) < 120  # 52 beside three other workers
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


def test_what_the_machine_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "results/tiny/ledger.parquet")

    monkeypatch.setattr("results.tables.store.write_ledger", full)
    assert main(["run", "+grid=tiny"]) == 2
    assert capsys.readouterr().err == (
        "ultrasweep: cannot use results/tiny/ledger.parquet: No space left on device; nothing is lost: free some and "
        "give the command again\n"
    )


@pytest.mark.parametrize(
    "command", [["explain", "a"], ["diff", "a", "b"], ["export", "a", "--to", "megatron"], ["card"]]
)
def test_points_of_a_plan_in_csv_are_refused_with_what_works(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.csv").write_text("experiment_id\na\n")
    more = ["--all"] if command == ["card"] else []
    assert main([*command, *more, "--results", str(tmp_path / "plan.csv")]) == 2
    assert "plan.csv: points are read from a Parquet file, as plan --out plan.parquet writes" in capsys.readouterr().err


def test_every_command_that_reads_configuration_takes_folders() -> None:
    """The others read what is written in a sweep's folder or a config.json, and write it."""
    without = {name for name, one in COMMANDS.items() if "--conf" not in one.parser()._option_string_actions}
    assert without == {"model", "grade", "diff", "export", "card", "status", "watch", "logs", "cancel", "retry"}
