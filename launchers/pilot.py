"""A pilot: holds one allocation and runs point after point of one sweep's queue on its nodes.

``python -m launchers.pilot SWEEP_DIR PAYLOAD_ID`` reads what it needs from ``pilots/PAYLOAD_ID.json`` there, written
before it was started (by `launchers.local` as a child, by a scheduler on every node of an allocation). On the first
node it draws, watches and writes rows; an agent on each node forks the ranks (`launchers.agent`). Points as wide as the
allocation run alone; when none of those is left, smaller ones run side by side. SIGINT means cancel, SIGTERM and
SIGUSR2 mean that the allocation ends: either way what runs gets its row and waits again for the next pilot.
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

from launchers import drawing, pilotstate, queue, rows
from launchers.agent import run_agent
from launchers.allocation import Allocation, allocation_of
from launchers.attempt import start_attempt
from launchers.crew import Crew, NoNodes, gather_here
from launchers.drawing import Drawing
from launchers.identity import own_identity
from launchers.nodes import Hub, Node, NodeLost, join, read_meeting
from launchers.outcome import StopReason
from launchers.payload import Payload, read_payload
from launchers.pilotstate import Activity, Liveness, PilotState
from launchers.queue import Claim
from launchers.scheduler import SlurmClient
from launchers.settle import Settler
from launchers.slots import Slot
from launchers.spawn import RunRank
from launchers.sweepdir import SweepDir, entry_names
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
MEETING_LIMIT_S = 300.0
_PORT_LIMIT_S = 30.0


class Pilot:
    """The running state of one pilot."""

    def __init__(
        self,
        sweep: SweepDir,
        allocation: Allocation,
        payload: Payload,
        crew: Crew,
        wake: threading.Event,
        provenance: Mapping[str, Any],
    ) -> None:
        self.sweep = sweep
        self.pilot_id = allocation.pilot_id
        self.settings = payload.settings
        self._allocation = allocation
        self._scheduled = payload.scheduler != "none"
        self._tethered = payload.tethered
        self._crew = crew
        self._wake = wake
        self._started_at = time.time()
        self._ends_at = time.monotonic() + payload.wall_time_s if payload.wall_time_s is not None else None
        surroundings = rows.Surroundings(
            sweep=sweep.name,
            launcher=self.settings.launcher,
            cluster=self.settings.cluster,
            provenance=provenance,
            pilot_id=self.pilot_id,
            job=allocation.job,
        )
        self._settler = Settler(sweep, self.pilot_id, self.settings, surroundings, self.say, self._pause)
        self._drawing = Drawing(sweep, self.pilot_id, self.settings, self.say)
        self._liveness = Liveness(sweep, self.settings.lease_s)
        self._identity = own_identity()
        self._slots: list[Slot] = []
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
            self._settle_finished()
            if not self._may_draw():
                if not self._slots:
                    break
            elif self._draw_one():
                continue
            elif not self._slots and not self._wait_for_others():
                break
            self._wake.wait(0.02 if self._slots else 0.0)
            self._wake.clear()
        self._message = self._message or self._drawing.held_message()
        self._beat("stopping")
        self._settler.compact()
        self._beat("ended", message=self._trouble or self._message)
        if self.stop_reason() is not None:
            self._come_back()
            return STOPPED
        if not self._scheduled and self._crew.lost_all:
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

        self._say_left_out(self._crew.gather(meanwhile))

    def _say_left_out(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)
        if self._crew.size == 0 and not self._trouble:
            where = "no node of this allocation can be used: " if self._scheduled else ""
            self._give_up(f"{where}{self._crew.left_out_told}")

    def _may_draw(self) -> bool:
        return self.stop_reason() is None and not self._trouble

    def _draw_one(self) -> bool:
        """Start one more point, if there is one for the nodes that are free."""
        free = self._crew.free()
        if not free or (self._slots and time.monotonic() < self._next_look):
            return False
        left_s = self._ends_at - time.monotonic() if self._ends_at is not None else None
        claim = self._drawing.draw(len(free), self._crew.size, left_s, [slot.claim.point for slot in self._slots])
        if claim is None:
            self._next_look = time.monotonic() + LOOK_AGAIN_S
            return False
        self._activity = "running"
        nodes = self._drawing.places(claim, free)
        if (slot := self._begin(claim, nodes)) is None:
            queue.hand_back(claim)
        else:
            self._crew.take(nodes)
            self._slots.append(slot)
            self._beat("running")
        return True

    def _begin(self, claim: Claim, nodes: list[Node]) -> Slot | None:
        point = claim.point
        width = drawing.devices_used(point, self.settings)
        try:
            port = nodes[0].request("port", _PORT_LIMIT_S)["port"]
        except (NodeLost, KeyError) as error:
            self.say(f"{claim.stem} waits again: {error}")
            self._say_left_out(self._crew.leave_out_gone())
            return None
        ids = None
        if nodes[0].device_ids is not None:
            ids = tuple(device for node in nodes for device in (node.device_ids or ())[:width])
        number = len(queue.history(self.sweep, claim.stem)) + 1
        attempt = self._settler.until_written(
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
        return Slot(claim, attempt, nodes, width, self.settings, self.sweep.stages, self.stop_reason, self._wake)

    def _settle_finished(self) -> None:
        for slot in [slot for slot in self._slots if slot.finished]:
            self._settle(slot)
            self._slots.remove(slot)
            self._next_look = 0.0
            self._crew.give_back(slot.nodes)
            self._beat("running")

    def _settle(self, slot: Slot) -> None:
        done = slot.done
        assert done is not None
        measured = slot.claim.point.method == "measured"
        before = [self._last_step_ends.pop(node.name, None) for node in slot.nodes]
        first, gap_s = rows.first_step_at(done.results), None
        ends = [end for end in before if end is not None]
        if measured and first is not None and len(ends) == len(before):
            gap_s = first - max(ends)
        if measured and done.outcome.outcome == "ok" and (last := rows.last_step_end(done.results)) is not None:
            self._last_step_ends |= dict.fromkeys((node.name for node in slot.nodes), last)
        settled = self._settler.settle(
            slot.claim,
            slot.attempt,
            done,
            ended_at=slot.ended_at,
            gap_s=gap_s,
            still_held="; ".join(slot.held.values()) or None,
        )
        if not settled:
            self._give_up(f"the row of {slot.attempt.attempt_id} is not written; the next run will write it")
            return
        self._finished[done.outcome.outcome] += 1
        self._say_left_out(
            [
                *self._crew.leave_out_gone(),
                *(line for node, why in slot.unclean().items() for line in self._crew.leave_out(node, why)),
                *self._crew.leave_out_failing(self._drawing.records(), slot.nodes),
            ]
        )

    def _come_back(self) -> None:
        """Ended by a preemption or its time limit with points left: Slurm shall start this pilot again, whether or not
        somebody watches the sweep."""
        job = self._allocation.job
        if job is None or self.stop_reason() != "preempted" or not entry_names(self.sweep.todo):
            return
        if self._allocation.restarts >= FRUITLESS_RESTARTS and not set(self._finished) - {"preempted"}:
            self.say(f"job {job} is not queued again: it was ended {self._allocation.restarts + 1} times in a row")
            return
        if SlurmClient().requeue(job):
            self.say(f"job {job} is queued again: points are left")

    def _wait_for_others(self) -> bool:
        """Nothing can be drawn. Take over what dead pilots held; True when there may be something to draw."""
        self._last_step_ends.clear()  # waiting for another pilot is no overhead of the next point
        claims = queue.claims_of_others(self.sweep, self.pilot_id)
        verdicts = {holder: self._liveness.judge(holder) for holder in {holder for _, holder in claims}}
        dead = [(stem, holder) for stem, holder in claims if verdicts[holder] == "dead"]
        for stem, holder in dead:
            if not self._settler.take_over(stem, holder):
                self._message = f"the row of a dead pilot's point {stem} cannot be written"
                return False
        if dead:
            return True
        if self._drawing.waits_for_canary:
            self._activity = "waiting"
            return self._pause(0.5, "the first point of this shape runs elsewhere; the others wait for it")
        if "unknown" not in verdicts.values():
            return False
        # A living pilot will finish its own points; one whose count never moves is dead when its lease is over.
        self._activity = "waiting"
        return self._pause(0.2)

    def _tick(self) -> None:
        if self._stop is None and self._tethered and _closed(0):
            self._stop = "cancelled"
        shown = [(slot.attempt.attempt_id, slot.progress) for slot in self._slots]
        if shown != self._shown or time.monotonic() >= self._next_beat:
            self._shown = shown
            self._beat("running" if self._slots else self._activity, self._message)

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
            running=tuple(slot.running() for slot in self._slots),
            finished=dict(self._finished),
            job=self._allocation.job,
            nodes=self._crew.names,
        )
        # A full disk must not end the pilot; if it lasts, others will take the claim over and the rows will tell.
        with contextlib.suppress(OSError):
            pilotstate.write_state(self.sweep, state)

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


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None) -> int:
    """Run one pilot, or the agent of one of its nodes. ``run_rank`` is the workload; the engine's own unless a test
    brings another."""
    parser = argparse.ArgumentParser(
        prog="python -m launchers.pilot", description="Run the points of one sweep's queue."
    )
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("payload_id")
    arguments = parser.parse_args(argv)
    try:
        sweep = SweepDir.open(arguments.sweep_dir)
        payload = read_payload(pilotstate.payload_path(sweep, arguments.payload_id))
        allocation = allocation_of(payload, arguments.payload_id)
        meeting = sweep.pilots / f"{allocation.pilot_id}.meeting.json"
        if not allocation.is_head:
            connection = join(read_meeting(meeting, MEETING_LIMIT_S), allocation.node, MEETING_LIMIT_S)
            run_agent(connection, payload.settings, allocation.node, run_rank)
        provenance = _provenance(payload)
        wake = threading.Event()
        crew = gather_here(sweep, allocation, payload, run_rank, meeting, Hub(wake))
    except UltrasweepError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return Pilot(sweep, allocation, payload, crew, wake, provenance).run()
    finally:
        crew.dismiss()
        meeting.unlink(missing_ok=True)


def _provenance(payload: Payload) -> dict[str, Any]:
    from results import provenance

    root = Path(__file__).resolve().parent.parent
    code = payload.provenance if payload.provenance is not None else provenance.code_provenance(root)
    return {**code, "python_version": provenance.python_version(), "command": payload.command}


if __name__ == "__main__":
    sys.exit(main())
