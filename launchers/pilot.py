"""A pilot: holds the devices of one allocation and runs point after point of one sweep's queue on them.

``python -m launchers.pilot SWEEP_DIR PILOT_ID`` reads what it needs from ``pilots/PILOT_ID.json`` there, written
before it was started (by `launchers.local` as a child, by a scheduler on another machine). It stays single-threaded and
never touches CUDA, so that it may fork. SIGINT means cancel, SIGTERM and SIGUSR2 mean that the allocation ends: either
way the running point gets its row and waits again for the next pilot.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launchers import pilotstate, ports, queue, rows, spawn
from launchers.attempt import Attempt, start_attempt
from launchers.devices import Devices, open_devices
from launchers.execute import Control, execute, internal_error
from launchers.identity import own_identity
from launchers.outcome import StopReason
from launchers.payload import Payload, read_payload
from launchers.pilotstate import Activity, Liveness, PilotState, Running
from launchers.queue import Claim, Drawer
from launchers.settings import LaunchSettings
from launchers.settle import Settler
from launchers.spawn import RunRank
from launchers.sweepdir import Point, SweepDir
from launchers.watchdog import Progress
from results.errors import UltrasweepError
from results.rows import table_from_rows
from results.schema import ATTEMPTS
from workloads.stages import rehearsed_ranks

FINISHED, STOPPED, TROUBLE = 0, 3, 4
"""Exit statuses: nothing left to draw; stopped by a signal; stopped by the machine (see the state's message)."""

BEAT_S = 1.0
START_UP_S = 30.0
"""Allowance for start, build and warm-up when judging whether a point fits what is left of the wall time."""


class Pilot:
    """The running state of one pilot."""

    def __init__(
        self,
        sweep: SweepDir,
        pilot_id: str,
        payload: Payload,
        devices: Devices,
        run_rank: RunRank,
        provenance: Mapping[str, Any],
    ) -> None:
        self.sweep = sweep
        self.pilot_id = pilot_id
        self.settings = payload.settings
        self._tethered = payload.tethered
        self._devices = devices
        self._run_rank = run_rank
        self._started_at = time.time()
        self._ends_at = time.monotonic() + payload.wall_time_s if payload.wall_time_s is not None else None
        surroundings = rows.Surroundings(
            sweep=sweep.name, launcher=self.settings.launcher, cluster=self.settings.cluster, provenance=provenance
        )
        self._settler = Settler(sweep, pilot_id, self.settings, surroundings, self.say, self._pause)
        self._drawer = Drawer(sweep, pilot_id, self.say)
        self._liveness = Liveness(sweep, self.settings.lease_s)
        self._identity = own_identity()
        self._stop: StopReason | None = None
        self._activity: Activity = "starting"
        self._message = ""
        self._running: Running | None = None
        self._finished: Counter[str] = Counter()
        self._count = 0
        self._next_beat = 0.0
        self._last_step_end: float | None = None
        """Of the point just before the one that runs, if it got that far."""

    def run(self) -> int:
        """Draw and run until nothing is left that fits; the exit status."""
        self._listen()
        spawn.adopt_orphans()
        self._say_what_is_in_use()
        status = FINISHED
        while status == FINISHED:
            if self.stop_reason() is not None:
                status = STOPPED
                break
            claim = self._drawer.draw(self._accepts)
            if claim is not None:
                status = self._run_claim(claim)
            elif not self._wait_for_others():
                break
        if status == FINISHED and self.stop_reason() is not None:
            status = STOPPED
        self._beat("stopping")
        self._settler.compact()
        self._beat("ended", message=self._message)
        return status

    def say(self, line: str) -> None:
        """One line for the log."""
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def stop_reason(self) -> StopReason | None:
        """Why this pilot should end, once it should."""
        if self._stop is None and self._tethered and _closed(0):
            self._stop = "cancelled"
        return self._stop

    def _run_claim(self, claim: Claim) -> int:
        """Run one point from its claim to its row; `FINISHED`, or the exit status with which to end."""
        self._activity = "running"
        number = len(queue.history(self.sweep, claim.stem)) + 1
        width = self._width(claim.point)
        with ports.reserve_port() as port:
            attempt = self._settler.until_written(
                lambda: start_attempt(
                    claim,
                    number,
                    self.settings,
                    port=port,
                    device_ids=self._devices.ids[:width] if self._devices.ids is not None else None,
                ),
                f"the task of {claim.stem}",
            )
            if attempt is None:
                queue.hand_back(claim)
                return self._give_up(f"cannot write in {self.sweep.path}; {claim.stem} waits again")
            self._begin(claim, attempt)
            try:
                done = execute(attempt, self.settings, self._control(attempt, width), self.sweep.stages)
            except Exception as error:
                done = internal_error(error)
        held = self._all_free(width)
        ended_at = time.time()
        first, gap_s = rows.first_step_at(done.results), None
        if first is not None and self._last_step_end is not None:
            gap_s = first - self._last_step_end
        measured = claim.point.method == "measured"
        self._last_step_end = rows.last_step_end(done.results) if measured and done.outcome.outcome == "ok" else None
        settled = self._settler.settle(
            claim, attempt, done, ended_at=ended_at, gap_s=gap_s if measured else None, still_held=held
        )
        self._running = None
        if not settled:
            return self._give_up(f"the row of {attempt.attempt_id} is not written; the next run will write it")
        self._finished[done.outcome.outcome] += 1
        self._beat("running")
        if done.survivors:
            return self._give_up(
                f"processes {', '.join(map(str, done.survivors))} cannot be ended; this machine is unclean"
            )
        if held is not None:
            return self._give_up(f"device memory is not free: {held}")
        return FINISHED

    def _begin(self, claim: Claim, attempt: Attempt) -> None:
        self._running = Running(
            stem=claim.stem,
            attempt_id=attempt.attempt_id,
            experiment_id=claim.point.experiment.id,
            world_size=claim.point.experiment.world_size,
            started_at=attempt.started_at,
            deadline_s=self.settings.point_deadline_s or claim.point.deadline_s,
        )
        self._beat("running")

    def _control(self, attempt: Attempt, width: int) -> Control:
        visible = ",".join(attempt.device_ids) if attempt.device_ids is not None else ""
        return Control(
            run_rank=self._run_rank,
            environment={"CUDA_VISIBLE_DEVICES": visible},
            stop_reason=self.stop_reason,
            on_progress=self._on_progress,
            wait_until_free=lambda: self._all_free(width),
        )

    def _accepts(self, point: Point) -> bool:
        """Whether this pilot can run the point in what is left of its time."""
        if point.method != self.settings.method or self._width(point) > self.settings.num_devices:
            return False
        if self._ends_at is None:
            return True
        return _needed_s(point, self.settings) <= self._ends_at - time.monotonic()

    @staticmethod
    def _width(point: Point) -> int:
        """Devices that the point needs at a time."""
        return point.experiment.world_size if point.method == "measured" else 1

    def _wait_for_others(self) -> bool:
        """Nothing waits. Take over what dead pilots held; True when there may be something to draw."""
        self._last_step_end = None  # waiting for another pilot is no overhead of the next point
        claims = queue.claims_of_others(self.sweep, self.pilot_id)
        verdicts = {holder: self._liveness.judge(holder) for holder in {holder for _, holder in claims}}
        dead = [(stem, holder) for stem, holder in claims if verdicts[holder] == "dead"]
        for stem, holder in dead:
            if not self._settler.take_over(stem, holder):
                self._message = f"the row of a dead pilot's point {stem} cannot be written"
                return False
        if dead:
            return True
        if "unknown" not in verdicts.values():
            return False
        # A living pilot will finish its own points; one whose count never moves is dead when its lease is over.
        self._activity = "waiting"
        return self._pause(0.2)

    def _on_progress(self, progress: Progress) -> None:
        running = self._running
        assert running is not None
        moved = (progress.phase, progress.step) != (running.phase, running.step)
        if moved:
            self._running = dataclasses.replace(running, phase=progress.phase, step=progress.step)
        if moved or time.monotonic() >= self._next_beat:
            self._beat("running")

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
            running=self._running,
            finished=dict(self._finished),
        )
        # A full disk must not end the pilot; if it lasts, others will take the claim over and the rows will tell.
        with contextlib.suppress(OSError):
            pilotstate.write_state(self.sweep, state)

    def _pause(self, seconds: float, message: str = "") -> bool:
        """Sleep, but go on beating; False, and early, when the pilot should stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.stop_reason() is None:
            if time.monotonic() >= self._next_beat or message != self._message:
                self._message = message
                self._beat(self._activity, message)
            time.sleep(min(left, 0.05))
        return self.stop_reason() is None

    def _all_free(self, width: int) -> str | None:
        def beat() -> None:
            if time.monotonic() >= self._next_beat:
                self._beat(self._activity)

        return self._devices.wait_until_free(width, self.settings.device_free_limit_s, beat)

    def _give_up(self, message: str) -> int:
        self.say(f"stopping: {message}")
        self._message = message
        return STOPPED if self.stop_reason() is not None else TROUBLE

    def _listen(self) -> None:
        def asked(reason: StopReason) -> Callable[[int, object], None]:
            def handler(_number: int, _frame: object) -> None:
                self._stop = self._stop or reason

            return handler

        signal.signal(signal.SIGINT, asked("cancelled"))
        signal.signal(signal.SIGTERM, asked("preempted"))
        signal.signal(signal.SIGUSR2, asked("preempted"))

    def _say_what_is_in_use(self) -> None:
        self._beat("starting")
        for note in self._devices.notes():
            self.say(note)


def _needed_s(point: Point, settings: LaunchSettings) -> float:
    """Wall time that the point should be given: its predicted time with room, never more than its deadline."""
    deadline_s = settings.point_deadline_s or point.deadline_s
    if point.predicted_step_time_s is None:
        return deadline_s
    steps = settings.measure.warmup_steps + settings.measure.timed_steps
    ranks = len(rehearsed_ranks(point.experiment)) if point.method != "measured" else 1
    return min(deadline_s, ranks * (START_UP_S + 1.5 * steps * point.predicted_step_time_s))


def _closed(descriptor: int) -> bool:
    """Whether the other end of a pipe is gone."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 1024) == b""


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None) -> int:
    """Run one pilot. ``run_rank`` is the workload; the engine's own unless a test brings another."""
    parser = argparse.ArgumentParser(
        prog="python -m launchers.pilot", description="Run the points of one sweep's queue."
    )
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("pilot_id")
    arguments = parser.parse_args(argv)
    try:
        sweep = SweepDir.open(arguments.sweep_dir)
        payload = read_payload(pilotstate.payload_path(sweep, arguments.pilot_id))
        # For CUDA and torch, here and in the children: a pilot that asked CUDA itself for devices could not fork.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        devices = open_devices(payload.settings.device, payload.settings.num_devices)
        provenance = _provenance(payload)
    except UltrasweepError as error:
        print(error, file=sys.stderr)
        return 2
    if run_rank is None:
        from workloads import worker

        worker.preload()
        run_rank = worker.run_rank
    table_from_rows([], ATTEMPTS)  # Arrow imports more at its first table: now, not between two points
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        print(f"warning: this pilot has {threads} threads before its first fork", file=sys.stderr)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the children: their collections do not copy its pages
    return Pilot(sweep, arguments.pilot_id, payload, devices, run_rank, provenance).run()


def _provenance(payload: Payload) -> dict[str, Any]:
    from results import provenance

    root = Path(__file__).resolve().parent.parent
    return {
        **provenance.code_provenance(root),
        "python_version": provenance.python_version(),
        "command": payload.command,
    }


if __name__ == "__main__":
    sys.exit(main())
