"""`run_storm`: one sweep through an hour of virtual cluster time with faults drawn by a seed, and what must hold after.

Real are `launchers.slurm.submit.run_slurm`, `launchers.pilot.pilot.Pilot` with its pool, scheduler, recorder, history
and queue, `launchers.attempt`, and the sweep's files. Simulated are the clock, Slurm's daemons and commands, the
network, agents and ranks (see `cluster` and `pilots`). A seed draws faults and points; ids are random, so that two runs
of a seed are alike and not the same.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from launchers.pilot import attempt_thread, state_writer
from launchers.pilot.pilot import Pilot
from launchers.pilot.stop_request import StopRequest
from launchers.slurm import sbatch, submit, submitter_lease
from launchers.slurm.client import SlurmClient
from launchers.slurm.options import SlurmOptions
from launchers.state import circuit_breaker, pilot_state
from launchers.state.process_identity import ProcessIdentity
from launchers.state.sweep_dir import Point, SweepDir, entry_names
from results.errors import UltrasweepError
from results.shared_filesystem import lease
from results.tables.store import read_attempts
from tests.launchers.scripted import experiment, settings
from tests.launchers.virtual_time import ActorThread, Process, World
from tests.slurm.storm.cluster import Cluster, SlurmJob
from tests.slurm.storm.faults import Faults
from tests.slurm.storm.files import StormyFiles
from tests.slurm.storm.pilots import Journal, PilotRun, Place
from tests.slurm.sweeps import marked

DEVICES_PER_NODE = 2
NODES = 10
_NEARLY_ALL = 2
"""Points that are left when more are added."""
AFTER_S = 4 * 3600.0
"""Virtual seconds after the last fault by which the sweep must have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormResult:
    """What one storm did."""

    seed: int
    points: int
    rows: int
    final: int
    """Points with a final row."""
    marked: int
    """Rows marked as of a point that ran twice; where a point has several final rows, all but one are."""
    tried_again: Counter[str]
    """Rows followed by another attempt, by outcome."""
    outcomes: Counter[str]
    """Final rows, one for each point, by outcome."""
    ran_twice: int
    """Points whose ranks were measured to the end more than once."""
    faults: Counter[str]
    failed_calls: int
    """Calls on files that were answered with an error."""
    hours: float
    """Virtual hours from the first submission to the end."""
    pilots: int
    submitters: int
    complaints: tuple[str, ...] = ()
    """What must hold and does not."""

    @property
    def table_line(self) -> str:
        """The line of docs/reliability.md."""
        last = "; ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        again = "; ".join(f"{count} {name}" for name, count in self.tried_again.most_common())
        cells = (
            self.seed,
            self.points,
            self.faults.total(),
            self.failed_calls,
            self.pilots,
            self.submitters,
            last,
            again,
        )
        return f"| {' | '.join(map(str, cells))} | {self.ran_twice} | {self.marked} | {self.hours:.1f} |"

    def __str__(self) -> str:
        again = ", ".join(f"{count} {name}" for name, count in self.tried_again.most_common())
        last = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        faults = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.faults.most_common())
        return (
            f"seed {self.seed}: {self.points} points, {self.final} final rows ({last}), {self.marked} marked; "
            f"{self.rows} rows, tried again: {again or 'none'}; {self.ran_twice} points measured twice; "
            f"{self.faults.total()} faults ({faults}), {self.failed_calls} failed calls on files; "
            f"{self.pilots} pilots, {self.submitters} commands, {self.hours:.2f} h: "
            f"{'; '.join(self.complaints) or 'all hold'}"
        )


