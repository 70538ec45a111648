"""Whole runs on this machine while the sweep's folder is copied, or the clock is set back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launchers import local
from launchers.local import run_local
from launchers.pilot import pilot as pilot_module
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import sweep_status
from tests.launchers.local_runs import SCRIPTED, phase_of, rows_of, start_pilot, until
from tests.launchers.scripted import points, settings

pytestmark = pytest.mark.slow
DURATIONS = ("duration_s", "spawn_s", "rendezvous_s", "build_s", "warmup_s", "timed_s", "teardown_s")
CLOCK = """
import os, sys, time
real = time.time
time.time = lambda: real() - 3600.0 * os.path.exists({flag!r})
from launchers.pilot import command
from tests.launchers.scripted import run_rank
sys.exit(command.main(run_rank=run_rank))
"""


@pytest.mark.slow(seconds=4)
def test_a_copy_of_a_running_sweep_runs_by_itself_and_leaves_the_original_alone(
    sweep: SweepDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """According to the copy, the original's pilot still runs a point; in the copy its heartbeat stands still."""
    monkeypatch.setattr(local, "PILOT", SCRIPTED)
    sweep.add_points(points("slowish", "ok", deadline_s=60.0))
    launch = settings(phase_limits_s={}, lease_s=2.0)
    pilot = start_pilot(sweep, "p1", launch)
    until(lambda: phase_of(sweep) == "warmup")
    copy = SweepDir(tmp_path / "copy")
    subprocess.run(["cp", "-r", sweep.path, copy.path], check=False, capture_output=True)  # files come and go
    [last] = points("slow", deadline_s=60.0)
    sweep.add_points([dataclasses.replace(last, index=9)])  # so that the original's pilot outlives the copy
    assert run_local(copy, launch, live=False).outcomes == {"ok": 2}
    assert pilot.poll() is None
    pilot.terminate()
    pilot.terminate()
    assert pilot.wait(40) == pilot_module.STOPPED
    assert sweep_status(sweep).done == {"ok": 2}
    ended = [(row["outcome"], row["attempt_number"]) for row in rows_of(sweep) if row["model"] != "slow"]
    assert ended == [("ok", 1), ("ok", 1)]
    taken = [(row["outcome"], row["attempt_number"]) for row in rows_of(copy) if row["model"] == "slowish"]
    assert taken == [("node_failure", 1), ("ok", 2)]
    ids = [{row["attempt_id"] for row in rows_of(one)} for one in (sweep, copy)]
    assert len(ids[0] & ids[1]) == 1


def test_a_clock_that_is_set_back_while_a_point_runs(
    sweep: SweepDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks of the pilot, its agent and its ranks go back by an hour: no point hangs or is lost, and no duration
    is negative."""
    flag = tmp_path / "an hour ago"
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-c", CLOCK.format(flag=str(flag))))
    sweep.add_points(points("slowish", "ok", deadline_s=60.0))

    def set_back() -> None:
        until(lambda: phase_of(sweep) == "step", 30)
        flag.touch()

    setter = threading.Thread(target=set_back)
    setter.start()
    try:
        summary = run_local(sweep, settings(phase_limits_s={}), live=False)
    finally:
        setter.join()
    assert (summary.outcomes, summary.attempts) == ({"ok": 2}, 2)
    slowish, ok = (next(row for row in rows_of(sweep) if row["model"] == model) for model in ("slowish", "ok"))
    assert (slowish["started_at"] - ok["started_at"]).total_seconds() > 3000
    assert 3 < slowish["duration_s"] < 60
    assert all(row[name] is None or row[name] >= 0 for row in (slowish, ok) for name in DURATIONS)
