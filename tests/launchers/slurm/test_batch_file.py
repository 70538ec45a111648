"""Batch files of pilots: read as text, and run by bash with an srun that only records how it was called."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launchers.pilot.allocation import STARTED_AT
from launchers.slurm.batch_file import PilotJob, submission_text
from launchers.slurm.options import SlurmOptions, options_from_dict
from launchers.state.code_snapshot import PACKAGES, take_snapshot, write_snapshot
from launchers.state.pilot_state import requeue_request
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError

TOKEN = "slurm-20260101-120000-abcdef"


def job(folder: Path = Path("/shared/sweep"), **changes: Any) -> PilotJob:
    fields: dict[str, Any] = {
        "token": TOKEN,
        "job_name": f"sweep.{TOKEN}",
        "sweep_dir": folder,
        "code_dir": folder / "code" / "0123",
        "code_digest": hashlib.sha256().hexdigest(),  # of a folder without files
        "nodes": 2,
        "count": 3,
        "gpus_per_node": 8,
        "pilot": ("python", "-m", "launchers.pilot"),
    }
    return PilotJob(**{**fields, **changes})


def of_folder(folder: Path) -> PilotJob:
    """A job whose copy of the code is there, without a file."""
    made = job(folder)
    made.code_dir.mkdir(parents=True)
    return made


def parameters(text: str) -> dict[str, str]:
    lines = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {key: value for key, _, value in (line.removeprefix("--").partition("=") for line in lines)}


def test_the_batch_file_is_complete() -> None:
    options = SlurmOptions(partition="gpu", account="llm", time_min=60, nice=10, reservation="r1", exclude="node[7-8]")
    written = parameters(submission_text(job(excluded=("node3",)), options))
    assert written == {
        "account": "llm",
        "array": "0-2%3",
        "chdir": "/shared/sweep/code/0123",
        "comment": f"ultrasweep:{TOKEN}",
        "exclude": "node[7-8],node3",
        "exclusive": "",
        "gpus-per-node": "8",
        "job-name": f"sweep.{TOKEN}",
        "mem": "0",
        "nice": "10",
        "nodes": "2",
        "ntasks-per-node": "1",
        "open-mode": "append",
        "output": f"/shared/sweep/slurm/{TOKEN}/%A_%a_0_log.out",
        "partition": "gpu",
        "requeue": "",
        "reservation": "r1",
        "signal": "USR2@120",
        "time": "60",
    }


def test_a_single_pilot_is_no_array_and_a_cpu_cluster_has_no_gpus() -> None:
    written = parameters(submission_text(job(count=1, gpus_per_node=0), SlurmOptions()))
    assert "array" not in written and "gpus-per-node" not in written and "gres" not in written
    assert written["output"].endswith("/%j_0_log.out")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpus": "gres"}, {"gres": "gpu:8"}),
        ({"gpus": "gres", "gpu_type": "h100"}, {"gres": "gpu:h100:8"}),
        ({"gpu_type": "h100"}, {"gpus-per-node": "h100:8"}),
        ({"gpus": "none"}, {}),
    ],
)
def test_ways_to_ask_for_gpus(options: dict[str, Any], expected: dict[str, str]) -> None:
    written = parameters(submission_text(job(), options_from_dict(options)))
    assert {key: value for key, value in written.items() if key in ("gres", "gpus-per-node")} == expected


def run_by_bash(text: str, folder: Path, status: int = 0, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The arguments that the file gives to srun, and the environment of srun, which ends with ``status``."""
    shown = folder / "shown.json"
    srun = folder / "srun"
    srun.write_text(
        f"#!{sys.executable} -S\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(shown)!r}, 'w'))\n"
        f"sys.exit({status})\n"
    )
    srun.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", **environment}
    assert subprocess.run(["bash", "-c", text], check=False, env=env, cwd=folder, timeout=20).returncode == status
    words, seen = json.loads(shown.read_text())
    return words, seen


