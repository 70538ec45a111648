"""One cycle of submitting: compare the existing pilots with the needed ones, and submit the difference.

A cycle decides only from files and from squeue, and reads both while no other process may submit. So a submitter may be
killed at any moment, two may run at the same time, and the next cycle repairs what the last one left unfinished. A
surplus pilot costs seconds, since it finds no point and ends. A missing one is submitted in the next cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from launchers.settings import LaunchSettings
from launchers.slurm.client import Job, SlurmClient, cluster_for
from launchers.slurm.demand import Demand, demand_of
from launchers.slurm.failed_starts import FailedStarts
from launchers.slurm.options import SlurmOptions
from launchers.slurm.pilot_submitter import ExistingPilots, PilotSubmitter
from launchers.slurm.submission_tracker import SubmissionTracker
from launchers.slurm.submitter_lease import only_submitter
from launchers.slurm.waiting_pilots import WaitingPilots, pilot_options
from launchers.state import pilot_state, queue, submissions
from launchers.state.circuit_breaker import kind_of, paused_kinds
from launchers.state.history import AttemptRecord
from launchers.state.pilot_state import Liveness
from launchers.state.queue import QueueReader
from launchers.state.requirements import nodes_needed
from launchers.state.sweep_dir import Point, SweepDir
from results.errors import UltrasweepError
from results.shared_filesystem.lease import Lease
from results.text.numbers import plural
from workloads.spec.experiment import Experiment

_MOST_RELEASES = 3
"""Number of times that a job which Slurm cannot start is released before it is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Observations and actions of one cycle. Shapes are numbers of nodes."""

    jobs: Sequence[Job] | None
    """None when Slurm did not answer: then the other fields are meaningless."""
    demand: Demand = field(default_factory=Demand)
    live: Mapping[int, int] = field(default_factory=dict)
    """Pilots by shape that run, wait or are `unsettled`."""
    unsettled: Mapping[int, int] = field(default_factory=dict)
    """Pilots of `live` by shape whose state is about to become clear."""
    submitted: int = 0
    missing: int = 0
    """Needed pilots that could not be submitted now; a later cycle may submit them."""
    given_up: Mapping[int, UltrasweepError] = field(default_factory=dict)
    """Errors that ended the submission of a shape."""
    paused: Mapping[str, str] = field(default_factory=dict)
    """Kinds of points that keep failing and wait for a retry, with the reason."""
    busy: bool = False
    """Whether another process submits for this sweep, so that this cycle did nothing."""

    @property
    def runnable(self) -> int:
        """Points for which a pilot could be submitted."""
        return sum(len(points) for nodes, points in self.demand.points.items() if nodes not in self.given_up)

    @property
    def certainly_alive(self) -> int:
        """Number of pilots that certainly run or wait."""
        return sum(self.live.values()) - sum(self.unsettled.values())


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
        report: Callable[[str], None],
        stopped: Callable[[], bool],
        client: SlurmClient | None = None,
        experiments: Mapping[str, Experiment] = MappingProxyType({}),
    ) -> None:
        """Other arguments after ``options`` are those of `PilotSubmitter`. ``experiments`` as in `QueueReader`."""
        self.client = client or SlurmClient(cluster_for(sweep))
        self._sweep, self._settings, self._options = sweep, settings, options
        self._report, self._stopped = report, stopped
        self._reader = QueueReader(sweep, "", report, experiments)
        self._liveness = Liveness(sweep, settings.lease_s)
        self._claimed: dict[str, Point] = {}
        self._tracker = SubmissionTracker(sweep, self.client)
        self._submitter = PilotSubmitter(
            sweep,
            settings,
            options,
            self._tracker,
            self.client,
            pilot=pilot,
            command=command,
            report=report,
            stopped=stopped,
        )
        self._waiting = WaitingPilots(sweep, pilot_options(options, settings), self._tracker, self.client, report)
        self._failed_starts = FailedStarts(sweep, report)
        self._released: Counter[str] = Counter()
        self._reported_stalled: set[str] = set()

    def cycle(self, attempts: Sequence[AttemptRecord], *, wait_s: float = 0.0) -> Cycle:
        """Submit the missing pilots, and cancel waiting pilots without a point.

        ``attempts``: all recorded attempts. ``wait_s``: seconds to wait for another process that submits.
        """
        with only_submitter(self._sweep, wait_s) as lease:
            if lease is None:
                return Cycle(jobs=None, busy=True)
            jobs = self._tracker.update()
            if jobs is None:
                return Cycle(jobs=None, given_up=self._submitter.given_up)
            self._failed_starts.exclude_bad_nodes(jobs)
            self._release_held_jobs(jobs)
            paused = paused_kinds(self._sweep, attempts, self._settings.breaker_failures)
            demand = demand_of(self._unclaimed(jobs, paused), self._settings, self._options)
            self._waiting.exclude_nodes(jobs, self._options.exclude)
            old = self._waiting.find_outdated(jobs)
            stuck_pilots, stuck = self._waiting.never_start(jobs)
            live = self._tracker.live + self._tracker.unsettled - stuck_pilots
            working = live - self._stalled(jobs) - old
            submitted = missing = 0
            for nodes, needed in demand.pilots.items():
                if nodes in stuck or nodes in self._submitter.given_up or self._stopped():
                    continue
                existing = ExistingPilots(shape=working[nodes], all=live.total(), attempts=len(attempts))
                done, cancelled, lacking = self._fill(nodes, needed - working[nodes], existing, lease)
                live[nodes] += done - cancelled
                submitted += done
                missing += lacking
            self._cancel_idle(jobs, demand)
            return Cycle(
                jobs=jobs,
                demand=demand,
                live=dict(live),
                unsettled=dict(self._tracker.unsettled),
                submitted=submitted,
                missing=missing,
                given_up={**self._submitter.given_up, **stuck},
                paused=paused,
            )

    def _fill(self, nodes: int, lacking: int, existing: ExistingPilots, lease: Lease) -> tuple[int, int, int]:
        """Submit the lacking pilots of one shape, and cancel the waiting ones that they replace. Returns the number
        submitted, the number cancelled, and the number missing that later cycles may submit."""
        done = 0
        if lacking > 0:
            use_excluded = nodes in self._waiting.lacks_nodes()
            done = self._submitter.submit(nodes, lacking, existing, lease, use_excluded=use_excluded)
        if nodes in self._submitter.given_up:
            self._waiting.keep_old(nodes)
            return done, 0, 0
        if done < lacking and not self._submitter.full:
            return done, 0, lacking - done
        return done, self._waiting.cancel_old(nodes), 0

    def _release_held_jobs(self, jobs: Sequence[Job]) -> None:
        """Slurm holds a job whose start has failed. Release it a few times, then cancel it, so that a new one is
        submitted."""
        held = [job for job in jobs if job.held_by_slurm]
        hopeless = [job for job in held if self._released[job.name] >= _MOST_RELEASES]
        again = [job for job in held if job not in hopeless]
        if again and self.client.release(again):
            self._released.update(job.name for job in again)
            self._report(f"released {plural(len(again), 'pilot')} whose restart Slurm had held")
        if hopeless and self.client.cancel(hopeless):
            self._report(f"cancelled {plural(len(hopeless), 'pilot')} that Slurm cannot start")

    def _unclaimed(self, jobs: Sequence[Job], paused: Mapping[str, str]) -> list[Point]:
        """Points of this run's method that no living pilot holds and whose kind is not paused."""
        # A job that waits again after the loss of its node holds no point, although its last pilot's claims still
        # exist.
        alive = {(job.token, job.index) for job in jobs if job.alive and not job.waiting}
        points = self._reader.waiting()
        for stem, holder in queue.claims_of_others(self._sweep, ""):
            token, index = submissions.token_of_pilot(holder), submissions.index_of_pilot(holder)
            orphan = self._liveness.judge(holder) == "dead"  # also true of a pilot that is stalled while its job runs
            if token is not None:
                orphan = orphan or ((token, index) not in alive and not self._tracker.expected(token))
            if orphan and (point := self._claimed_point(stem, holder)) is not None:
                points.append(point)
        return [
            point
            for point in points
            if point.method == self._settings.method
            and kind_of(point.experiment, nodes_needed(point, self._settings.num_devices)) not in paused
        ]

    def _stalled(self, jobs: Sequence[Job]) -> Counter[int]:
        """Stalled pilots by shape that hold points while their job runs. They will not run waiting points."""
        running = {(job.token, job.index) for job in jobs if job.alive and not job.waiting}
        stalled: Counter[int] = Counter()
        for holder in {holder for _, holder in queue.claims_of_others(self._sweep, "")}:
            token, index = submissions.token_of_pilot(holder), submissions.index_of_pilot(holder)
            if token is None or (token, index) not in running or not self._liveness.stalled(holder):
                continue
            nodes = self._tracker.shape(token)
            restarted = pilot_state.state_path(self._sweep, submissions.restarted_pilot_id(holder))
            if nodes is not None and not restarted.exists():
                stalled[nodes] += 1
                if holder not in self._reported_stalled:
                    self._reported_stalled.add(holder)
                    self._report(f"pilot {holder} is stalled; another will run its points")
        return stalled

    def _claimed_point(self, stem: str, holder: str) -> Point | None:
        if stem not in self._claimed:
            point = queue.claimed_point(self._sweep, stem, holder, self._report)
            if point is None:
                return None
            self._claimed[stem] = point
        return self._claimed[stem]

    def _cancel_idle(self, jobs: Sequence[Job], demand: Demand) -> None:
        """Cancel pilots that wait in Slurm's queue and whose shape has no point left."""
        idle = [job for job in jobs if job.waiting and self._tracker.shape(job.token) not in demand.points]
        if idle and self.client.cancel(idle, only_waiting=True):
            self._report(f"cancelled {plural(len(idle), 'waiting pilot')}: no point is left to run")
