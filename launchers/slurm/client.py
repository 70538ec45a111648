"""Calls the few Slurm commands that pilots need, each with a time limit; None where Slurm does not answer.

One ``squeue`` shows all jobs of the sweep's users. ``sacct`` is called only for jobs that squeue no longer shows, and
is not required. A job is recognised by the token in its comment or name, never by its id.
"""

from __future__ import annotations

import contextlib
import math
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launchers.slurm.environment import cluster_in, command_environment, several_clusters
from launchers.state.submissions import Submission, all_submissions, cluster_of, token_in
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError

CALL_LIMIT_S = 20.0
_CHUNK = 200
"""Maximum number of job ids in one call."""

DEAD = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of a job that has ended, unless Slurm requeues it. All other states, also unknown ones, count as alive."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_NEVER = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|AccountNotAllowed|QOSNotAllowed|"
    r"InvalidAccount|InvalidQOS|QOSTimeLimit|MaxMemPerLimit|DependencyNeverSatisfied|ReservationDeleted|"
    r"(QOS|Assoc)Max\w*PerJob(Limit)?|QOSMin\w+"
)
"""Permanent reasons for waiting: the job asks for more than its partition, account or QOS ever gives."""
_HELD_BY_SLURM = ("launch failed requeued held", "launch failure limit exceeded requeued held")
"""Reasons of jobs that Slurm holds because their start has failed. ``job requeued in held state`` is not one of them: a
person has asked for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One pilot's job as Slurm shows it now."""

    token: str
    index: int
    """Index in its array; 0 for a single job."""
    name: str
    """Job id in the form of ``squeue`` and ``scancel``: ``1234_5`` in an array. A pilot's state file contains it
    too."""
    array_id: str
    """Id of the whole array; ``name`` for a single job."""
    state: str
    reason: str
    nodes: str
    """Node list of a running job, in Slurm's short form."""

    @property
    def alive(self) -> bool:
        return self.state not in DEAD

    @property
    def ending(self) -> bool:
        """Whether the job has ended and Slurm still cleans up. Slurm may requeue it under its number, but mostly does
        not."""
        return self.state == "COMPLETING"

    @property
    def never_starts(self) -> bool:
        """Whether the job waits for a reason that is permanent."""
        return self.waiting and bool(_NEVER.fullmatch(self.reason))

    @property
    def held_by_slurm(self) -> bool:
        """Whether Slurm holds the job until it is released, because Slurm itself failed to restart it."""
        return self.waiting and self.reason.replace("_", " ") in _HELD_BY_SLURM

    @property
    def waiting(self) -> bool:
        return self.state in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """End of one job according to the accounting."""

    token: str
    array_id: str
    name: str
    state: str
    exit_code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the cluster."""

    max_array_size: int
    max_job_count: int
    """Jobs of all users that Slurm keeps at the same time; each element of an array counts."""

    @property
    def largest_array(self) -> int:
        """Number of elements in the largest array to submit. The highest index must be below MaxArraySize; 0 and 1 mean
        that arrays are disabled. At most a quarter of all jobs, so that other users can submit too."""
        return max(1, min(self.max_array_size, self.max_job_count // 4))


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Times of a running job in seconds, infinite without a time limit."""

    left_s: float
    """Seconds until its end, by this machine's clock and the time of the job's start on the controller's clock."""
    limit_s: float | None
    """Its time limit."""


_DEFAULT_LIMITS = Limits(max_array_size=1001, max_job_count=10000)

# The comment is the last field, because it may contain any text. A line without these fields is another user's job. %A
# does not help: waiting elements of an array share one number, and cancelling it would cancel all of them.
_FIELDS = "%F|%K|%i|%T|%r|%N|%j|%k"
_NAME = re.compile(r"[0-9]+(_[0-9]+)?")
_TIME = re.compile(r"(?:(?:([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]+)")
_SPECIAL_TIMES = {"UNLIMITED": math.inf, "INVALID": 0.0}
"""Times left that squeue writes in a word. ``INVALID`` is a negative time: the limit is over."""


class SlurmUnreachable(UltrasweepError):
    """Slurm does not answer, and the command cannot continue without it."""