@pytest.mark.parametrize("name", ["plain", "two words", "it's", 'a "b" $(touch pwned) `touch pwned` ; & | # ~ *', "é"])
def test_paths_reach_the_pilot_as_they_are(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    job(folder).code_dir.mkdir(parents=True)
    options = SlurmOptions(cpus_per_task=12, srun_args=("--container-image=/i m'g",), prefix=("apptainer", "a b"))
    words, seen = run_by_bash(submission_text(job(folder), options), tmp_path, PYTHONPATH="/mine")
    assert words[-7:] == ["apptainer", "a b", "python", "-m", "launchers.pilot", str(folder), TOKEN]
    assert words[words.index("--output") + 1] == str(folder / "slurm" / TOKEN / "%A_%a_%t_log.out")
    for word in ("--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--cpus-per-task=12", "--nodes=2"):
        assert word in words
    assert "--container-image=/i m'g" in words
    assert seen["PYTHONPATH"] == f"{folder}/code/0123:/mine"
    assert seen["SRUN_CPUS_PER_TASK"] == "12"
    assert not list(tmp_path.rglob("pwned"))


def test_setup_lines_run_first_and_cannot_take_the_code_away(tmp_path: Path) -> None:
    options = SlurmOptions(setup=("export MINE=1 PYTHONPATH=/elsewhere",))
    _, seen = run_by_bash(submission_text(of_folder(tmp_path), options), tmp_path)
    assert seen["MINE"] == "1" and seen["PYTHONPATH"] == f"{tmp_path}/code/0123:/elsewhere"


@pytest.mark.slow
def test_a_job_ends_before_python_starts_when_its_code_was_changed(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in PACKAGES:
        (checkout / package).mkdir(parents=True)
        (checkout / package / "__init__.py").write_text(package)
    snapshot = take_snapshot(checkout)
    sweep = SweepDir.create(tmp_path / "it's a sweep", {})
    code = write_snapshot(sweep, snapshot)
    text = submission_text(job(sweep.path, code_dir=code, code_digest=snapshot.digest), SlurmOptions())
    (code / "core.17").write_text("a core dump is no code")
    run_by_bash(text, tmp_path)
    (tmp_path / "shown.json").unlink()
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("")
    planted = code / "sitecustomize.py"
    assert write_snapshot(sweep, snapshot) == code and (code / "core.17").exists()
    for plant in (planted.touch, lambda: planted.symlink_to(elsewhere), lambda: os.mkfifo(planted)):
        plant()
        with pytest.raises(FileNotFoundError, match="shown"):
            run_by_bash(text, tmp_path, status=1)
        planted.unlink()
    run_by_bash(text, tmp_path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("module load none", "launcher.setup failed with exit code 127: module load none"),
        ("source /none/activate", "/none/activate: No such file"),
        ("check() { false; }; check", "launcher.setup failed with exit code 1: false"),
        ("(exit 3)", "launcher.setup failed with exit code 3"),
    ],
)
def test_a_setup_line_that_fails_ends_the_job_and_is_named(line: str, told: str, tmp_path: Path) -> None:
    text = submission_text(job(), SlurmOptions(setup=("true", line, "touch later")))
    (tmp_path / "srun").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = subprocess.run(["bash", "-c", text], check=False, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode != 0 and told in ended.stderr
    assert not (tmp_path / "started").exists() and not (tmp_path / "later").exists()


def test_setup_lines_may_allow_a_failure_and_leave_no_trace(tmp_path: Path) -> None:
    text = submission_text(of_folder(tmp_path), SlurmOptions(setup=("false || true", "if false; then", "exit 1", "fi")))
    words, seen = run_by_bash(text.replace("srun --unbuffered", "false; srun --unbuffered"), tmp_path)
    assert words[0] == "--unbuffered" and seen["PYTHONSAFEPATH"] == "1", "srun starts, in the pilot's environment"


INSIDE = "launcher.setup goes on, but a command inside of $(...) failed with exit code"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("x=$(false) || true", ""),
        ("if x=$(false); then :; fi", ""),
        ("false | true", ""),
        ("export X=$(false)", f"{INSIDE} 1: false"),
        ('eval "$(none hook)"', f"{INSIDE} 127: none hook"),
    ],
)
def test_a_failure_after_which_bash_goes_on_is_not_reported_as_the_end(line: str, told: str, tmp_path: Path) -> None:
    text = submission_text(of_folder(tmp_path), SlurmOptions(setup=(line,)))
    (tmp_path / "srun").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = subprocess.run(["bash", "-c", text], check=False, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "started").exists(), ended.stderr
    assert "launcher.setup failed" not in ended.stderr
    assert told in ended.stderr and ("launcher.setup" in ended.stderr) == bool(told)


