"""One cycle of submitting: what is there, what should be there, and the difference.

Everything that a cycle decides from is in files and in squeue, and it is read while this process alone may submit. So
a submitter may be killed at any moment, two may work at once, and the next cycle puts right what the last left half
done. A pilot too many costs seconds (it finds nothing to draw and ends); a pilot too few is submitted next time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launchers.settings import LaunchSettings
from launchers.slurm import batch_file
from launchers.slurm.client import Job, SlurmClient, default_limits
from launchers.slurm.demand import Demand, demand_of
from launchers.slurm.options import SlurmOptions
from launchers.slurm.submission_tracker import SubmissionTracker
from launchers.state import code_snapshot, node_exclusions, pilot_state, queue, submissions
from launchers.state.circuit_breaker import kind_of, paused_kinds
from launchers.state.history import AttemptRecord
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict
from launchers.state.pilot_state import Liveness
from launchers.state.queue import QueueReader
from launchers.state.requirements import nodes_needed
from launchers.state.submissions import Submission
from launchers.state.sweep_dir import Point, SweepDir, read_point
from results.errors import InvalidResults, UltrasweepError
from results.lease import Lease, acquire
from results.log_tail import tail_in_one_line
from results.provenance import code_provenance
from results.text import plural
from workloads.protocol import write_json

_LEASE_STALE_S = 30.0
_LEASE_BEAT_S = 5.0
_PAUSES_S = (0.0, 15.0, 60.0)
"""Before the next pilots of a shape whose last ones ended without an attempt; after the last, no more."""
_RETRY_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Between tries when sbatch fails in a way that may pass."""
_LOG_LINES = 6
_RELEASES = 3


class PilotsEnd(UltrasweepError):
    """Pilots keep ending without doing anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What one cycle found and did. ``jobs`` is None when Slurm did not answer: nothing is known then."""

    jobs: Sequence[Job] | None
    demand: Demand = field(default_factory=Demand)
    live: Mapping[int, int] = field(default_factory=dict)
    """Pilots that run, wait or are about to appear, by shape."""
    submitted: int = 0
    missing: int = 0
    """Pilots that are wanted and could not be submitted now."""
    given_up: Mapping[int, UltrasweepError] = field(default_factory=dict)
    """Shapes for which no pilot will be submitted any more, and why."""
    held: Mapping[str, str] = field(default_factory=dict)
    busy: bool = False
    """Another process is submitting for this sweep; nothing was looked at."""

    @property
    def runnable(self) -> int:
        """Points that a pilot could be submitted for."""
        return sum(len(points) for nodes, points in self.demand.points.items() if nodes not in self.given_up)


@contextmanager
def only_submitter(sweep: SweepDir, wait_s: float) -> Iterator[Lease | None]:
    """Be the one process that submits for the sweep; None when another has been it for all of ``wait_s``."""
    with acquire(submissions.lease_path(sweep), stale_after_s=_LEASE_STALE_S, wait_s=wait_s) as lease:
        over = threading.Event()

        def keep(ours: Lease) -> None:  # sbatch may block for minutes
            while not over.wait(_LEASE_BEAT_S):
                ours.held()

        keeper = threading.Thread(target=keep, args=(lease,), daemon=True) if lease is not None else None
        if keeper is not None:
            keeper.start()
        try:
            yield lease
        finally:
            over.set()
            if keeper is not None:
                keeper.join()


