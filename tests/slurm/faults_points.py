"""Scenarios in which a rank or a pilot fails."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tests.slurm.lab.lab import wait_until
from tests.slurm.scenarios import Place, TableRow, scenario
from tests.slurm.standin import ONE_PROCESS
from tests.slurm.sweeps import STEP_LIMIT_S, StandinSweep, brief

RANKS = {
    "oom": "a rank runs out of memory",
    "raises": "a rank raises",
    "killed": "a rank is killed (SIGKILL)",
    "hangs": "a rank hangs in a collective",
}


@scenario(*RANKS.values(), nodes=2)
def ranks_fail(place: Place) -> Mapping[str, TableRow]:
    sweep = place.sweep(("oom", 1), ("raises", 2), ("killed", 2), ("hangs", 2), ("ok", 1), ("ok", 2), ("ok_1", 1))
    sweep.start()
    sweep.finish()
    rows = sweep.check()
    found = {name: [(row["outcome"], row["will_retry"]) for row in rows[name]] for name in (*RANKS, "ok", "ok_1")}
    assert found["oom"] == [("oom", False)], brief(rows["oom"])
    assert found["raises"] == [("crash", False)], brief(rows["raises"])
    assert found["killed"][-1] == ("crash", False), brief(rows["killed"])
    assert found["hangs"] == [("hang", True), ("hang", False)], brief(rows["hangs"])
    assert found["ok"] == [("ok", False)] * 2 and found["ok_1"] == [("ok", False)]
    assert rows["killed"][0]["failed_rank"] == 3 and "SIGKILL" in rows["killed"][0]["evidence"]
    assert "ZeroDivisionError" in rows["raises"][0]["evidence"]
    how = {
        "oom": "the last of 2 ranks says so in its second step",
        "raises": "rank 3 of 4, on the second of two nodes",
        "killed": "rank 3 of 4 ends itself with SIGKILL",
        "hangs": f"no rank of 4 moves any more; the limit of a step is {STEP_LIMIT_S} s",
    }
    words = {name: ", then ".join(outcome for outcome, _ in found[name]) for name in RANKS}
    return {title: TableRow(how[name], words[name]) for name, title in RANKS.items()}


@scenario("a pilot is killed (kill -9)")
def pilot_killed(place: Place) -> TableRow:
    sweep = place.sweep(("ok_8", 1), ("ok", 1), ("ok_1", 1))
    sweep.start()
    state = sweep.wait_running("ok_8")
    place.lab.kill_in_node(state.nodes[0], state.identity.pid)
    sweep.finish()
    rows = sweep.check()["ok_8"]
    assert [row["outcome"] for row in rows] == ["node_failure", "ok"], brief(rows)
    return TableRow("SIGKILL to the pilot while a point trains", sweep.summary())


@scenario("a node's agent is killed (kill -9)", nodes=3)  # the node is excluded from now on
def agent_killed(place: Place) -> TableRow:
    sweep = place.sweep(("ok_8", 2), ("ok", 1), ("ok", 2))
    sweep.start()
    state = sweep.wait_running("ok_8")
    for pid in place.lab.processes(str(sweep.path), node=state.nodes[1]):
        with suppress(ProcessLookupError):  # a rank dies with its agent
            os.kill(pid, signal.SIGKILL)
    sweep.finish()
    rows = sweep.check()["ok_8"]
    assert [row["outcome"] for row in rows] == ["node_failure", "ok"], brief(rows)
    return TableRow("SIGKILL to all that runs on the second of two nodes", sweep.summary())


@scenario("a pilot runs into its time limit, warned")
def pilot_times_out(place: Place) -> TableRow:
    sweep = place.sweep(("ok_45", 1), ("ok", 1))
    sweep.start()
    state = sweep.wait_running("ok_45")
    place.lab.run("scontrol", "update", f"jobid={state.job}", "TimeLimit=1")
    wait_until(lambda: list(sweep.dir.history.glob("*ok45*")), 120, f"the end of the attempt: {sweep.output()}")
    place.lab.run("scontrol", "update", f"jobid={state.job}", "TimeLimit=5", check=False)  # if it is requeued
    sweep.finish()
    rows = sweep.check()["ok_45"]
    assert rows[0]["outcome"] == "preempted" and rows[-1]["outcome"] == "ok", brief(rows)
    return TableRow("the limit is cut to a minute, with a warning (SIGUSR2) before", sweep.summary())


def _frozen_until_taken_over(place: Place, sweep: StandinSweep) -> list[dict[str, Any]]:
    """Freeze the pilot of ``ok_32`` until another pilot has its point, then let it continue. Returns the point's rows
    at the end."""
    sweep.start()
    state = sweep.wait_running("ok_32")
    place.lab.kill_in_node(state.nodes[0], state.identity.pid, signal.SIGSTOP)
    held = f"*@{state.pilot_id}.json"
    wait_until(lambda: not list(sweep.dir.claimed.glob(held)), 90, f"a take-over: {sweep.output()}")
    place.lab.kill_in_node(state.nodes[0], state.identity.pid, signal.SIGCONT)
    sweep.finish()
    return sweep.check()["ok_32"]


@scenario("a pilot freezes, is taken for dead, and goes on", nodes=2)
def pilot_freezes(place: Place) -> TableRow:
    sweep = place.sweep(("ok", 1), ("ok_32", 1), *[("ok_4", 1)] * 3, words=["launcher.max_pilots=2"])
    rows = _frozen_until_taken_over(place, sweep)
    assert any(row["outcome"] == "ok" and not row["will_retry"] for row in rows), brief(rows)
    return TableRow("SIGSTOP until another pilot has taken its point over, then SIGCONT", sweep.summary())


@scenario("the only pilot freezes, and goes on", nodes=2)
def only_pilot_freezes(place: Place) -> TableRow:
    sweep = place.sweep(("ok", 1), ("ok_32", 1))
    rows = _frozen_until_taken_over(place, sweep)
    assert rows[-1]["outcome"] == "ok", brief(rows)
    assert "is stalled" in sweep.output(), sweep.output()
    return TableRow(
        "SIGSTOP until a pilot submitted in its place has taken its point over, then SIGCONT", sweep.summary()
    )


def _preempt(place: Place, seconds: int) -> None:
    """Submit another user's job that takes all nodes of this scenario for some seconds."""
    words = ("-p", "main", "-N", str(len(place.nodes)), "-w", ",".join(place.nodes), "--exclusive")
    place.lab.run("sbatch", "--parsable", *words, "-o", "/dev/null", "--wrap", f"sleep {seconds}")


