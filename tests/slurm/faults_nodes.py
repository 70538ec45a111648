"""Scenarios in which nodes are broken in ways that Slurm does not notice, or a shared file system fails."""

from __future__ import annotations

import time
from contextlib import ExitStack

from launchers.state import node_exclusions
from tests.slurm.lab.lab import afterwards, wait_until
from tests.slurm.scenarios import Place, TableRow, scenario
from tests.slurm.standin import FAILING_FILES
from tests.slurm.sweeps import StandinSweep, brief


def _broken(place: Place, *nodes: str) -> ExitStack:
    """Python ends at once on these nodes until the end of the block."""
    stack = ExitStack()
    for node in nodes:
        place.lab.break_python(node)
        stack.callback(place.lab.repair_python, node)
    return stack


def _excluded(sweep: StandinSweep) -> set[str]:
    return set(node_exclusions.excluded(sweep.dir))


def _run_into(place: Place, sweep: StandinSweep, broken: str) -> None:
    """Run the sweep to its end. The spare node becomes available only once the broken one is excluded, so that the
    first pilot gets the broken one."""
    spare = max(set(place.nodes) - {broken})
    place.lab.drain(spare)
    with afterwards(lambda: place.lab.resume(spare)):
        sweep.start()
        wait_until(lambda: _excluded(sweep), 120, f"the exclusion of {broken}: {sweep.output()}")
    sweep.finish()
    sweep.check()
    assert _excluded(sweep) == {broken}, sweep.output()


def _in_all(place: Place, sweep: StandinSweep) -> str:
    """The rows, and the node-seconds of the jobs."""
    return f"{sweep.summary()}; {place.lab.node_seconds(place.partition):.0f} node-seconds in all"


@scenario("Python is broken on one of a pilot's nodes", nodes=5)
def an_agent_never_starts(place: Place) -> TableRow:
    broken = sorted(place.nodes)[2]
    with _broken(place, broken):
        sweep = place.sweep(("ok_2", 4), ("ok", 4), ("ok_1", 1))
        _run_into(place, sweep, broken)
    return TableRow(
        "`false` in its place on the third of four nodes; points of four nodes, and a spare node", _in_all(place, sweep)
    )


@scenario("Python is broken on a pilot's first node", nodes=5)
def a_head_never_starts(place: Place) -> TableRow:
    broken = min(place.nodes)
    with _broken(place, broken):
        sweep = place.sweep(("ok_2", 4), ("ok", 4))
        _run_into(place, sweep, broken)
    return TableRow("the same on the first of four nodes", _in_all(place, sweep))


@scenario("Python is broken on a node of pilots of one node", nodes=3)
def a_node_takes_every_job(place: Place) -> TableRow:
    broken = place.nodes[0]
    with _broken(place, broken):
        sweep = place.sweep(*[("ok_4", 1)] * 6, words=["launcher.max_pilots=3"])
        sweep.start()
        sweep.finish()
        sweep.check()
    assert _excluded(sweep) == {broken}, sweep.output()
    return TableRow("one of three nodes; jobs end there at once, so that it gets the next one", _in_all(place, sweep))


@scenario("Python is broken everywhere", nodes=2)
def the_environment_is_broken(place: Place) -> TableRow:
    sweep = place.sweep(("ok", 2), ("ok_1", 2))
    with _broken(place, *place.nodes):
        process = sweep.start()
        assert process.wait(240) == 2, sweep.output()
        assert "times in a row without an attempt" in sweep.output() and "Exited with exit code" in sweep.output()
        assert not _excluded(sweep)
    sweep.start()
    sweep.finish()
    sweep.check()
    return TableRow("on both nodes; the command stops and says why; repaired, and the command again", sweep.summary())


@scenario("a shared file system reports stale handles", nodes=2)
def stale_handles(place: Place) -> TableRow:
    sweep = place.sweep(*[("stale", 1)] * 4, ("ok", 2), words=["launcher.max_attempts=2", "launcher.max_pilots=2"])
    sweep.start()
    sweep.finish()
    rows = sweep.check()
    assert len(rows["stale"]) == 8 and rows["ok"][-1]["outcome"] == "ok", brief(rows["stale"])
    assert not _excluded(sweep), sweep.output()
    return TableRow("every rank of four points gets ESTALE; no node is excluded", sweep.summary())


@scenario("a shared file system fails now and then under the pilots", nodes=2)
def failing_files(place: Place) -> TableRow:
    rate = 0.03
    words = [f"launcher.setup=['export {FAILING_FILES}={rate}']", "launcher.max_pilots=2"]
    sweep = place.sweep(*[("ok_1", 1)] * 8, words=words)
    sweep.start()
    sweep.finish()
    rows = sweep.check()
    assert [row["outcome"] for row in rows["ok_1"]] == ["ok"] * 8, brief(rows["ok_1"])
    said = "".join(log.read_text() for log in sweep.path.glob("slurm/*/*.out"))
    assert "on shared files had to be repeated" in said and "Traceback" not in said, said
    assert not _excluded(sweep), sweep.output()
    return TableRow(
        f"{100 * rate:.0f} % of the pilots' own calls on the sweep's files get EIO or ESTALE, half of those that "
        "change something after they were done",
        sweep.summary(),
    )


@scenario("all of a pilot's nodes are rebooted", nodes=3)
def nodes_are_rebooted(place: Place) -> TableRow:
    sweep = place.sweep(("ok_9", 3), ("ok", 3), *[("ok_1", 1)] * 3)
    sweep.start()
    sweep.wait_running("ok_9")
    for node in place.nodes:
        place.lab.crash_node(node)
    time.sleep(20)
    for node in place.nodes:
        place.lab.start_node(node)
    sweep.finish()
    rows = sweep.check()["ok_9"]
    assert [row["outcome"] for row in rows] == ["node_failure", "ok"], brief(rows)
    return TableRow("power loss of all three nodes at once, the pilot's own too, back after 20 s", sweep.summary())
