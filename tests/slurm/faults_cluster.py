"""Scenarios in which a node, the controller, the accounting, the disk or a clock fails."""

from __future__ import annotations

import os
import signal
import time

from tests.slurm.lab.lab import afterwards, wait_until
from tests.slurm.scenarios import Place, TableRow, scenario
from tests.slurm.sweeps import StandinSweep, brief


@scenario("a node crashes and comes back", nodes=3)
def node_crashes(place: Place) -> TableRow:
    sweep = place.sweep(("ok_9", 2), ("ok", 1), ("ok", 2))
    sweep.start()
    lost = sweep.wait_running("ok_9").nodes[1]
    place.lab.crash_node(lost)
    time.sleep(5)
    place.lab.start_node(lost)
    sweep.finish()
    rows = sweep.check()["ok_9"]
    assert rows[0]["outcome"] == "node_failure" and rows[-1]["outcome"] == "ok", brief(rows)
    return TableRow("power loss of the second of two nodes, back after 5 s", sweep.summary())


@scenario("the pilot's own node crashes and comes back", nodes=3)
def head_crashes(place: Place) -> TableRow:
    sweep = place.sweep(("ok_9", 2), ("ok", 1), ("ok", 2))
    sweep.start()
    lost = sweep.wait_running("ok_9").nodes[0]
    place.lab.crash_node(lost)
    time.sleep(20)  # Slurm gives a node that returns at once its job again, and notices the crash later
    place.lab.start_node(lost)
    sweep.finish()
    rows = sweep.check()["ok_9"]
    assert rows[0]["outcome"] == "node_failure" and rows[-1]["outcome"] == "ok", brief(rows)
    return TableRow("power loss of the first of two nodes, back after 20 s", sweep.summary())


@scenario("a node is drained", nodes=2)
def node_drained(place: Place) -> TableRow:
    sweep = place.sweep(*[("ok_3", 1)] * 6, words=["launcher.max_pilots=2"])
    sweep.start()
    drained = sweep.wait_running("ok_3").nodes[0]
    with afterwards(lambda: place.lab.resume(drained)):
        place.lab.drain(drained)
        sweep.finish()
        sweep.check()
    return TableRow("one of two nodes, with a pilot on it", sweep.summary())


@scenario("the results disk fills and is freed", nodes=1)
def disk_fills(place: Place) -> TableRow:
    sweep = place.sweep(*[("ok_2", 1)] * 5, root=place.lab.disk)
    sweep.start()
    wait_until(sweep.done, 60, "a first row")
    with afterwards(place.lab.free_disk):
        place.lab.fill_disk()
        done = sweep.done()
        time.sleep(12)
        assert sweep.done() <= done + 1, "rows were written to a full disk"
        assert sweep.submitters[-1].poll() is None, sweep.diagnosis()
    sweep.finish()
    rows = sweep.check()["ok_2"]
    assert all(row["outcome"] == "ok" or row["will_retry"] for row in rows), brief(rows)
    return TableRow("not a byte left for 12 s in the middle of the sweep", sweep.summary())


@scenario("a node's clock is an hour ahead", nodes=2)
def clock_is_off(place: Place) -> TableRow:
    place.lab.set_clock(place.nodes[0], 3600.0)
    sweep = place.sweep(("ok_8", 2), *[("ok_2", 1)] * 4, words=["launcher.max_pilots=2"])
    sweep.start()
    state = sweep.wait_running("ok_8")
    place.lab.kill_in_node(state.nodes[0], state.identity.pid)  # wrong clocks would matter in a take-over
    sweep.finish()
    rows = sweep.check()
    assert [row["outcome"] for row in rows["ok_8"]] == ["node_failure", "ok"], brief(rows["ok_8"])
    years = {row["started_at"].timestamp() - time.time() > 1800 for row in rows["ok_2"] + rows["ok_8"]}
    assert True in years, "no point ran on the node whose clock is off"
    return TableRow("one of two nodes an hour ahead, and a pilot killed on it", sweep.summary())


# The controller: no other scenario runs on this cluster at the same time.


def _long_sweep(place: Place) -> StandinSweep:
    """A sweep of about half a minute on two nodes, with running and waiting points all the time."""
    sweep = place.sweep(("ok_8", 2), *[("ok_3", 1)] * 8, words=["launcher.max_pilots=2"])
    sweep.start()
    sweep.wait_running()
    return sweep


@scenario("slurmctld is restarted", nodes=2, isolation="plain")
def ctld_restarts(place: Place) -> TableRow:
    sweep = _long_sweep(place)
    place.lab.ctld_stop()
    with afterwards(place.lab.ctld_start):
        time.sleep(12)
    sweep.finish()
    sweep.check()
    return TableRow("down for 12 s while points run", sweep.summary())


