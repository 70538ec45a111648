"""`Cluster`: a simulated Slurm with the states, delays and forgetfulness of a real one, for launcher code in a `World`.

It answers the commands that `launchers.slurm.client` and `launchers.slurm.sbatch` call. Every second it looks at
its jobs, as slurmctld does; while the controller is away it does not, and everything that has happened meanwhile is
noticed when it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from launchers.slurm.batch_file import PilotJob
from launchers.slurm.client import SlurmClient
from launchers.slurm.options import SlurmOptions
from launchers.slurm.sbatch import JobLimitReached, SubmissionUncertain
from tests.launchers.virtual_time import World

KILL_WAIT_S = 30.0
MIN_JOB_AGE_S = 300.0
"""Seconds for which an ended job is still shown."""
GONE = "Unable to contact slurm controller (connect failure)"


class Run(Protocol):
    """What one start of a job runs."""

    status: int | None
    """Exit status; None while it runs."""

    def warn(self) -> None:
        """SIGTERM or SIGUSR2."""

    def kill(self) -> None:
        """SIGKILL to all of it, on every node."""

    def wants_requeue(self) -> bool:
        """Whether the pilot has asked the job's script to requeue the job."""


@dataclass(eq=False, slots=True)
class Machine:
    """One node."""

    name: str
    up: bool = True
    drained: bool = False
    taken_until: float = 0.0
    """Until when other users' jobs hold it."""
    boots: int = 0


@dataclass(eq=False, slots=True)
class SlurmJob:
    """One element of an array, or a single job."""

    number: int
    index: int
    count: int
    token: str
    job_name: str
    width: int
    time_s: float
    warning_s: float
    excluded: frozenset[str]
    state: str = "PENDING"
    reason: str = "None"
    machines: tuple[Machine, ...] = ()
    restarts: int = 0
    eligible_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    run: Run | None = None
    warned: bool = False
    ending: str = ""
    """State that the job will have when its processes have ended; empty while it runs."""
    kill_at: float = float("inf")
    requeued: bool = False
    """Whether it waits again after it has ended."""

    @property
    def name(self) -> str:
        return f"{self.number}_{self.index}" if self.count > 1 else str(self.number)

    @property
    def over(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "COMPLETING")


