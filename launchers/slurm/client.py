"""Calls the few commands of Slurm that are needed, each with a time limit; None where Slurm does not answer.

One ``squeue`` shows all jobs of the sweep's users. ``sacct`` is called only for jobs that squeue no longer shows, and
is not required. A job is recognised by the token in its comment or name, never by its id.
"""

from __future__ import annotations

import os
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
"""Job ids in one call."""

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
"""States of a job that has ended, unless Slurm requeues it. All others count as alive, also unknown ones."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_NEVER = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|AccountNotAllowed|QOSNotAllowed|"
    r"InvalidAccount|InvalidQOS|QOSTimeLimit|MaxMemPerLimit|DependencyNeverSatisfied|ReservationDeleted|"
    r"(QOS|Assoc)Max\w*PerJob(Limit)?|QOSMin\w+"
)
"""Reasons for waiting that do not pass: the job asks for what its partition, account or QOS never gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One pilot's job as Slurm sees it now."""

    token: str
    index: int
    """In its array; 0 for a single job."""
    name: str
    """As ``squeue`` prints it and ``scancel`` takes it: ``1234_5`` in an array. A pilot's state file holds it, too."""
    array_id: str
    """Of the whole array; ``name`` of a single job."""
    state: str
    reason: str
    nodes: str
    """Node list of a running job, in Slurm's short form."""

    @property
    def alive(self) -> bool:
        return self.state not in DEAD

    @property
    def ending(self) -> bool:
        """It has been ended, and Slurm still cleans up. It may be queued again under its number, mostly it is not."""
        return self.state == "COMPLETING"

    @property
    def never_starts(self) -> bool:
        """It waits, and by the reason that Slurm gives it will wait for ever."""
        return self.waiting and bool(_NEVER.fullmatch(self.reason))

    @property
    def held_by_slurm(self) -> bool:
        """Slurm could not start it again after a failure of Slurm's own, and holds it until it is released."""
        return self.waiting and "requeued" in self.reason.lower() and "held" in self.reason.lower()

    @property
    def waiting(self) -> bool:
        return self.state in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one job ended, as the accounting says."""

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
    """Jobs of all users that Slurm keeps at a time; each element of an array counts."""

    @property
    def largest_array(self) -> int:
        """Elements of the largest array to submit. Its highest index must be below MaxArraySize; 0 and 1 mean that
        arrays are off. At most a quarter of all jobs, so that other users can submit, too."""
        return max(1, min(self.max_array_size, self.max_job_count // 4))


_DEFAULT_LIMITS = Limits(max_array_size=1001, max_job_count=10000)

# The comment stands last, because it may hold anything. A line without these fields is another user's job.
# %A does not help: waiting elements of an array share one number, and cancelling it would cancel all of them.
_FIELDS = "%F|%K|%i|%T|%r|%N|%j|%k"
_NAME = re.compile(r"[0-9]+(_[0-9]+)?")


class SlurmUnreachable(UltrasweepError):
    """Slurm does not answer, and nothing can be done without it."""


def jobs_of(sweep: SweepDir) -> list[Job] | None:
    """The jobs of this sweep's pilots that squeue shows, some of them ended; None when squeue does not answer."""
    submissions = all_submissions(sweep)
    if not submissions:
        return []
    tokens = {one.token for one in submissions}
    jobs = SlurmClient(cluster_of(sweep)).jobs({one.uid for one in submissions})
    return [job for job in jobs if job.token in tokens] if jobs is not None else None


