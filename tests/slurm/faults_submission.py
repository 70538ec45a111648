"""Scenarios in which the command is repeated: from another folder, with other options, in an unusual environment."""

from __future__ import annotations

import subprocess

from launchers.state.submissions import all_submissions
from tests.slurm.lab.lab import afterwards
from tests.slurm.scenarios import Place, TableRow, scenario
from tests.slurm.sweeps import StandinSweep

HOSTILE = {
    "SQUEUE_PARTITION": "nowhere",
    "SQUEUE_STATES": "SUSPENDED",
    "SQUEUE_USERS": "nobody",
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_SORT": "-i",
    "SCANCEL_STATE": "SUSPENDED",
    "SCANCEL_PARTITION": "nowhere",
    "SCANCEL_INTERACTIVE": "1",
    "SACCT_FORMAT": "JobID",
    "SRUN_CPUS_PER_TASK": "3",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_EXCLUSIVE": "user",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_LABELIO": "1",
    "SLURM_NTASKS": "7",
    "SLURM_EXIT_ERROR": "9",
    "LC_ALL": "tr_TR.UTF-8",
}


def _jobs(sweep: StandinSweep) -> list[str]:
    """Numbers of the jobs that wait or run; ending jobs are left out."""
    return [job.id for job in sweep.jobs() if job.state in ("PENDING", "RUNNING")]


def _detach(sweep: StandinSweep) -> str:
    """Run the command with ``--detach`` and return its output."""
    assert sweep.start("--detach").wait(120) == 0, sweep.output()
    return sweep.output()


@scenario("cancel, and the command again at once")
def cancelled_and_again(place: Place) -> TableRow:
    sweep = place.sweep(("ok_30", 1), ("ok", 1))
    _detach(sweep)
    sweep.wait_running("ok_30")
    before = _jobs(sweep)
    assert sweep.tell("cancel").returncode == 0
    _detach(sweep)
    after = _jobs(sweep)
    assert after and not set(after) & set(before), (before, after, sweep.output())
    sweep.start()
    sweep.finish()
    sweep.check()
    return TableRow("`cancel`, then `run --detach` while Slurm still ends the job", sweep.summary())


@scenario("scancel by hand, and the command again at once")
def scancelled_and_again(place: Place) -> TableRow:
    sweep = place.sweep(("ok_30", 1), ("ok", 1))
    _detach(sweep)
    sweep.wait_running("ok_30")
    before = _jobs(sweep)
    place.lab.run("scancel", *before)
    _detach(sweep)
    after = _jobs(sweep)
    assert after and not set(after) & set(before), (before, after, sweep.output())
    sweep.start()
    sweep.finish()
    sweep.check()
    return TableRow("`scancel`, then `run --detach` while Slurm still ends the job", sweep.summary())


@scenario("a user's variables for Slurm's commands", nodes=2)
def hostile_environment(place: Place) -> TableRow:
    sweep = place.sweep(("ok_6", 2), *[("ok_2", 1)] * 4, environment={**place.lab.environment, **HOSTILE})
    _detach(sweep)
    first = _jobs(sweep)
    _detach(sweep)
    assert _jobs(sweep) == first, "pilots were submitted a second time"
    result = sweep.tell("cancel")
    assert result.returncode == 0 and "cancelled; what they ran waits again" in result.stdout, result
    assert not _jobs(sweep), "jobs run on after a cancel"
    sweep.start()
    sweep.finish()
    sweep.check()
    return TableRow(f"{len(HOSTILE)} of them, such as SQUEUE_PARTITION; run, run again, cancel, run", sweep.summary())


@scenario("a results folder is copied, and the copy cancelled")
def folder_is_copied(place: Place) -> TableRow:
    sweep = place.sweep(("ok_12", 1), ("ok", 1))
    _detach(sweep)
    sweep.wait_running("ok_12")
    copy = sweep.path.with_name("copy")
    subprocess.run(["cp", "-r", sweep.path, copy], check=False, capture_output=True)  # files come and go meanwhile
    result = sweep.tell("cancel", path=copy)
    assert result.returncode == 2 and "is a copy of" in result.stderr, result
    assert _jobs(sweep), "the original's pilot was cancelled"
    sweep.start()
    sweep.finish()
    rows = sweep.check()
    assert [row["outcome"] for row in rows["ok_12"]] == ["ok"]
    return TableRow("while its pilot runs; `cancel` on the copy is refused", sweep.summary())


@scenario("a results folder is moved while its pilots wait", nodes=1)
def folder_is_moved(place: Place) -> TableRow:
    sweep = place.sweep(("ok", 1), ("ok_1", 1))
    place.lab.drain(place.nodes[0])
    with afterwards(lambda: place.lab.resume(place.nodes[0])):
        _detach(sweep)
        before = _jobs(sweep)
        moved = sweep.path.with_name("moved")
        sweep.path.rename(moved)
        sweep.name = moved.name
        assert "this folder was" in _detach(sweep), sweep.output()
        assert not set(before) & set(_jobs(sweep)), "a pilot with the old path waits"
    sweep.start()
    sweep.finish()
    sweep.check()
    return TableRow("renamed; the command with the new name replaces its waiting pilots", sweep.summary())


@scenario("a pilot waits that can never start")
def never_starts(place: Place) -> TableRow:
    place.lab.run("scontrol", "update", f"PartitionName={place.partition}", "MaxTime=4")
    sweep = place.sweep(("ok", 1), ("ok_1", 1))
    assert sweep.start("--detach").wait(120) == 2, sweep.output()
    assert "will never start" in sweep.output() and "PartitionTimeLimit" in sweep.output()
    assert "time_min was 5 and is 4" in _again(sweep, "launcher.time_min=4"), sweep.output()
    sweep.finish()
    sweep.check()
    first, second = all_submissions(sweep.dir)
    assert (first.stage, second.time_min) == ("ended", 4)
    return TableRow("its time is over the partition's limit; the command again with a shorter time", sweep.summary())


def _again(sweep: StandinSweep, *words: str) -> str:
    sweep.words = [*sweep.words, *words]
    sweep.start()
    sweep.finish()
    return sweep.output()


@scenario("a user may have only three jobs", nodes=2)
def few_jobs(place: Place) -> TableRow:
    place.lab.limit_jobs(place.partition, 3)
    sweep = place.sweep(*[("ok_2", 1)] * 8, words=["launcher.target_h=0.001"])
    output = _detach(sweep)
    assert "accepts no more pilots of this user now" in output and "3 pilots keep running" in output, output
    sweep.start()
    sweep.finish()
    sweep.check()
    refused = [one for one in all_submissions(sweep.dir) if one.stage == "failed"]
    left = {path.stem for path in (sweep.path / "slurm").iterdir()} - {one.token for one in all_submissions(sweep.dir)}
    assert not refused and not left, (refused, left)
    return TableRow("MaxSubmitJobsPerUser=3 where eight pilots are wanted", sweep.summary())