@dataclass(eq=False)
class Cluster:
    """``start`` starts the processes of a job."""

    world: World
    size: int
    start: Callable[[SlurmJob], Run]
    machines: dict[str, Machine] = field(default_factory=dict)
    jobs: list[SlurmJob] = field(default_factory=list)
    orphans: list[Run] = field(default_factory=list)
    """What still runs of jobs that the controller does not know any more."""
    away: bool = False
    flaky: float = 0.0
    """Share of the commands that fail now."""
    next_number: int = 100
    submitted: int = 0

    def __post_init__(self) -> None:
        self.machines = {name: Machine(name) for name in (f"node{number:03d}" for number in range(1, self.size + 1))}
        self.world.at(1.0, self._look)

    # Commands

    def call(self, client: SlurmClient, command: Sequence[str]) -> str | None:
        """Replaces `SlurmClient._call`."""
        self.world.sleep(0.05)
        if self.away:
            self.world.sleep(min(9.0, client._call_limit_s))
        if self.away or self.world.random.random() < self.flaky:
            client.complaint = f"{command[0]}: error: {GONE}"
            return None
        if command[0] == "sacct":
            client.complaint = "Slurm accounting storage is disabled"
            return None
        return self._answer(client, command)

    def _answer(self, client: SlurmClient, command: Sequence[str]) -> str | None:
        words = list(command)
        by_name = {job.name: job for job in self.jobs}
        if words[0] == "squeue" and "-j" in words:
            job = by_name.get(words[words.index("-j") + 1])
            if job is None or job.over:
                client.complaint = "slurm_load_jobs error: Invalid job id specified"
                return None
            if words[-1] == "%T":
                return job.state
            return f"{_clock(job.started_at + job.time_s - self.world.now)}|{_clock(job.time_s)}"
        if words[0] == "squeue":
            return "\n".join(map(_line, self.jobs))
        if words[0] == "scancel":
            only_waiting = "--state=PENDING" in words
            for job in [by_name[word] for word in words[1:] if word in by_name]:
                if job.state == "PENDING" or not only_waiting:
                    self.cancel(job)
            return ""
        if words[:2] == ["scontrol", "requeue"]:
            job = by_name[words[2]]
            self.end(job, "REQUEUED", requeue=True)
            return ""
        if words[:2] == ["scontrol", "update"]:
            excluded = frozenset(words[-1].partition("=")[2].split(","))
            for name in words[2].partition("=")[2].split(","):
                if name in by_name:
                    by_name[name].excluded = excluded
            return ""
        if words[:3] == ["scontrol", "show", "config"]:
            return "MaxArraySize            = 1001\nMaxJobCount             = 10000"
        if words[:2] == ["scontrol", "release"]:
            return ""
        raise AssertionError(f"no such command here: {words}")

    def sbatch(self, job: PilotJob, options: SlurmOptions) -> str:
        """Replaces `launchers.slurm.sbatch.submit`. The command goes on when its caller is killed."""
        world = self.world
        number: list[int] = []
        if not self.away:
            world.at(world.random.uniform(0.1, 3.0), lambda: number.append(self._accept(job, options)))
        world.sleep(9.0 if self.away else 3.1)
        if not number:
            raise SubmissionUncertain(GONE)
        if world.random.random() < self.flaky:
            raise SubmissionUncertain("Socket timed out on send/recv operation")
        if len([one for one in self.jobs if not one.over]) > 40:
            raise JobLimitReached("QOSMaxSubmitJobPerUserLimit")
        return str(number[0])

    def _accept(self, job: PilotJob, options: SlurmOptions) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        self.submitted += job.count
        for index in range(job.count):
            self.jobs.append(
                SlurmJob(
                    number=number,
                    index=index,
                    count=job.count,
                    token=job.token,
                    job_name=job.job_name,
                    width=job.nodes,
                    time_s=60.0 * options.time_min,
                    warning_s=float(options.signal_delay_s),
                    excluded=frozenset(job.excluded),
                )
            )
        return number

    # What people and machines do to jobs

    def cancel(self, job: SlurmJob) -> None:
        if job.state == "PENDING":
            job.state, job.ended_at = "CANCELLED", self.world.now
        elif job.state == "RUNNING":
            self.end(job, "CANCELLED")

    def end(self, job: SlurmJob, state: str, *, requeue: bool = False, kill_wait_s: float = KILL_WAIT_S) -> None:
        """Begin to end a running job: a warning now, SIGKILL later."""
        if job.state != "RUNNING" or job.ending:
            return
        assert job.run is not None
        job.ending, job.requeued = state, requeue
        job.kill_at = self.world.now + kill_wait_s
        if state != "PREEMPTED":
            job.state = "COMPLETING"
        job.run.warn()

    def lose_node(self, job: SlurmJob) -> None:
        """The controller takes a node of the job for lost, whether it is or not, and requeues the job. What runs on
        nodes that it does not reach goes on for a while."""
        if job.state not in ("RUNNING", "COMPLETING") or job.run is None:
            return
        run = job.run
        self.orphans.append(run)
        self.world.at(self.world.random.uniform(5.0, 200.0), run.kill)
        self._over(job, "NODE_FAIL", requeue=True)

    def forget(self, since_s: float) -> int:
        """Lose the jobs submitted or changed in the last seconds, as a controller that starts with an old state. Their
        numbers are given out again."""
        lost = [job for job in self.jobs if not job.over and job.started_at > self.world.now - since_s]
        for job in lost:
            if job.run is not None:
                self.orphans.append(job.run)
                self.world.at(self.world.random.uniform(5.0, 200.0), job.run.kill)
        self.jobs = [job for job in self.jobs if job not in lost]
        if lost:
            self.next_number = min(job.number for job in lost)
        return len(lost)

    def crash(self, machine: Machine) -> None:
        """Power loss. The pilots' own part is in `Run`."""
        machine.up = False

    def reboot(self, machine: Machine) -> None:
        machine.up, machine.boots = True, machine.boots + 1

    # The controller

    def _look(self) -> None:
        self.world.at(1.0, self._look)
        if self.away:
            return
        now = self.world.now
        for job in list(self.jobs):
            if job.state in ("RUNNING", "COMPLETING"):
                self._look_at(job)
            elif job.over and now - job.ended_at > MIN_JOB_AGE_S:
                self.jobs.remove(job)
        self.orphans = [run for run in self.orphans if run.status is None]
        for job in self.jobs:
            if job.state == "PENDING":
                self._try_to_start(job)

    def _look_at(self, job: SlurmJob) -> None:
        assert job.run is not None
        now, run = self.world.now, job.run
        if run.status is not None:
            if run.wants_requeue() and not job.ending:
                job.ending, job.requeued = "REQUEUED", True
            self._over(job, job.ending or ("COMPLETED" if run.status == 0 else "FAILED"), requeue=job.requeued)
            return
        if now >= job.kill_at:
            run.kill()
        left_s = job.started_at + job.time_s - now
        if left_s <= job.warning_s and not job.warned:
            job.warned = True
            run.warn()
        if left_s <= -30.0:
            self.end(job, "TIMEOUT")

    def _over(self, job: SlurmJob, state: str, *, requeue: bool) -> None:
        now = self.world.now
        job.state, job.ended_at, job.run, job.ending = state, now, None, ""
        job.kill_at, job.warned, job.requeued = float("inf"), False, False
        held, job.machines = job.machines, ()
        for machine in held:  # the epilogue
            machine.taken_until = max(machine.taken_until, now + self.world.random.uniform(0.5, 3.0))
        if requeue:
            job.restarts += 1
            job.eligible_at = now + self.world.random.choice((3.0, 12.0, 120.0))
            self.world.at(self.world.random.choice((0.0, 2.0)), lambda: self._wait_again(job))

    def _wait_again(self, job: SlurmJob) -> None:
        if job.over:
            job.state, job.reason = "PENDING", "BeginTime"

    def _try_to_start(self, job: SlurmJob) -> None:
        now = self.world.now
        if now < job.eligible_at:
            return
        used = {machine for other in self.jobs for machine in other.machines}
        free = [
            machine
            for machine in self.machines.values()
            if machine.up
            and not machine.drained
            and machine.taken_until <= now
            and machine not in used
            and machine.name not in job.excluded
        ]
        if len(self.machines) - len(job.excluded & self.machines.keys()) < job.width:
            job.reason = "BadConstraints"
        else:
            job.reason = "Resources" if len(free) < job.width else "None"
        if len(free) >= job.width:
            job.machines = tuple(self.world.random.sample(free, job.width))
            job.state, job.started_at = "RUNNING", now
            job.run = self.start(job)


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _line(job: SlurmJob) -> str:
    index = str(job.index) if job.count > 1 else "N/A"
    nodes = ",".join(machine.name for machine in job.machines)
    fields = (job.number, index, job.name, job.state, job.reason, nodes, job.job_name, f"ultrasweep:{job.token}")
    return "|".join(map(str, fields))