def _restarts(place: Place, job: str | None) -> int:
    """How often Slurm has restarted a job."""
    assert job is not None
    return int(place.lab.run("scontrol", "show", "job", job).partition("Restarts=")[2].split()[0])


@scenario("a pilot is preempted and requeued", nodes=1, preemptible=True)
def pilot_preempted(place: Place) -> TableRow:
    sweep = place.sweep(("ok_9", 1), ("ok", 1), ("ok_1", 1))
    sweep.start()
    state = sweep.wait_running("ok_9")
    _preempt(place, 4)
    sweep.finish()
    rows = sweep.check()["ok_9"]
    assert [row["outcome"] for row in rows] == ["preempted", "ok"], brief(rows)
    assert _restarts(place, state.job) == 1
    return TableRow("another user's job takes the node; Slurm requeues the pilot", sweep.summary())


def _runs_for(sweep: StandinSweep, name: str, seconds: float) -> bool:
    """Whether a point runs for so long. With `ONE_PROCESS` its phase does not show it, since few ranks have
    heartbeats."""
    running = [(state, one) for state in sweep.states() for one in state.running]
    return any(one.experiment_id.startswith(name) and state.elapsed_s(one) > seconds for state, one in running)


@scenario("a pilot of 16 nodes is preempted and requeued", nodes=16, preemptible=True)
def wide_pilot_preempted(place: Place) -> TableRow:
    words = [
        f"+launcher.environment.{ONE_PROCESS}=1",
        "+launcher.phase_limits_s.step=60",
        "launcher.time_min=10",
    ]
    sweep = place.sweep(("ok", 16), ("ok_20", 16), ("ok_1", 16), words=words)
    sweep.start()
    wait_until(lambda: _runs_for(sweep, "ok20", 5.0), 240, f"ok_20 in its steps: {sweep.output()}")
    state = sweep.states()[0]
    _preempt(place, 4)
    sweep.finish(limit_s=400)
    rows = sweep.check()["ok_20"]
    assert [row["outcome"] for row in rows] == ["preempted", "ok"], brief(rows)
    assert _restarts(place, state.job) == 1
    return TableRow("another user's job takes all 16 nodes; Slurm requeues the pilot", sweep.summary())


@scenario("scontrol is missing in the pilot's image")
def scontrol_is_missing(place: Place) -> TableRow:
    commands = place.folder / "bin"
    commands.mkdir()
    (commands / "squeue").symlink_to(str(shutil.which("squeue")))
    sweep = place.sweep(("ok_9", 1), ("ok", 1), words=[f"launcher.prefix=['env','PATH={commands}']"])
    sweep.start()
    state = sweep.wait_running("ok_9")
    place.lab.kill_in_node(state.nodes[0], state.identity.pid, signal.SIGUSR2)
    sweep.finish()
    rows = sweep.check()["ok_9"]
    assert [row["outcome"] for row in rows] == ["preempted", "ok"], brief(rows)
    assert _restarts(place, state.job) == 1, sweep.diagnosis()
    return TableRow("PATH of the pilot has squeue alone; the warning before the time limit (SIGUSR2)", sweep.summary())


@scenario("a pilot is scancelled")
def pilot_cancelled(place: Place) -> TableRow:
    sweep = place.sweep(("ok_8", 1), ("ok", 1), ("ok_1", 1))
    sweep.start()
    state = sweep.wait_running("ok_8")
    assert state.job is not None
    place.lab.run("scancel", state.job)
    sweep.finish()
    rows = sweep.check()["ok_8"]
    assert rows[0]["outcome"] in ("preempted", "cancelled") and rows[0]["will_retry"], brief(rows)
    assert rows[-1]["outcome"] == "ok", brief(rows)
    return TableRow("scancel of a running job by hand", sweep.summary())


@scenario("a pilot vanishes while it waits")
def pending_pilot_cancelled(place: Place) -> TableRow:
    place.lab.drain(place.nodes[0])
    try:
        sweep = place.sweep(("ok", 1), ("ok_1", 1))
        sweep.start()
        wait_until(sweep.jobs, 60, "a job")
        time.sleep(2)
        place.lab.run("scancel", sweep.jobs()[0].id.partition("_")[0])
    finally:
        place.lab.resume(place.nodes[0])
    sweep.finish()
    sweep.check()
    return TableRow("scancel of a pending job by hand", sweep.summary())