def jobs_of(sweep: SweepDir) -> list[Job] | None:
    """Jobs of this sweep's pilots that squeue shows, some of them ended; None when squeue does not answer."""
    submissions = all_submissions(sweep)
    if not submissions:
        return []
    tokens = {one.token for one in submissions}
    jobs = SlurmClient(cluster_of(sweep)).jobs({one.uid for one in submissions})
    return [job for job in jobs if job.token in tokens] if jobs is not None else None


def cluster_for(sweep: SweepDir) -> str:
    """The cluster to which pilots of a sweep are submitted: that of pilots which may still exist, or else the
    user's."""
    open_cluster = cluster_of(sweep, only_open=True)
    return cluster_in(os.environ) if open_cluster is None else open_cluster


class SlurmClient:
    """Calls Slurm's commands. ``complaint`` is the error message of the last failed call."""

    def __init__(self, cluster: str | None = None, *, call_limit_s: float = CALL_LIMIT_S) -> None:
        """``cluster``: as in `launchers.slurm.environment.command_environment`."""
        self.cluster = cluster
        self._call_limit_s = call_limit_s
        self._limits: Limits | None = None
        self._no_accounting = False
        self.complaint = ""

    def jobs(self, uids: Iterable[int]) -> list[Job] | None:
        """All jobs of these users whose comment or name has a token; None when squeue does not answer."""
        users = ",".join(str(uid) for uid in sorted(_known_users(uids)))
        out = self._call(["squeue", "-h", "-a", "-r", "-t", "all", "-u", users, "-o", _FIELDS])
        if out is None:
            return None
        return [job for line in out.splitlines() if (job := _job(line)) is not None]

    def endings(self, submissions: Sequence[Submission]) -> list[Ending] | None:
        """Ends of these submissions' jobs, one entry per restart; None where there is no accounting."""
        if self._no_accounting or shutil.which("sacct") is None or not submissions:
            return None
        tokens = {one.token for one in submissions}
        # Query from a day before the first submission, since clocks and time zones of login nodes may differ.
        start = time.strftime("%Y-%m-%d", time.localtime(min(one.created_at for one in submissions) - 86400))
        endings: list[Ending] = []
        for at in range(0, len(submissions), _CHUNK):
            names = ",".join(one.job_name for one in submissions[at : at + _CHUNK])
            command = ["sacct", "-n", "-P", "-D", "-X", "-a", "-S", start, "--name", names]
            out = self._call([*command, "-o", "JobID,State,ExitCode,JobName"])
            if out is None:
                self._no_accounting = "disabled" in self.complaint.lower()
                return None
            endings += [ending for line in out.splitlines() if (ending := _ending(line)) and ending.token in tokens]
        return endings

    def cancel(self, jobs: Sequence[Job], *, only_waiting: bool = False) -> bool:
        """Call ``scancel``; False when it failed. Jobs that have already ended are not a failure. ``only_waiting``: do
        not cancel jobs that have started meanwhile."""
        command = ["scancel", *(["--state=PENDING"] if only_waiting else [])]
        names = [job.name for job in jobs]
        chunks = (names[at : at + _CHUNK] for at in range(0, len(names), _CHUNK))
        return None not in [self._call([*command, *chunk], harmless="invalid job id") for chunk in chunks]

    def release(self, jobs: Sequence[Job]) -> bool:
        """Release jobs that are held in Slurm's queue; False when that failed."""
        return self._call(["scontrol", "release", ",".join(job.name for job in jobs)]) is not None

    def exclude(self, jobs: Sequence[Job], nodes: Sequence[str]) -> bool:
        """Exclude these nodes from waiting jobs, in place of the nodes excluded before; False when that failed."""
        names = [job.name for job in jobs]
        chunks = (names[at : at + _CHUNK] for at in range(0, len(names), _CHUNK))
        words = [f"ExcNodeList={','.join(nodes)}"]
        return None not in [self._call(["scontrol", "update", f"JobId={','.join(chunk)}", *words]) for chunk in chunks]

    def requeue(self, name: str) -> str | None:
        """Make Slurm restart this running job later under its number. Returns None, or why it will not: Slurm refuses,
        or the job is being cancelled. A job that a user has ended must stay ended."""
        state = self._call(["squeue", "-h", "-j", name, "-o", "%T"])
        if state is not None and state.strip() != "RUNNING":
            return f"its state is {state.strip() or 'unknown to Slurm'}"
        if state is None or self._call(["scontrol", "requeue", name]) is None:
            return self.complaint
        return None

    def time_left(self, name: str) -> TimeLeft | None:
        """How long Slurm still lets this running job run; None where it does not say."""
        out = self._call(["squeue", "-h", "-j", name, "-o", "%L|%l"])
        left, _, limit = (out or "").strip().partition("|")
        left_s = _seconds(left)
        return TimeLeft(left_s, _seconds(limit)) if left_s is not None else None

    def fields_of(self, name: str) -> dict[str, str]:
        """What ``scontrol show job`` says about one job, by its names (``JobState``, ``ExitCode`` ...); empty where it
        says nothing."""
        out = self._call(["scontrol", "show", "job", "-o", name])
        return dict(re.findall(r"(?:^|\s)([A-Z][A-Za-z:/]*)=(\S*)", out or ""))

    def limits(self) -> Limits | None:
        """The cluster's limits; None when Slurm does not answer now."""
        if self._limits is None and (out := self._call(["scontrol", "show", "config"])) is not None:
            config = dict(re.findall(r"^(MaxArraySize|MaxJobCount)\s*=\s*(\d+)\s*$", out, re.MULTILINE))
            self._limits = Limits(
                max_array_size=int(config.get("MaxArraySize", _DEFAULT_LIMITS.max_array_size)),
                max_job_count=int(config.get("MaxJobCount", _DEFAULT_LIMITS.max_job_count)),
            )
        return self._limits

    def _call(self, command: Sequence[str], harmless: str | None = None) -> str | None:
        """Standard output, or None when the command failed or took too long. A failure counts as success when each line
        of its error output contains ``harmless``."""
        environment = command_environment(os.environ, self.cluster)
        if trouble := several_clusters(environment):
            self.complaint = trouble
            return None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only this process, and the limit ends the command's children
                env=environment,
            )
        except OSError as error:
            self.complaint = f"{command[0]}: {error.strerror or error}"
            return None
        try:
            out, err = process.communicate(timeout=self._call_limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            self.complaint = f"{command[0]} did not answer within {self._call_limit_s:.0f} s"
            return None
        except BaseException:
            _kill(process)
            raise
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        if process.returncode != 0 and not (harmless and lines and all(harmless in line.lower() for line in lines)):
            self.complaint = lines[-1] if lines else f"{command[0]} ended with status {process.returncode}"
            return None
        return out


def _known_users(uids: Iterable[int]) -> set[int]:
    """The users that this machine knows, and this user: squeue refuses the whole question for an unknown one, such as a
    user who has left or one in a record that somebody has edited."""
    known = {uid for uid in uids if uid == os.getuid()}
    for uid in set(uids) - known:
        with contextlib.suppress(KeyError, OverflowError):
            known.add(pwd.getpwuid(uid).pw_uid)
    return known or {os.getuid()}


def default_limits() -> Limits:
    """Slurm's default limits, used where no cluster answers."""
    return _DEFAULT_LIMITS


def short(state: str) -> str:
    """First word of a state: ``CANCELLED by 0`` and ``CANCELLED+`` are ``CANCELLED``."""
    return state.split(" ")[0].rstrip("+")


def _job(line: str) -> Job | None:
    fields = line.split("|", 7)
    if len(fields) != 8:
        return None
    array_id, index, name, state, reason, nodes, job_name, comment = fields
    token = token_in(comment) or token_in(job_name)
    if token is None or not array_id.isdigit() or not _NAME.fullmatch(name):
        return None
    return Job(
        token=token,
        index=int(index) if index.isdigit() else 0,
        name=name,
        array_id=array_id,
        state=short(state),
        reason=reason,
        nodes=nodes,
    )


def _ending(line: str) -> Ending | None:
    fields = line.split("|")
    if len(fields) != 4 or (token := token_in(fields[3])) is None:
        return None
    array_id = re.match(r"\d+", fields[0])
    if array_id is None:
        return None
    return Ending(token=token, array_id=array_id[0], name=fields[0], state=short(fields[1]), exit_code=fields[2])


def _seconds(time_left: str) -> float | None:
    """Seconds in squeue's form of a time, ``1-02:03:04``; None for other text, such as ``NOT_SET``."""
    if time_left in _SPECIAL_TIMES:
        return _SPECIAL_TIMES[time_left]
    match = _TIME.fullmatch(time_left)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    process.communicate()