class Reconciler:
    """Submits pilots for one sweep, cycle by cycle."""

    def __init__(
        self,
        sweep: SweepDir,
        settings: LaunchSettings,
        options: SlurmOptions,
        *,
        pilot: Sequence[str],
        command: str,
        say: Callable[[str], None],
        stopped: Callable[[], bool],
        client: SlurmClient | None = None,
    ) -> None:
        self.client = client or SlurmClient()
        self._sweep, self._settings, self._options = sweep, settings, options
        self._pilot, self._command = pilot, command
        self._say, self._stopped = say, stopped
        self._reader = QueueReader(sweep, "", say)
        self._liveness = Liveness(sweep, settings.lease_s)
        self._claimed: dict[str, Point] = {}
        self._code: tuple[Path, Mapping[str, object]] | None = None
        self._tracker = SubmissionTracker(sweep, self.client)
        self._given_up: dict[int, UltrasweepError] = {}
        self._fruitless: Counter[int] = Counter()
        self._released: Counter[str] = Counter()
        self._last: dict[int, tuple[str, int, float]] = {}
        """By shape: the last submission's token, the attempts recorded before it, and its monotonic time."""
        self._said_frozen: set[str] = set()
        self._cut = sys.maxsize
        self._failures = 0
        self._not_before = 0.0

    def cycle(self, attempts: Sequence[AttemptRecord], *, wait_s: float = 0.0) -> Cycle:
        """Look, submit what is missing, cancel what waits for nothing. ``attempts``: all that are recorded."""
        with only_submitter(self._sweep, wait_s) as lease:
            if lease is None:
                return Cycle(jobs=None, busy=True)
            jobs = self._tracker.update()
            if jobs is None:
                return Cycle(jobs=None, given_up=self._given_up)
            self._free_stuck(jobs)
            held = paused_kinds(self._sweep, attempts, self._settings.breaker_failures)
            demand = demand_of(self._waiting(jobs, held), self._settings, self._options)
            live = self._tracker.live
            working = live - self._frozen(jobs)
            submitted = missing = 0
            for nodes, wanted in demand.pilots.items():
                lacking = wanted - working[nodes]
                if lacking <= 0 or nodes in self._given_up or self._stopped():
                    continue
                done = self._submit_shape(nodes, lacking, working[nodes], len(attempts), lease)
                live[nodes] += done
                submitted += done
                missing += lacking - done if nodes not in self._given_up else 0
            self._cancel_idle(jobs, demand)
            return Cycle(
                jobs=jobs,
                demand=demand,
                live=dict(live),
                submitted=submitted,
                missing=missing,
                given_up=dict(self._given_up),
                held=held,
            )

    def _free_stuck(self, jobs: Sequence[Job]) -> None:
        """A pilot whose start failed on Slurm's side is released a few times, then cancelled: another comes."""
        stuck = [job for job in jobs if job.stuck]
        lost = [job for job in stuck if self._released[job.name] >= _RELEASES]
        again = [job for job in stuck if job not in lost]
        if again and self.client.release(again):
            self._released.update(job.name for job in again)
            self._say(f"{len(again)} pilots whose restart Slurm had held are released")
        if lost and self.client.cancel(lost):
            self._say(f"{len(lost)} pilots that Slurm cannot start are cancelled")

    def _waiting(self, jobs: Sequence[Job], held: Mapping[str, str]) -> list[Point]:
        """Points of our method that no living pilot holds and no breaker holds back."""
        # A job that waits again after its node was lost holds nothing any more, whatever its last pilot had claimed.
        alive = {(job.token, job.index) for job in jobs if job.alive and not job.waiting}
        points = self._reader.waiting()
        for stem, holder in queue.claims_of_others(self._sweep, ""):
            token, index = submissions.token_of_pilot(holder), submissions.index_of_pilot(holder)
            orphan = self._liveness.judge(holder) == "dead"  # also one that stands still while its job goes on
            if token is not None:
                orphan = orphan or ((token, index) not in alive and not self._tracker.expected(token))
            if orphan and (point := self._claimed_point(stem, holder)) is not None:
                points.append(point)
        return [
            point
            for point in points
            if point.method == self._settings.method
            and kind_of(point.experiment, nodes_needed(point, self._settings.num_devices)) not in held
        ]

    def _frozen(self, jobs: Sequence[Job]) -> Counter[int]:
        """Pilots by shape that hold points and stand still while their job runs: they do nothing for what waits."""
        running = {(job.token, job.index) for job in jobs if job.alive and not job.waiting}
        frozen: Counter[int] = Counter()
        for holder in {holder for _, holder in queue.claims_of_others(self._sweep, "")}:
            token, index = submissions.token_of_pilot(holder), submissions.index_of_pilot(holder)
            if token is None or (token, index) not in running or not self._liveness.frozen(holder):
                continue
            nodes = self._tracker.shape(token)
            if nodes is not None and not pilot_state.state_path(self._sweep, submissions.successor(holder)).exists():
                frozen[nodes] += 1
                if holder not in self._said_frozen:
                    self._said_frozen.add(holder)
                    self._say(f"pilot {holder} stands still; another will run what it holds")
        return frozen

    def _claimed_point(self, stem: str, holder: str) -> Point | None:
        if stem not in self._claimed:
            try:
                self._claimed[stem] = read_point(self._sweep.claimed / f"{stem}@{holder}.json")
            except (FileNotFoundError, InvalidResults):
                return None
        return self._claimed[stem]

    def _submit_shape(self, nodes: int, lacking: int, living: int, attempts: int, lease: Lease) -> int:
        """Submit up to ``lacking`` pilots of one shape; how many were."""
        now = time.monotonic()
        if now < self._not_before or not self._fruitful(nodes, living, attempts, now):
            return 0
        limits = self.client.limits() or default_limits()
        largest = min(limits.largest_array, self._cut)
        done = 0
        while done < lacking and not self._stopped():
            count = min(lacking - done, largest)
            if not lease.held():
                break
            try:
                submission = self._submit(nodes, count)
            except batch_file.Limited as error:
                if count > 1:
                    largest = count // 2
                    continue
                if not living + done:
                    self._give_up(nodes, error)
                else:
                    self._try_later(f"Slurm takes no more pilots of this user for now: {error}")
                break
            except batch_file.Refused as error:
                self._give_up(nodes, error)
                break
            except (batch_file.Unsure, InvalidResults) as error:
                if "temporarily unavailable" in str(error).lower():  # the cluster may be full of jobs
                    self._cut = max(1, count // 2)
                self._try_later(f"submitting failed: {error}")
                break
            self._failures = 0
            done += count
            self._last[nodes] = (submission.token, attempts, now)
            self._say(f"{plural(count, 'pilot')} of {plural(nodes, 'node')} submitted: job {submission.job_id}")
        return done

    def _submit(self, nodes: int, count: int) -> Submission:
        """PilotConfig, intent, sbatch, id, in this order."""
        sweep, options = self._sweep, self._options
        try:
            code, provenance = self._code_of_pilots()
            submission = submissions.new_submission(sweep, nodes=nodes, count=count, time_min=options.time_min)
            config = PilotConfig(
                settings=self._settings,
                command=self._command,
                wall_time_s=float(options.usable_s),
                stop_with_parent=False,
                nodes=nodes,
                scheduler="slurm",
                provenance=provenance,
            )
            write_json(pilot_state.config_path(sweep, submission.token), pilot_config_to_dict(config))
            submissions.write(sweep, submission)
        except OSError as error:
            raise batch_file.Unsure(f"cannot write in {sweep.path}: {error.strerror or error}") from None
        excluded = batch_file.node_names(list(node_exclusions.excluded(sweep)))
        job = pilot_job(sweep, self._settings, submission, code, self._pilot, excluded)
        try:
            try:
                job_id = batch_file.submit(job, options)
            except batch_file.Refused as error:
                if not excluded or "node name" not in str(error).lower():
                    raise
                self._say(f"Slurm does not know all of the nodes that are left out ({', '.join(excluded)}): {error}")
                job_id = batch_file.submit(pilot_job(sweep, self._settings, submission, code, self._pilot, ()), options)
        except (batch_file.Refused, batch_file.Limited) as error:
            self._tracker.change(submission, stage="failed", message=str(error))
            raise
        except batch_file.Unsure:
            self._tracker.change(submission, stage="unsure")
            raise
        return self._tracker.change(submission, stage="submitted", job_id=job_id)

    def _code_of_pilots(self) -> tuple[Path, Mapping[str, object]]:
        """Copied once a run: all pilots of one run run the same code."""
        if self._code is None:
            taken = code_snapshot.take_snapshot()
            provenance = code_provenance(taken.root)
            self._code = code_snapshot.write_snapshot(self._sweep, taken), provenance
        return self._code

    def _fruitful(self, nodes: int, living: int, attempts: int, now: float) -> bool:
        """Whether another try makes sense; gives the shape up when its pilots keep ending without an attempt."""
        if nodes not in self._last or living:
            return True
        token, before, since = self._last[nodes]
        if attempts > before:
            self._fruitless[nodes] = 0
            return True
        failed = self._fruitless[nodes] + 1
        if failed >= len(_PAUSES_S):
            self._give_up(
                nodes,
                PilotsEnd(
                    f"pilots of {plural(nodes, 'node')} ended {failed} times in a row without an attempt; the last: "
                    f"{self._tracker.ending(token)}; {_tail(self._sweep, token)}"
                ),
            )
            return False
        if now - since < _PAUSES_S[failed]:
            return False
        self._fruitless[nodes] = failed
        self._say(
            f"pilots of {plural(nodes, 'node')} ended without an attempt ({self._tracker.ending(token)}); trying again"
        )
        return True

    def _give_up(self, nodes: int, error: UltrasweepError) -> None:
        if not isinstance(error, PilotsEnd):
            error = type(error)(f"Slurm refuses pilots of {plural(nodes, 'node')}: {error}")
        self._given_up[nodes] = error

    def _try_later(self, line: str) -> None:
        pause = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
        self._failures += 1
        self._not_before = time.monotonic() + pause
        self._say(f"{line}; trying again in {pause:.0f} s")

    def _cancel_idle(self, jobs: Sequence[Job], demand: Demand) -> None:
        """Take pilots off Slurm's queue whose shape has no point waiting any more."""
        idle = [job for job in jobs if job.waiting and self._tracker.shape(job.token) not in demand.points]
        if idle and self.client.cancel(idle, only_waiting=True):
            self._say(f"{plural(len(idle), 'pilot')} taken off Slurm's queue: no point is left that would need more")


def pilot_job(
    sweep: SweepDir,
    settings: LaunchSettings,
    submission: Submission,
    code: Path,
    pilot: Sequence[str],
    excluded: Sequence[str],
) -> batch_file.PilotJob:
    """The job of a submission."""
    return batch_file.PilotJob(
        token=submission.token,
        job_name=submission.job_name,
        sweep_dir=sweep.path.resolve(),
        code_dir=code,
        nodes=submission.nodes,
        count=submission.count,
        gpus_per_node=settings.num_devices if settings.device == "cuda" else 0,
        pilot=pilot,
        excluded=excluded,
    )


def _tail(sweep: SweepDir, token: str) -> str:
    """The last lines of the newest log of a submission's pilots."""
    try:
        logs = sorted(submissions.log_dir(sweep.path, token).glob("*.out"), key=lambda path: path.stat().st_mtime)
    except OSError:
        logs = []
    said = tail_in_one_line(logs[-1], _LOG_LINES) if logs else ""
    return f"{logs[-1]}: {said}" if said else "its log is empty"