@pytest.mark.parametrize("given", ["/mine:", ":/mine", "::/mine:::"])
def test_python_imports_nothing_from_the_working_folder(given: str, tmp_path: Path) -> None:
    """Slurm goes to /tmp where the working folder is missing, and there anybody may have put modules."""
    _, seen = run_by_bash(submission_text(of_folder(tmp_path), SlurmOptions()), tmp_path, PYTHONPATH=given)
    assert seen["PYTHONPATH"] == f"{tmp_path}/code/0123:/mine" and seen["PYTHONSAFEPATH"] == "1"


@pytest.mark.slow
def test_the_jobs_start_is_noted_before_the_setup_lines(tmp_path: Path) -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    _, seen = run_by_bash(submission_text(of_folder(tmp_path), SlurmOptions(setup=("sleep 0.2",))), tmp_path)
    assert before - 0.02 <= float(seen[STARTED_AT]) <= time.clock_gettime(time.CLOCK_BOOTTIME) - 0.2


@pytest.mark.parametrize(
    ("state", "requeued", "array"), [("RUNNING", True, True), ("RUNNING", True, False), ("COMPLETING", False, True)]
)
def test_the_script_requeues_a_job_whose_image_has_no_scontrol(
    state: str, requeued: bool, array: bool, tmp_path: Path
) -> None:
    """An element of an array by its index: the id of the last element is that of the whole array."""
    sweep = SweepDir(tmp_path / "it's one")
    sweep.pilots.mkdir(parents=True)
    job = "71_2" if array else "71"
    of_job = f'[ "$3" = {job} ] && echo {state}'
    for name, does in (("squeue", of_job), ("scontrol", f"echo $* > {tmp_path}/asked")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    text = submission_text(of_folder(sweep.path), SlurmOptions(setup=("set -e",)))
    numbers = {"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "1"}
    if array:
        numbers |= {"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}
    run_by_bash(text, tmp_path, status=3, **numbers)
    assert not (tmp_path / "asked").exists()
    requeue_request(sweep, f"{TOKEN}.{2 if array else 0}.1").touch()
    run_by_bash(text, tmp_path, status=3, **numbers)
    assert (tmp_path / "asked").exists() == requeued and not list(sweep.pilots.iterdir())
    assert not requeued or (tmp_path / "asked").read_text() == f"requeue {job}\n"


@pytest.mark.parametrize("name", ["a\nb", "a\n#SBATCH --uid=0", "a%jb", "a\\b", "a\tb", "a\x7fb", "a\u2028b"])
def test_paths_that_mean_something_in_a_batch_file_are_refused(name: str) -> None:
    with pytest.raises(UltrasweepError, match="cannot be the folder of a sweep") as error:
        submission_text(job(Path("/shared") / name), SlurmOptions())
    assert "\n" not in str(error.value)


def test_further_parameters_and_plain_numbers() -> None:
    options = options_from_dict({"mem": 0, "exclude": 17, "sbatch": {"switches": 1, "contiguous": True, "x": False}})
    written = parameters(submission_text(job(), options))
    assert (written["switches"], written["contiguous"], written["exclude"], written["mem"]) == ("1", "", "17", "0")
    assert "x" not in written