@scenario("slurmctld is killed", nodes=2, isolation="plain")
def ctld_is_killed(place: Place) -> TableRow:
    sweep = _long_sweep(place)
    # Changes of jobs are saved within five seconds (SAVE_MAX_WAIT in slurmctld). With an older state it would start
    # jobs again on nodes that run them, and drain those nodes ("Duplicate jobid on nodes").
    time.sleep(6)
    place.lab.ctld_kill()
    time.sleep(3)
    place.lab.ctld_start()
    sweep.finish()
    sweep.check()
    return TableRow("kill -9, started again after 3 s", sweep.summary())


@scenario("slurmctld forgets jobs and gives their ids to others", nodes=2, isolation="plain")
def ctld_forgets(place: Place) -> TableRow:
    place.lab.ctld_save()
    sweep = _long_sweep(place)
    forgotten = {job.id.partition("_")[0] for job in sweep.jobs()}
    os.kill(sweep.submitters[-1].pid, signal.SIGSTOP)  # so that the ids go to others, not to its next pilots
    place.lab.ctld_kill()
    place.lab.ctld_forget()
    place.lab.ctld_start()
    others = [
        place.lab.run("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "true").strip() for _ in range(5)
    ]
    os.kill(sweep.submitters[-1].pid, signal.SIGCONT)
    assert forgotten & set(others), (forgotten, others)
    sweep.finish()
    assert {job.id for job in place.lab.jobs()} >= set(others), "somebody else's jobs were cancelled"
    place.lab.run("scancel", *others)
    sweep.check()
    return TableRow("kill -9 before the jobs were saved; their ids go to somebody else's", sweep.summary())


@scenario("slurmctld is unreachable for a minute", nodes=2, isolation="plain")
def ctld_is_frozen(place: Place) -> TableRow:
    sweep = _long_sweep(place)
    place.lab.ctld_freeze()
    with afterwards(place.lab.ctld_thaw):
        time.sleep(60)
    sweep.finish()
    sweep.check()
    return TableRow("it accepts connections and does not answer for 60 s", sweep.summary())


@scenario("slurmctld is away while the only pilot is killed", nodes=2, isolation="plain")
def ctld_is_away(place: Place) -> TableRow:
    sweep = place.sweep(("ok_8", 1), *[("ok_3", 1)] * 4, words=["launcher.max_pilots=1"])
    sweep.start()
    state = sweep.wait_running("ok_8")
    place.lab.ctld_stop()
    with afterwards(place.lab.ctld_start):
        place.lab.kill_in_node(state.nodes[0], state.identity.pid)
        time.sleep(60)
        assert sweep.submitters[-1].poll() is None, sweep.output()
    sweep.finish()
    rows = sweep.check()["ok_8"]
    assert [row["outcome"] for row in rows] == ["node_failure", "ok"], brief(rows)
    return TableRow(
        "stopped for 60 s, ten minutes shortened to a tenth as the lease of a pilot is to a sixth; SIGKILL to the "
        "only pilot meanwhile",
        sweep.summary(),
    )


@scenario("a cluster without accounting: a pilot is killed", nodes=2, isolation="plain")
def no_accounting(place: Place) -> TableRow:
    sweep = _long_sweep(place)
    state = sweep.wait_running()
    place.lab.kill_in_node(state.nodes[0], state.identity.pid)
    sweep.finish()
    sweep.check()
    return TableRow("AccountingStorageType=none; SIGKILL to the pilot", sweep.summary())


@scenario("sacct is missing", nodes=1)
def sacct_is_missing(place: Place) -> TableRow:
    sweep = place.sweep(("ok_8", 1), ("ok", 1), environment=place.lab.without_sacct())
    sweep.start()
    state = sweep.wait_running("ok_8")
    place.lab.kill_in_node(state.nodes[0], state.identity.pid)
    sweep.finish()
    rows = sweep.check()["ok_8"]
    assert [row["outcome"] for row in rows] == ["node_failure", "ok"], brief(rows)
    return TableRow("sacct says that it is disabled; SIGKILL to the pilot", sweep.summary())


@scenario("slurmdbd dies", nodes=2, isolation="cluster")
def dbd_dies(place: Place) -> TableRow:
    sweep = _long_sweep(place)
    place.lab.dbd_kill()
    with afterwards(place.lab.dbd_start):
        state = sweep.wait_running()
        place.lab.kill_in_node(state.nodes[0], state.identity.pid)
        sweep.finish()
    sweep.check()
    return TableRow("kill -9 of slurmdbd, then SIGKILL to a pilot", sweep.summary())