def cluster_for(sweep: SweepDir) -> str:
    """The cluster to which pilots of a sweep are submitted: that of those which may be there, or else the user's."""
    known = cluster_of(sweep, only_open=True)
    return cluster_in(os.environ) if known is None else known


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
        """All jobs of these users that carry a token; None when squeue does not answer."""
        users = ",".join(str(uid) for uid in sorted(set(uids)))
        out = self._call(["squeue", "-h", "-a", "-r", "-t", "all", "-u", users, "-o", _FIELDS])
        if out is None:
            return None
        return [job for line in out.splitlines() if (job := _job(line)) is not None]

    def endings(self, submissions: Sequence[Submission]) -> list[Ending] | None:
        """How these submissions' jobs ended, each restart on its own; None where there is no accounting."""
        if self._no_accounting or shutil.which("sacct") is None or not submissions:
            return None
        tokens = {one.token for one in submissions}
        # From a day before the first submission, since clocks and time zones of login nodes may differ.
        start = time.strftime("%Y-%m-%d", time.localtime(min(one.created_at for one in submissions) - 86400))
        found: list[Ending] = []
        for at in range(0, len(submissions), _CHUNK):
            names = ",".join(one.job_name for one in submissions[at : at + _CHUNK])
            command = ["sacct", "-n", "-P", "-D", "-X", "-a", "-S", start, "--name", names]
            out = self._call([*command, "-o", "JobID,State,ExitCode,JobName"])
            if out is None:
                self._no_accounting = "disabled" in self.complaint.lower()
                return None
            found += [ending for line in out.splitlines() if (ending := _ending(line)) and ending.token in tokens]
        return found

    def cancel(self, jobs: Sequence[Job], *, only_waiting: bool = False) -> bool:
        """Call ``scancel``; False when it failed. Jobs that have ended meanwhile are no failure. ``only_waiting``: do
        not cancel those that have started meanwhile."""
        command = ["scancel", *(["--state=PENDING"] if only_waiting else [])]
        names = [job.name for job in jobs]
        chunks = (names[at : at + _CHUNK] for at in range(0, len(names), _CHUNK))
        return None not in [self._call([*command, *chunk], harmless="invalid job id") for chunk in chunks]

    def release(self, jobs: Sequence[Job]) -> bool:
        """Let jobs run that are held in Slurm's queue; False when that failed."""
        return self._call(["scontrol", "release", ",".join(job.name for job in jobs)]) is not None

    def exclude(self, jobs: Sequence[Job], nodes: Sequence[str]) -> bool:
        """Let waiting jobs not get these nodes, in place of those that they excluded before; False if that fails."""
        names = [job.name for job in jobs]
        chunks = (names[at : at + _CHUNK] for at in range(0, len(names), _CHUNK))
        words = [f"ExcNodeList={','.join(nodes)}"]
        return None not in [self._call(["scontrol", "update", f"JobId={','.join(chunk)}", *words]) for chunk in chunks]

    def requeue(self, name: str) -> bool:
        """Make Slurm start this running job again later under its number. False when Slurm refuses, or when the job is
        being cancelled: a job that a user has ended must stay ended."""
        state = self._call(["squeue", "-h", "-j", name, "-o", "%T"])
        if state is None or state.strip() != "RUNNING":
            return False
        return self._call(["scontrol", "requeue", name]) is not None

    def hostnames(self, nodes: str) -> list[str]:
        """The names in one of Slurm's lists of nodes, such as ``node[01-04,17]``; empty when it cannot be read."""
        if not re.search(r"[\[,]", nodes):
            return [nodes] if nodes else []
        return (self._call(["scontrol", "show", "hostnames", nodes]) or "").split()

    def limits(self) -> Limits | None:
        """The cluster's limits; None when Slurm does not answer now."""
        if self._limits is None and (out := self._call(["scontrol", "show", "config"])) is not None:
            found = dict(re.findall(r"^(MaxArraySize|MaxJobCount)\s*=\s*(\d+)\s*$", out, re.MULTILINE))
            self._limits = Limits(
                max_array_size=int(found.get("MaxArraySize", _DEFAULT_LIMITS.max_array_size)),
                max_job_count=int(found.get("MaxJobCount", _DEFAULT_LIMITS.max_job_count)),
            )
        return self._limits

    def _call(self, command: Sequence[str], harmless: str | None = None) -> str | None:
        """Standard output, or None when the command failed or took too long. A failure counts as success when each line
        of its error output holds ``harmless``."""
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


def default_limits() -> Limits:
    """Slurm's default limits, for where no cluster answers."""
    return _DEFAULT_LIMITS


def short(state: str) -> str:
    """``CANCELLED by 0`` and ``CANCELLED+`` are ``CANCELLED``."""
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


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    process.communicate()