@dataclass
class Storm:
    """One sweep on one cluster."""

    folder: Path
    seed: int
    points_of: Sequence[tuple[int, int]] = ((1, 18), (2, 5), (4, 2))
    """Pairs of a width in nodes and a number of points. As many are added whenever nearly all have ended, so that
    pilots with and without waiting points are disturbed."""
    lasts_s: float = 3600.0
    """Virtual seconds during which faults happen and points are added."""
    every_s: float = 25.0
    """Mean virtual seconds between two faults."""
    longest_s: float = 150.0
    """Virtual seconds that the longest points run."""
    journal: Journal = field(default_factory=Journal)
    submitters: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.sweep = SweepDir.create(self.folder / "sweep", {})
        self.points: list[Point] = []
        self.place = Place(self.world, self.sweep.path, {}, self.journal, has_scontrol=self.seed % 2 == 0)
        self._draw = random.Random(self.seed)
        self._add_points()
        self.files = StormyFiles(self.world, self.sweep.path)
        self.runs: list[PilotRun] = []
        self.cluster = Cluster(self.world, NODES, self._start_job)
        self.faults = Faults(self.world, self.cluster, self.files, self.submitters, self._submit)
        self.settings = settings(
            num_devices=DEVICES_PER_NODE,
            launcher="slurm",
            lease_s=60.0,
            phase_limits_s={"step": 60.0},
        )
        self.options = SlurmOptions(time_min=15, signal_delay_s=60, max_nodes=6, gpus="none")

    def run(self) -> StormResult:
        """Run the storm, wait until the sweep has ended, and look at what is left."""
        world = self.world
        with self._installed():
            begun = world.now
            self._submit()
            again_at, next_fault = 0.0, world.now + 20.0
            while world.now - begun < self.lasts_s + AFTER_S:
                world.sleep(1.0)
                stormy = world.now - begun < self.lasts_s
                if stormy and self._left() <= _NEARLY_ALL:
                    self._add_points()
                if stormy and world.now >= next_fault:
                    self.faults.draw()
                    next_fault = world.now + world.random.expovariate(1 / self.every_s)
                elif not stormy:
                    self.faults.heal()
                if all(process.dead for process in self.submitters):
                    if not self._left() and not self._jobs() and all(run.process.dead for run in self.runs):
                        break
                    again_at = again_at or world.now + world.random.uniform(5.0, 120.0)
                    if world.now >= again_at:
                        again_at = 0.0
                        with contextlib.suppress(OSError):
                            circuit_breaker.resume(self.sweep)
                        self._submit()
            hours = (world.now - begun) / 3600
        return self._result(hours)

    def _add_points(self) -> None:
        """Add points of all shapes, in a random order."""
        draw, added = self._draw, []
        shapes = [width for width, count in self.points_of for _ in range(count)]
        draw.shuffle(shapes)
        for index, width in enumerate(shapes, start=len(self.points)):
            kind = draw.choices(("ok", "oom", "crash"), (92, 5, 3))[0]
            ranks = width * DEVICES_PER_NODE
            one = experiment(kind, seed=index, dp=ranks, global_batch_size=2 * ranks)
            self.place.durations[one.id] = draw.uniform(0.1, 1.0) ** 2 * self.longest_s
            added.append(Point(index=index, grid="storm", experiment=one, deadline_s=300.0))
        self.points += added
        self.sweep.add_points(added)

    def _left(self) -> int:
        return len(entry_names(self.sweep.todo)) + len(entry_names(self.sweep.claimed))

    def _jobs(self) -> list[SlurmJob]:
        return [job for job in self.cluster.jobs if not job.over]

    def _start_job(self, job: SlurmJob) -> PilotRun:
        run = PilotRun(self.place, job)
        self.runs.append(run)
        return run

    def _submit(self) -> None:
        """The user types the command."""
        process = Process(f"command {len(self.submitters)}", "login")
        self.submitters.append(process)

        def main() -> None:
            try:
                submit.run_slurm(self.sweep, self.settings, self.options, live=False, command="storm")
            except (UltrasweepError, OSError) as error:  # the command line prints it in one line
                self.journal.ended[process.name] = f"{type(error).__name__}: {error}"
            except Exception:
                self.journal.errors.append(f"{process.name}: {traceback.format_exc()}")
            finally:
                process.dead = True

        self.world.start(process, main)

    # What must hold

    def _result(self, hours: float) -> StormResult:
        rows = read_attempts(self.sweep.path).to_pylist()
        by_point: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_point.setdefault(row["experiment_id"], []).append(row)
        final = {point: _final(of_point) for point, of_point in by_point.items()}
        measured = Counter(self.journal.measured.values())
        return StormResult(
            seed=self.seed,
            points=len(self.points),
            rows=len(rows),
            final=sum(row is not None for row in final.values()),
            marked=sum(map(marked, rows)),
            tried_again=Counter(row["outcome"] for row in rows if row["will_retry"]),
            outcomes=Counter(row["outcome"] for row in final.values() if row is not None),
            ran_twice=sum(count > 1 for count in measured.values()),
            faults=self.faults.counts,
            failed_calls=self.files.failed,
            hours=hours,
            pilots=len(self.runs),
            submitters=len(self.submitters),
            complaints=tuple(self._complaints(by_point)),
        )

    def _complaints(self, by_point: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
        if left := self._left():
            yield f"{left} points are left"
        if jobs := self._jobs():
            yield f"{len(jobs)} jobs are left"
        if running := [run for run in self.runs if not run.process.dead]:
            yield f"{len(running)} pilots still run"
        if missing := {point.experiment.id for point in self.points} - by_point.keys():
            yield f"{len(missing)} points have no row"
        if len(entry_names(self.sweep.done)) != len(self.points):
            yield "not every point is done"
        recorded = {row["attempt_id"] for rows in by_point.values() for row in rows}
        if sum(map(len, by_point.values())) != len(recorded):
            yield "an attempt has two rows"
        if lost := self.journal.begun.keys() - recorded:
            yield f"{len(lost)} attempts that ran have no row: {', '.join(sorted(lost)[:3])}"
        for point, rows in by_point.items():
            if _final(rows) is None:
                found = [(row["attempt_id"], row["outcome"], row["will_retry"], marked(row)) for row in rows]
                yield f"{point} has no final row, or several without a mark: {found}"
            good = {row["attempt_id"] for row in rows if row["outcome"] == "ok"}
            for attempt in {one for one, at in self.journal.measured.items() if at == point} - good:
                # A pilot that is taken for dead may go on, and be killed before it writes its row anew.
                if self._recorded_at(attempt) > self.journal.measured_at[attempt] or not good:
                    yield f"{attempt} was measured, and its row does not say so"
        yield from (f"{error.partition(':')[0]}: {error.strip().splitlines()[-1]}" for error in self.journal.errors)

    def _recorded_at(self, attempt: str) -> float:
        """Virtual time of the first record of an attempt."""
        records = (at for name, at in self.files.written.items() if name.endswith(f"@{attempt}.json"))
        return min(records, default=math.inf)

    # The world around the real code

    @contextmanager
    def _installed(self) -> Iterator[None]:
        world, cluster = self.world, self.cluster

        def touch(file: Path) -> bool:
            now = world.epoch + world.now
            try:
                os.utime(file, (now, now))
            except OSError:
                return False
            return True

        def server_time(_folder: Path) -> float:
            return world.epoch + world.now

        def identity() -> ProcessIdentity:
            actor = world.actor
            assert actor is not None
            number = next(run.number for run in self.runs if run.process is actor.process)
            return ProcessIdentity(host=actor.process.host, boot_id="", pid_namespace=1, pid=number, start_ticks=number)

        def provably_dead(one: ProcessIdentity) -> bool:
            actor = world.actor
            if actor is None or actor.process.host != one.host:
                return False
            return all(run.process.dead for run in self.runs if run.number == one.pid)

        def log(pilot: Pilot, line: str) -> None:
            self.journal.logs.append(f"{world.now - 1000:.0f} {pilot.pilot_id}: {line}")

        def say(line: str) -> None:
            actor = world.actor
            name = actor.process.name if actor is not None else ""
            self.journal.logs.append(f"{world.now - 1000:.0f} {name}: {line}")

        threads = SimpleNamespace(
            Thread=lambda **words: ActorThread(world, **words), Event=threading.Event, Lock=threading.Lock
        )
        real_time = lease.filesystem_time
        with ExitStack() as stack:
            for where, name, value in (
                (attempt_thread, "threading", threads),
                (state_writer, "own_identity", identity),
                (pilot_state, "provably_dead", provably_dead),
                (Pilot, "log", log),
                (StopRequest, "listen", lambda _: None),
                (submit, "missing_commands", lambda: ""),
                (submit, "interrupts", _no_interrupts),
                (submit, "choose_view", lambda *_: _View(say)),
                (submitter_lease, "kept_alive", lambda _: contextlib.nullcontext()),
                (SlurmClient, "_call", lambda client, command, harmless=None: cluster.call(client, command)),
                (sbatch, "submit", cluster.sbatch),
                (shutil, "which", lambda name: f"/bin/{name}" if self.place.has_scontrol else None),
                (lease, "_touch", touch),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            for module in list(sys.modules.values()):
                if getattr(module, "filesystem_time", None) is real_time:
                    stack.enter_context(mock.patch.object(module, "filesystem_time", server_time))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # pilots say it in their states as well
            stack.enter_context(self.files.installed())
            stack.enter_context(world.installed())
            yield


def run_seed(seed: int, log: Path | None) -> StormResult:
    """A storm of one hour in a folder of its own. ``log``: folder for what pilots and commands print."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="storm-", dir=memory if memory.is_dir() else None) as folder:
        storm = Storm(Path(folder), seed)
        result = storm.run()
    if log is not None:
        log.mkdir(parents=True, exist_ok=True)
        (log / f"seed-{seed}.log").write_text("\n".join(storm.journal.lines()) + "\n")
    return result


def _final(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The one final row of a point: the only one, or the only one without a mark. None if there is no such row."""
    final = [row for row in rows if not row["will_retry"]]
    chosen = final if len(final) == 1 else [row for row in final if not marked(row)]
    return chosen[0] if len(chosen) == 1 else None


@contextmanager
def _no_interrupts(limit: int | None = None) -> Iterator[list[int]]:
    yield []


class _View:
    """A view that keeps its lines."""

    def __init__(self, say: Any) -> None:
        self.print_line = say

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: object) -> None:
        pass
