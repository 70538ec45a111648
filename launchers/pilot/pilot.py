"""A pilot: holds one allocation and runs point after point of one sweep's queue on its nodes.

``python -m launchers.pilot SWEEP_DIR CONFIG_ID`` reads what it needs from ``pilots/CONFIG_ID.json`` there, written
before it was started (by `launchers.local` as a child, by Slurm on every node of an allocation). On the first node it
claims points, watches them and writes rows; an agent on each node forks the ranks (`launchers.node.agent`). Points as
wide as the allocation run alone; when none of those is left, smaller ones run side by side. SIGINT means cancel;
SIGTERM and SIGUSR2 mean that the allocation ends. Either way what runs gets its row and waits for the next pilot.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launchers.attempt import rows
from launchers.attempt.attempt import start_attempt
from launchers.attempt.outcome import StopReason
from launchers.node.agent import run_agent
from launchers.node.connection import NodeLost, join, read_head_address
from launchers.node.fork import RunRank
from launchers.node.remote import Node
from launchers.pilot.agent_server import AgentServer
from launchers.pilot.allocation import Allocation, allocation_of
from launchers.pilot.attempt_thread import AttemptThread
from launchers.pilot.node_pool import NodePool, NoNodes, start_pool
from launchers.pilot.recorder import AttemptRecorder
from launchers.pilot.scheduling import Scheduler
from launchers.state import history, pilot_state, queue, requirements
from launchers.state.code_snapshot import code_root
from launchers.state.pilot_config import PilotConfig, read_pilot_config
from launchers.state.pilot_state import Activity, Liveness, PilotState
from launchers.state.process_identity import own_identity
from launchers.state.queue import Claim
from launchers.state.sweep_dir import SweepDir, entry_names
from results.errors import UltrasweepError
from results.rows import table_from_rows
from results.schema import ATTEMPTS

FINISHED, STOPPED, TROUBLE = 0, 3, 4
"""Exit statuses: nothing left to draw; stopped by a signal; stopped by the machine (see the state's message)."""

_DIED = 1
BEAT_S = 1.0
FRUITLESS_RESTARTS = 3
"""A pilot that has been started again so often, and is ended once more before it has finished a point, stays away."""
LOOK_AGAIN_S = 0.5
"""While points run and nothing could be drawn beside them; a point that ends is a reason to look at once."""
HEAD_LIMIT_S = 300.0
_PORT_LIMIT_S = 30.0


RequeueJob = Callable[[str], bool]
"""Have the batch system start this job again later; False when it does not. By the job's id as ``squeue`` prints it."""


class Pilot:
    """The running state of one pilot."""

    def __init__(
        self,
        sweep: SweepDir,
        allocation: Allocation,
        config: PilotConfig,
        pool: NodePool,
        wake: threading.Event,
        provenance: Mapping[str, Any],
        requeue_job: RequeueJob | None = None,
    ) -> None:
        self.sweep = sweep
        self.pilot_id = allocation.pilot_id
        self.settings = config.settings
        self._allocation = allocation
        self._scheduled = config.scheduler != "none"
        self._stop_with_parent = config.stop_with_parent
        self._pool = pool
        self._wake = wake
        self._requeue_job = requeue_job
        self._started_at = time.time()
        self._ends_at = time.monotonic() + config.wall_time_s if config.wall_time_s is not None else None
        context = rows.RunContext(
            sweep=sweep.name,
            launcher=self.settings.launcher,
            cluster=self.settings.cluster,
            provenance=provenance,
            pilot_id=self.pilot_id,
            job=allocation.job,
        )
        self._recorder = AttemptRecorder(sweep, self.pilot_id, self.settings, context, self.say, self._pause)
        self._scheduler = Scheduler(sweep, self.pilot_id, self.settings, self.say)
        self._liveness = Liveness(sweep, self.settings.lease_s)
        self._identity = own_identity()
        self._threads: list[AttemptThread] = []
        self._stop: StopReason | None = None
        self._trouble = ""
        """Why nothing more is drawn, once that is so."""
        self._activity: Activity = "starting"
        self._message = ""
        self._finished: Counter[str] = Counter()
        self._count = 0
        self._next_beat = 0.0
        self._next_look = 0.0
        self._shown: object = None
        self._last_step_ends: dict[str, float] = {}
        """By node: of the point just before the next one there, if it got that far."""

    def run(self) -> int:
        """Draw and run until nothing is left that fits; the exit status."""
        self._listen()
        try:
            self._gather()
        except NoNodes as error:
            print(error, file=sys.stderr)
            self._beat("ended", message=str(error))
            return TROUBLE if self._scheduled else 2
        while True:
            self._tick()
            self._record_finished()
            if not self._may_draw():
                if not self._threads:
                    break
            elif self._draw_one():
                continue
            elif not self._threads and not self._wait_for_others():
                break
            self._wake.wait(0.02 if self._threads else 0.0)
            self._wake.clear()
        self._message = self._message or self._scheduler.paused_message()
        self._beat("stopping")
        self._recorder.compact()
        self._beat("ended", message=self._trouble or self._message)
        if self.stop_reason() is not None:
            self._requeue_own_job()
            return STOPPED
        if not self._scheduled and self._pool.lost_all:
            return _DIED  # as if the pilot had died with its agent: whoever started it starts another
        return TROUBLE if self._trouble else FINISHED

    def say(self, line: str) -> None:
        """One line for the log."""
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def stop_reason(self) -> StopReason | None:
        """Why this pilot should end, once it should."""
        return self._stop

    def _gather(self) -> None:
        self._beat("starting")
        table_from_rows([], ATTEMPTS)  # Arrow imports more at its first table: now, not between two points

        def meanwhile() -> bool:
            self._tick()
            return self.stop_reason() is None

        self._report_excluded(self._pool.wait_for_agents(meanwhile))

    def _report_excluded(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)
        if self._pool.size == 0 and not self._trouble:
            where = "no node of this allocation can be used: " if self._scheduled else ""
            self._give_up(f"{where}{self._pool.exclusion_summary}")

    def _may_draw(self) -> bool:
        return self.stop_reason() is None and not self._trouble

    def _draw_one(self) -> bool:
        """Start one more point, if there is one for the nodes that are free."""
        free = self._pool.free()
        if not free or (self._threads and time.monotonic() < self._next_look):
            return False
        left_s = self._ends_at - time.monotonic() if self._ends_at is not None else None
        claim = self._scheduler.claim_next(
            len(free), self._pool.size, left_s, [thread.claim.point for thread in self._threads]
        )
        if claim is None:
            self._next_look = time.monotonic() + LOOK_AGAIN_S
            return False
        self._activity = "running"
        nodes = self._scheduler.choose_nodes(claim, free)
        if (thread := self._begin(claim, nodes)) is None:
            queue.release(claim)
        else:
            self._pool.mark_busy(nodes)
            self._threads.append(thread)
            self._beat("running")
        return True

    def _begin(self, claim: Claim, nodes: list[Node]) -> AttemptThread | None:
        point = claim.point
        width = requirements.devices_used(point, self.settings)
        try:
            port = nodes[0].request("port", _PORT_LIMIT_S)["port"]
        except (NodeLost, KeyError) as error:
            self.say(f"{claim.stem} waits again: {error}")
            self._report_excluded(self._pool.exclude_lost())
            return None
        ids = None
        if nodes[0].device_ids is not None:
            ids = tuple(device for node in nodes for device in (node.device_ids or ())[:width])
        number = len(history.records_of(self.sweep, claim.stem)) + 1
        attempt = self._recorder.until_written(
            lambda: start_attempt(
                claim,
                number,
                self.settings,
                host=nodes[0].address,
                port=port,
                device_ids=ids,
                nodes=tuple(node.name for node in nodes),
            ),
            f"the task of {claim.stem}",
        )
        if attempt is None:
            self._give_up(f"cannot write in {self.sweep.path}; {claim.stem} waits again")
            return None
        return AttemptThread(
            claim, attempt, nodes, width, self.settings, self.sweep.stages, self.stop_reason, self._wake
        )

    def _record_finished(self) -> None:
        for thread in [thread for thread in self._threads if thread.finished]:
            self._record_attempt(thread)
            self._threads.remove(thread)
            self._next_look = 0.0
            self._pool.mark_free(thread.nodes)
            self._beat("running")

    def _record_attempt(self, thread: AttemptThread) -> None:
        done = thread.done
        assert done is not None
        measured = thread.claim.point.method == "measured"
        before = [self._last_step_ends.pop(node.name, None) for node in thread.nodes]
        first, gap_s = rows.first_step_at(done.results), None
        ends = [end for end in before if end is not None]
        if measured and first is not None and len(ends) == len(before):
            gap_s = first - max(ends)
        if measured and done.outcome.outcome == "ok" and (last := rows.last_step_end(done.results)) is not None:
            self._last_step_ends |= dict.fromkeys((node.name for node in thread.nodes), last)
        settled = self._recorder.record(
            thread.claim,
            thread.attempt,
            done,
            ended_at=thread.ended_at,
            gap_s=gap_s,
            still_held="; ".join(thread.held.values()) or None,
        )
        if not settled:
            self._give_up(f"the row of {thread.attempt.attempt_id} is not written; the next run will write it")
            return
        self._finished[done.outcome.outcome] += 1
        self._report_excluded(
            [
                *self._pool.exclude_lost(),
                *(line for node, why in thread.unclean().items() for line in self._pool.exclude(node, why)),
                *self._pool.exclude_failing(self._scheduler.records(), thread.nodes),
            ]
        )

    def _requeue_own_job(self) -> None:
        """Ended by a preemption or its time limit with points left: Slurm shall start this pilot again, whether or not
        somebody watches the sweep."""
        job = self._allocation.job
        requeue = self._requeue_job
        if job is None or requeue is None or self.stop_reason() != "preempted" or not entry_names(self.sweep.todo):
            return
        if self._allocation.restarts >= FRUITLESS_RESTARTS and not set(self._finished) - {"preempted"}:
            self.say(f"job {job} is not queued again: it was ended {self._allocation.restarts + 1} times in a row")
            return
        if requeue(job):
            self.say(f"job {job} is queued again: points are left")

    def _wait_for_others(self) -> bool:
        """Nothing can be drawn. Take over what dead pilots held; True when there may be something to draw."""
        self._last_step_ends.clear()  # waiting for another pilot is no overhead of the next point
        claims = queue.claims_of_others(self.sweep, self.pilot_id)
        verdicts = {holder: self._liveness.judge(holder) for holder in {holder for _, holder in claims}}
        dead = [(stem, holder) for stem, holder in claims if verdicts[holder] == "dead"]
        for stem, holder in dead:
            if not self._recorder.take_over(stem, holder):
                self._message = f"the row of a dead pilot's point {stem} cannot be written"
                return False
        if dead:
            return True
        if self._scheduler.waits_for_canary:
            self._activity = "waiting"
            return self._pause(0.5, "the first point of this shape runs elsewhere; the others wait for it")
        if "unknown" not in verdicts.values():
            return False
        # A living pilot will finish its own points; one whose count never moves is dead when its lease is over.
        self._activity = "waiting"
        return self._pause(0.2)

    def _tick(self) -> None:
        if self._stop is None and self._stop_with_parent and _closed(0):
            self._stop = "cancelled"
        shown = [(thread.attempt.attempt_id, thread.progress) for thread in self._threads]
        if shown != self._shown or time.monotonic() >= self._next_beat:
            self._shown = shown
            self._beat("running" if self._threads else self._activity, self._message)

    def _beat(self, activity: Activity, message: str = "") -> None:
        self._activity, self._count = activity, self._count + 1
        self._next_beat = time.monotonic() + BEAT_S
        state = PilotState(
            pilot_id=self.pilot_id,
            identity=self._identity,
            count=self._count,
            time=time.time(),
            started_at=self._started_at,
            activity=activity,
            message=message,
            running=tuple(thread.running() for thread in self._threads),
            finished=dict(self._finished),
            job=self._allocation.job,
            nodes=self._pool.names,
        )
        # A full disk must not end the pilot; if it lasts, others will take the claim over and the rows will tell.
        with contextlib.suppress(OSError):
            pilot_state.write_state(self.sweep, state)

    def _pause(self, seconds: float, message: str = "") -> bool:
        """Sleep, but go on beating; False, and early, when the pilot should stop."""
        until = time.monotonic() + seconds
        self._message, before = message, self._message
        if message != before:
            self._beat(self._activity, message)
        while (left := until - time.monotonic()) > 0 and self.stop_reason() is None:
            self._tick()
            time.sleep(min(left, 0.05))
        return self.stop_reason() is None

    def _give_up(self, message: str) -> None:
        self.say(f"stopping: {message}")
        self._trouble = self._trouble or message

    def _listen(self) -> None:
        def asked(reason: StopReason) -> Callable[[int, object], None]:
            def handler(_number: int, _frame: object) -> None:
                self._stop = self._stop or reason
                self._wake.set()

            return handler

        signal.signal(signal.SIGINT, asked("cancelled"))
        signal.signal(signal.SIGTERM, asked("preempted"))
        signal.signal(signal.SIGUSR2, asked("preempted"))


def _closed(descriptor: int) -> bool:
    """Whether the other end of a pipe is gone."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 1024) == b""


def main(
    argv: list[str] | None = None, *, run_rank: RunRank | None = None, requeue_job: RequeueJob | None = None
) -> int:
    """Run one pilot, or the agent of one of its nodes. ``run_rank`` is the workload; the engine's own unless a test
    brings another."""
    parser = argparse.ArgumentParser(
        prog="python -m launchers.pilot", description="Run the points of one sweep's queue."
    )
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("config_id")
    arguments = parser.parse_args(argv)
    try:
        sweep = SweepDir.open(arguments.sweep_dir)
        config = read_pilot_config(pilot_state.config_path(sweep, arguments.config_id))
        allocation = allocation_of(config, arguments.config_id)
        head_address = sweep.pilots / f"{allocation.pilot_id}.head.json"
        if not allocation.is_head:
            connection = join(read_head_address(head_address, HEAD_LIMIT_S), allocation.node, HEAD_LIMIT_S)
            run_agent(connection, config.settings, allocation.node, run_rank)
        provenance = _provenance(config)
        wake = threading.Event()
        pool = start_pool(sweep, allocation, config, run_rank, head_address, AgentServer(wake))
    except UltrasweepError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return Pilot(sweep, allocation, config, pool, wake, provenance, requeue_job).run()
    finally:
        pool.close()
        head_address.unlink(missing_ok=True)


def _provenance(config: PilotConfig) -> dict[str, Any]:
    from results import provenance

    code = config.provenance if config.provenance is not None else provenance.code_provenance(code_root())
    return {**code, "python_version": provenance.python_version(), "command": config.command}
