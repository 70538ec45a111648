"""A pilot: holds one allocation and runs point after point of one sweep's queue on its nodes.

On the first node of the allocation the pilot claims points, watches their attempts and writes rows; an agent on each
node forks the ranks (`launchers.node.agent`). Points as wide as the allocation run alone. When none of those is left,
smaller points run side by side. SIGINT means cancel; SIGTERM and SIGUSR2 mean that the allocation ends. In both cases
the running points get their rows and wait for the next pilot.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launchers.attempt import rows
from launchers.attempt.attempt import new_attempt_id, start_attempt
from launchers.attempt.outcome import StopReason
from launchers.node.connection import NodeLost
from launchers.node.ports import NoFreePort
from launchers.node.remote import Node
from launchers.pilot.allocation import Allocation
from launchers.pilot.allocation_end import AllocationEnd
from launchers.pilot.attempt_thread import AttemptThread
from launchers.pilot.batch_system import BatchSystem
from launchers.pilot.dead_pilots import DeadPilots
from launchers.pilot.node_check import CheckFailed, Rates, check_nodes, rates_of, slow_nodes
from launchers.pilot.node_pool import NodePool, NoNodes
from launchers.pilot.patience import Patience
from launchers.pilot.recorder import AttemptRecorder
from launchers.pilot.requeue import JobRequeue
from launchers.pilot.scheduling import Scheduler
from launchers.pilot.state_writer import StateWriter
from launchers.pilot.step_gaps import StepGaps
from launchers.pilot.stop_request import StopRequest
from launchers.state import queue, requirements
from launchers.state.history import HistoryReader
from launchers.state.node_exclusions import LOST_FOR_S
from launchers.state.pilot_config import PilotConfig
from launchers.state.pilot_state import Liveness
from launchers.state.queue import Claim
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.patience import failed_steps
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS
from results.text.numbers import plural

FINISHED, STOPPED, TROUBLE = 0, 3, 4
"""Exit statuses: no fitting point is left; stopped by a signal; stopped by a fault of the machine (see the state's
message)."""

_DIED = 1
CLAIM_AGAIN_S = 0.5
"""Seconds until the next try when points run and no further point could be claimed. A point that ends shortens the
pause."""
_WAIT_S = 0.5
"""Seconds between two checks of the queue while other pilots run the remaining points."""
QUEUE_LIMIT_S = 900.0
"""Seconds without any progress that a pilot waits for a filesystem on which the queue cannot be read. Rows of measured
points have no such limit."""


class Pilot:
    """One pilot from its first claim to its end. Call `run` once."""

    def __init__(
        self,
        sweep: SweepDir,
        allocation: Allocation,
        config: PilotConfig,
        pool: NodePool,
        wake: threading.Event,
        provenance: Mapping[str, Any],
        batch: BatchSystem | None = None,
    ) -> None:
        self.sweep = sweep
        self.pilot_id = allocation.pilot_id
        self.settings = config.settings
        self._scheduled = config.batch_system != "none"
        self._pool = pool
        self._wake = wake
        self._end = AllocationEnd(
            config.wall_time_s,
            allocation.age_s,
            config.reserve_s,
            (lambda: batch.seconds_left(allocation)) if batch is not None else None,
            self.log,
        )
        context = rows.RunContext(
            sweep=sweep.name,
            launcher=self.settings.launcher,
            cluster=self.settings.cluster,
            provenance=provenance,
            pilot_id=self.pilot_id,
            job=allocation.job,
        )
        self._patience = Patience(sweep, self.log, self._pause)
        self._records = HistoryReader(sweep)
        self._recorder = AttemptRecorder(
            sweep, self.pilot_id, self.settings, context, self._records, self.log, self._patience
        )
        self._dead_pilots = DeadPilots(sweep, self.pilot_id, self._records, self._recorder, self.log)
        self._scheduler = Scheduler(sweep, self.pilot_id, self.settings, self._records, self.log)
        self._requeue = JobRequeue(sweep, allocation, batch, self._scheduler, config.wall_time_s, self.log)
        self._liveness = Liveness(sweep, self.settings.lease_s)
        self._threads: list[AttemptThread] = []
        self._state = StateWriter(sweep, allocation, pool, self._threads)
        self._stop = StopRequest(wake, stop_with_parent=config.stop_with_parent)
        self._trouble = ""
        """Why no further point is started; empty while points may start."""
        self._claim_again_at = 0.0
        self._idle_since: float | None = None
        """Monotonic time since which there is no point to run; None: a point runs, or the queue has not been checked
        yet."""
        self._checks: dict[str, Rates] = {}
        self._gaps = StepGaps()
        self._failed_before = failed_steps.count

    def run(self) -> int:
        """Claim and run points until no fitting point is left. Returns the exit status."""
        self._stop.listen()
        try:
            self._wait_for_agents()
        except NoNodes as error:
            print(error, file=sys.stderr)
            self._state.write("ended", message=str(error))
            if self.stop_reason() is not None:  # the wait for agents was cut short
                self._requeue.ask_if_needed(self.stop_reason(), self._state.finished)
                return STOPPED
            return TROUBLE if self._scheduled else 2
        self._check_nodes()
        while True:
            self._tick()
            self._record_finished()
            if self.stop_reason() is not None or self._trouble:
                if not self._threads:
                    break
            elif self._on_queue(self._start_one):
                continue
            elif not self._threads and not self._on_queue(self._wait_for_others) and not self._linger():
                break
            self._wake.wait(0.02 if self._threads else 0.0)
            self._wake.clear()
        message = self._state.message or self._scheduler.why_waiting()
        self._state.write("stopping")
        self._recorder.compact()
        if failed := failed_steps.count - self._failed_before:
            self.log(
                f"{plural(failed, 'step')} on shared files had to be repeated; the last error: {failed_steps.last}"
            )
        self._state.write("ended", message=self._trouble or message)
        if self.stop_reason() is not None:
            self._requeue.ask_if_needed(self.stop_reason(), self._state.finished)
            return STOPPED
        if not self._trouble:
            self._requeue.ask_if_needed(self.stop_reason(), self._state.finished)
        if not self._scheduled and self._pool.lost_all:
            return _DIED  # as if the pilot had died with its agent: the process that started the pilot starts another
        return TROUBLE if self._trouble else FINISHED

    def log(self, line: str) -> None:
        """Print one line for the pilot's log, with the time of day."""
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def stop_reason(self) -> StopReason | None:
        """Why this pilot must stop; None while it may continue."""
        return self._stop.reason

    def _wait_for_agents(self) -> None:
        self._state.write("starting")
        # Arrow imports more modules with its first table: do it now, not between two points
        table_from_rows([], ATTEMPTS)

        def meanwhile() -> bool:
            self._tick()
            return self.stop_reason() is None

        self._report_excluded(self._pool.wait_for_agents(meanwhile))
        usable, expected = self._pool.size, self._pool.expected
        if 0 < usable < expected and self._patience.until_done(
            lambda: self._scheduler.waiting_for(usable + 1, expected) > 0,
            "read the queue",
            limit_s=QUEUE_LIMIT_S,
            progress=self._queue_progress,
        ):
            # Pilots for the narrower points are submitted too. While this pilot lives, no other takes its place.
            why = self._pool.exclusion_summary
            self._give_up(f"only {usable} of {expected} nodes can be used, and wider points wait: {why}")

    def _check_nodes(self) -> None:
        """Measure the speed of the nodes. A failure costs only these numbers, never a point."""
        if not self.settings.checks_nodes or not self._requeue.points_wait():
            return
        self._state.message = "measuring the speed of the nodes"
        self._state.write("starting", self._state.message)
        try:
            self._checks = check_nodes(
                self.sweep,
                self.pilot_id,
                self.settings,
                self._pool.free(),
                lambda: self.stop_reason() is not None,
                self._tick,
            )
            slow = slow_nodes(self.sweep, self._checks)
        except (CheckFailed, OSError, ValueError, TypeError, KeyError) as error:
            self.log(f"the nodes were not checked: {error}")
            slow = {}
        for node, why in slow.items():
            self.log(f"warning: node {node} is {why}")
            if self.settings.exclude_slow_nodes:
                self._report_excluded(self._pool.exclude(node, why))
        self._state.message = ""
        self._report_excluded(self._pool.exclude_lost())

    def _report_excluded(self, lines: list[str]) -> None:
        for line in lines:
            self.log(line)
        if self._pool.size == 0 and not self._trouble:
            where = "no node of this allocation can be used: " if self._scheduled else ""
            self._give_up(f"{where}{self._pool.exclusion_summary}")

    def _on_queue(self, step: Callable[[], bool]) -> bool:
        """Run ``step``, which reads the queue and moves points in it. After a filesystem error, first finish the work
        begun before the error, then run ``step`` again.

        Returns True also after such an error, since points may wait again; False also when the pilot has to give up.
        """
        failed = False

        def whole() -> bool:
            nonlocal failed
            if failed and not self._dead_pilots.resume({thread.claim.stem for thread in self._threads}):
                return False
            try:
                return step() or failed
            except OSError:
                failed = True
                raise

        if self._trouble:
            return False
        done = self._patience.until_done(
            whole, "read or move the points of the queue", limit_s=QUEUE_LIMIT_S, progress=self._queue_progress
        )
        if done is None and self.stop_reason() is None:
            self._give_up(self._patience.failure)
        return bool(done)

    def _queue_progress(self) -> object:
        """Changes when a step that fails later has read a file or settled a claim, which the next call keeps."""
        return self._scheduler.files_read, self._dead_pilots.taken_over

    def _start_one(self) -> bool:
        """Start one more point if a waiting one fits the free nodes. Returns whether a point was claimed."""
        free = self._pool.free()
        if not free or (self._threads and time.monotonic() < self._claim_again_at):
            return False
        claim = self._scheduler.claim_next(
            len(free), self._pool.usable, self._end.left_s(), [thread.claim.point for thread in self._threads]
        )
        if claim is None:
            self._claim_again_at = time.monotonic() + CLAIM_AGAIN_S
            return False
        self._state.activity = "running"
        self._idle_since = None
        nodes = self._scheduler.choose_nodes(claim, free)
        if (thread := self._begin(claim, nodes)) is None:
            queue.release(claim)
        else:
            self._pool.mark_busy(nodes)
            self._threads.append(thread)
            self._state.write("running")
        return True

    def _begin(self, claim: Claim, nodes: list[Node]) -> AttemptThread | None:
        point = claim.point
        width = requirements.devices_used(point, self.settings)
        try:
            port = nodes[0].reserve_port()
        except (NodeLost, NoFreePort) as error:
            self.log(f"{claim.stem} waits again: {error}")
            if isinstance(error, NoFreePort):
                self._report_excluded(self._pool.exclude(nodes[0].name, str(error), for_s=LOST_FOR_S))
            self._report_excluded(self._pool.exclude_lost())
            return None
        ids = None
        if nodes[0].device_ids is not None:
            ids = tuple(device for node in nodes for device in (node.device_ids or ())[:width])
        number = len(self._records.of(claim.stem)) + 1
        attempt_id = new_attempt_id(point, number)
        attempt = self._patience.until_done(
            lambda: start_attempt(
                claim,
                attempt_id,
                number,
                self.settings,
                host=nodes[0].address,
                port=port,
                device_ids=ids,
                nodes=tuple(node.name for node in nodes),
                node_check=rates_of(self._checks, [node.name for node in nodes]),
            ),
            f"write the task of {claim.stem}",
        )
        if attempt is None:
            self._give_up(f"{self._patience.failure}; {claim.stem} waits again")
            return None
        return AttemptThread(
            claim, attempt, nodes, width, self.settings, self.sweep.stages, self.stop_reason, self._wake
        )

    def _record_finished(self) -> None:
        for thread in [thread for thread in self._threads if thread.finished]:
            self._record_attempt(thread)
            self._threads.remove(thread)
            self._claim_again_at = 0.0
            self._pool.mark_free(thread.nodes)

    def _record_attempt(self, thread: AttemptThread) -> None:
        done = thread.done
        assert done is not None
        gap_s = self._gaps.gap_s(thread.attempt, done.results, succeeded=done.outcome.outcome == "ok")
        recorded = self._recorder.record(
            thread.claim,
            thread.attempt,
            done,
            ended_at=thread.ended_at,
            gap_s=gap_s,
            still_held="; ".join(thread.held.values()) or None,
        )
        if not recorded:
            why = self._patience.failure or "stopped"
            self._give_up(f"the row of {thread.attempt.attempt_id} is not written ({why}); the next run writes it")
            return
        self._state.finished[done.outcome.outcome] += 1
        self._report_excluded(
            [
                *self._pool.exclude_lost(),
                *self._pool.exclude_unclean(thread.unclean(), len(thread.nodes)),
                *self._pool.exclude_failing(self._records.all(), thread.nodes),
            ]
        )

    def _wait_for_others(self) -> bool:
        """Called when no point could be claimed: take over the claims of dead pilots. True when a claim may succeed
        now."""
        self._gaps.forget()  # time spent waiting for another pilot is not overhead of the next point
        claims = queue.claims_of_others(self.sweep, self.pilot_id)
        verdicts = {holder: self._liveness.judge(holder) for holder in {holder for _, holder in claims}}
        dead = [(stem, holder) for stem, holder in claims if verdicts[holder] == "dead"]
        for stem, holder in dead:
            if not self._dead_pilots.take_over(stem, holder):
                self._state.message = f"the row of a dead pilot's point {stem} cannot be written"
                return False
        if dead:
            return True
        if self._scheduler.waits_for_canary:
            self._state.activity = "waiting"
            return self._pause(_WAIT_S, "the first point of this shape runs elsewhere; the others wait for it")
        if "unknown" not in verdicts.values():
            return False
        # A living pilot finishes its own points. A pilot whose count stays the same is dead when its lease is over.
        self._state.activity = "waiting"
        return self._pause(_WAIT_S)

    def _linger(self) -> bool:
        """Wait briefly for new points; False when ``linger_s`` is over."""
        if self._trouble or self.stop_reason() is not None:
            return False
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now - self._idle_since >= self.settings.linger_s:
            return False
        self._state.activity = "waiting"
        return self._pause(_WAIT_S)

    def _tick(self) -> None:
        self._stop.check_parent()
        self._state.write_if_due()

    def _pause(self, seconds: float, message: str = "") -> bool:
        """Sleep and keep writing the state file; returns False, early, when the pilot must stop."""
        until = time.monotonic() + seconds
        before, self._state.message = self._state.message, message
        if message != before:
            self._state.write(self._state.activity, message)
        while (left := until - time.monotonic()) > 0 and self.stop_reason() is None:
            self._tick()
            time.sleep(min(left, 0.05))
        return self.stop_reason() is None

    def _give_up(self, message: str) -> None:
        self.log(f"stopping: {message}")
        self._trouble = self._trouble or message
