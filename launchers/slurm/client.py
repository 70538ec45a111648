"""Our own client of Slurm: few calls, each with a time limit, and None where Slurm does not answer.

One ``squeue`` shows all jobs of the sweep's users. ``sacct`` is asked only about what squeue no longer shows, and
everything works where there is none. A job is recognised by the token in its comment or name, never by its id.
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

from launchers.state.submissions import Submission, all_submissions, token_in
from launchers.state.sweep_dir import SweepDir

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
"""States that are an end, unless Slurm requeues the job. All others (also ones we do not know) count as alive."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One pilot's job as Slurm sees it now."""

    token: str
    index: int
    """In its array; 0 for a single job."""
    name: str
    """As ``squeue`` prints it and ``scancel`` takes it: ``1234_5`` in an array. Pilots know themselves by it."""
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
    def stuck(self) -> bool:
        """Slurm could not start it again after a failure of its own, and waits for somebody to say that it may."""
        return self.waiting and "requeued" in self.reason.lower() and "held" in self.reason.lower()

    @property
    def waiting(self) -> bool:
        return self.state in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one job ended, by the accounting."""

    token: str
    array_id: str
    name: str
    state: str
    exit_code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the cluster."""

    max_array_size: int
    max_job_count: int
    """Jobs that Slurm keeps at a time, of all users together; each element of an array is one."""

    @property
    def largest_array(self) -> int:
        """Its highest index must stay below MaxArraySize, of which 0 and 1 mean that there are no arrays. No more than
        a quarter of all jobs, so that others can submit, too."""
        return max(1, min(self.max_array_size, self.max_job_count // 4))


_DEFAULT_LIMITS = Limits(max_array_size=1001, max_job_count=10000)

# Free text last: a comment may hold anything. A line that does not look like one of ours is somebody else's.
# %A is no use: elements of an array that wait share one number, and cancelling it would cancel them all.
_FIELDS = "%F|%K|%i|%T|%r|%N|%j|%k"
_NAME = re.compile(r"[0-9]+(_[0-9]+)?")


def jobs_of(sweep: SweepDir) -> list[Job] | None:
    """What squeue says of this sweep's pilots, some ended ones among them; None when it does not answer."""
    submissions = all_submissions(sweep)
    if not submissions:
        return []
    tokens = {one.token for one in submissions}
    jobs = SlurmClient().jobs({one.uid for one in submissions})
    return [job for job in jobs if job.token in tokens] if jobs is not None else None


class SlurmClient:
    """Calls Slurm's commands. ``complaint`` holds what the last failed call said."""

    def __init__(self, call_limit_s: float = CALL_LIMIT_S) -> None:
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
        """Every attempt that the accounting knows of these submissions' jobs; None where there is no accounting."""
        if self._no_accounting or shutil.which("sacct") is None or not submissions:
            return None
        tokens = {one.token for one in submissions}
        # A day earlier than the earliest: the clocks of two login nodes and their time zones may differ.
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
        """``scancel``; False when Slurm did not take it. Jobs that have ended meanwhile are no failure.
        ``only_waiting``: spare those that have started meanwhile."""
        command = ["scancel", *(["--state=PENDING"] if only_waiting else [])]
        names = [job.name for job in jobs]
        chunks = (names[at : at + _CHUNK] for at in range(0, len(names), _CHUNK))
        return None not in [self._call([*command, *chunk], also="invalid job id") for chunk in chunks]

    def release(self, jobs: Sequence[Job]) -> bool:
        """Let jobs that are held in the queue run."""
        return self._call(["scontrol", "release", ",".join(job.name for job in jobs)]) is not None

    def requeue(self, name: str) -> bool:
        """Have Slurm start this running job again later under its number. False when it may not be, or when it is being
        cancelled: a job that somebody has ended must stay ended."""
        state = self._call(["squeue", "-h", "-j", name, "-o", "%T"])
        if state is None or state.strip() != "RUNNING":
            return False
        return self._call(["scontrol", "requeue", name]) is not None

    def limits(self) -> Limits | None:
        """None when the cluster cannot be asked now."""
        if self._limits is None and (out := self._call(["scontrol", "show", "config"])) is not None:
            found = dict(re.findall(r"^(MaxArraySize|MaxJobCount)\s*=\s*(\d+)\s*$", out, re.MULTILINE))
            self._limits = Limits(
                max_array_size=int(found.get("MaxArraySize", _DEFAULT_LIMITS.max_array_size)),
                max_job_count=int(found.get("MaxJobCount", _DEFAULT_LIMITS.max_job_count)),
            )
        return self._limits

    def _call(self, command: Sequence[str], also: str | None = None) -> str | None:
        """Standard output, or None when the command failed or took too long. A failure whose every line holds ``also``
        counts as success."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C in the terminal is ours to answer, and nothing outlives the limit
                env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            )
        except OSError as error:
            self.complaint = f"{command[0]}: {error.strerror or error}"
            return None
        try:
            out, err = process.communicate(timeout=self._call_limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            self.complaint = f"{command[0]} did not answer within {self._call_limit_s:.0f} s"
            return None
        except BaseException:
            _end(process)
            raise
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        if process.returncode != 0 and not (also and lines and all(also in line.lower() for line in lines)):
            self.complaint = lines[-1] if lines else f"{command[0]} ended with status {process.returncode}"
            return None
        return out


def default_limits() -> Limits:
    """Slurm's own, where no cluster can be asked."""
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


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    process.communicate()
