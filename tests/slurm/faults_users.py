"""Scenarios in which users disturb each other's runs or their own."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from tests.slurm.lab import Lab
from tests.slurm.lab.lab import OTHER_USER, wait_until
from tests.slurm.scenarios import Place, TableRow, scenario
from tests.slurm.sweeps import StandinSweep

_SBATCH = """#!/bin/sh
# sbatch that can be held before it submits, and after
touch "{folder}/asked"
while [ -e "{folder}/hold-before" ]; do sleep 0.05; done
{sbatch} "$@"
status=$?
touch "{folder}/submitted"
while [ -e "{folder}/hold-after" ]; do sleep 0.05; done
exit $status
"""


def slow_sbatch(lab: Lab, folder: Path) -> dict[str, str]:
    """An environment whose sbatch waits while ``folder`` contains ``hold-before`` or ``hold-after``."""
    folder.mkdir()
    script = folder / "sbatch"
    script.write_text(_SBATCH.format(folder=folder, sbatch=shutil.which("sbatch")))
    script.chmod(0o755)
    return {**lab.environment, "PATH": f"{folder}:{lab.environment['PATH']}"}


def ctrl_c(sweep: StandinSweep) -> int:
    """Send SIGINT to the whole foreground group, as a terminal does. Returns the submitter's exit status."""
    process = sweep.submitters[-1]
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(60)


@scenario("two submitters of one sweep at once", nodes=2)
def two_submitters(place: Place) -> TableRow:
    sweep = place.sweep(("ok_4", 2), *[("ok_2", 1)] * 5, words=["launcher.max_pilots=2"])
    first, second = sweep.start(), sweep.start()
    sweep.finish()
    assert (first.wait(60), second.wait(60)) == (0, 0), f"{sweep.output(0)}\n{sweep.diagnosis()}"
    sweep.check()
    return TableRow("the same command typed twice in one second", sweep.summary())


@scenario("two users' sweeps at once", nodes=2)
def two_users(place: Place) -> TableRow:
    theirs_root = place.folder / "theirs"
    theirs_root.mkdir()
    points = [("ok_2", 1), ("raises", 1), ("ok_3", 2)]
    ours = place.sweep(*points)
    theirs = place.sweep(*points, root=theirs_root, name="theirs", as_other_user=True)
    for path in (theirs_root, *theirs_root.rglob("*")):
        shutil.chown(path, OTHER_USER)
    for sweep in (ours, theirs):
        sweep.start()
    wait_until(lambda: len(ours.jobs()) >= 2, 60, "jobs of both")
    for sweep in (ours, theirs):
        sweep.finish()
    for sweep in (ours, theirs):
        rows = sweep.check(end_jobs=False)
        assert [row["outcome"] for row in rows["raises"]] == ["crash"]
    wait_until(lambda: not ours.jobs(), 60, "the end of all jobs")
    assert {path.owner() for path in theirs.path.rglob("*")} == {OTHER_USER}
    return TableRow("root's and somebody else's, on the same two nodes", theirs.summary())


@scenario("Ctrl-C before anything is submitted")
def interrupted_before(place: Place) -> TableRow:
    gate = place.folder / "gate"
    sweep = place.sweep(("ok_1", 1), ("ok", 1), environment=slow_sbatch(place.lab, gate))
    (gate / "hold-before").touch()
    sweep.start()
    wait_until((gate / "asked").exists, 60, "the call of sbatch")
    os.killpg(sweep.submitters[-1].pid, signal.SIGINT)
    time.sleep(1)
    (gate / "hold-before").unlink()
    sweep.submitters[-1].wait(60)
    sweep.start()
    sweep.finish()
    sweep.check()
    jobs = {job.id.partition("_")[0] for job in sweep.jobs(every=True)}
    return TableRow("while sbatch is being called; the command again", f"{sweep.summary()}; {len(jobs)} Slurm job(s)")


@scenario("Ctrl-C right after the submission, before its answer is read")
def interrupted_after(place: Place) -> TableRow:
    gate = place.folder / "gate"
    sweep = place.sweep(("ok_6", 1), ("ok", 1), environment=slow_sbatch(place.lab, gate))
    (gate / "hold-after").touch()
    sweep.start()
    wait_until((gate / "submitted").exists, 60, "the submission")
    # as abrupt as a closed laptop: the submitter cannot write anything down
    os.killpg(sweep.submitters[-1].pid, signal.SIGKILL)
    sweep.submitters[-1].wait(60)
    (gate / "hold-after").unlink()
    assert len(sweep.jobs()) == 1
    sweep.start()
    sweep.finish()
    sweep.check()
    jobs = {job.id.partition("_")[0] for job in sweep.jobs(every=True)}
    assert len(jobs) == 1, f"submitted again although the job was there: {sorted(jobs)}"
    return TableRow(
        "the submitter is killed (kill -9) while sbatch answers; the command again", f"{sweep.summary()}; 1 job"
    )


@scenario("Ctrl-C while watching")
def interrupted_watching(place: Place) -> TableRow:
    sweep = place.sweep(("ok_6", 1), ("ok", 1))
    sweep.start()
    sweep.wait_running("ok_6")
    status = ctrl_c(sweep)
    output = sweep.output()
    assert status == 0, output
    assert "status" in output and "cancel" in output, output
    assert sweep.jobs(), "the jobs went with the submitter"
    wait_until(lambda: not sweep.left(), 60, "the end without anybody watching")
    sweep.start()
    sweep.finish()
    sweep.check()
    assert len({job.id.partition("_")[0] for job in sweep.jobs(every=True)}) == 1
    return TableRow("it detaches; the jobs go on, nobody watches", sweep.summary())
