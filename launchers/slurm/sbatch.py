"""Submits the batch file of pilots with sbatch, which submitit runs, and keeps the file under submitit's name for it.

submitit's own `submit` is not used: its job loads a pickle that the submitter moves into place after sbatch. A
submitter that is killed then, or a file system that fails then, would leave a job that cannot start.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Collection

from submitit import SlurmJob
from submitit.core.utils import FailedJobError
from submitit.helpers import CommandFunction

from launchers.slurm.batch_file import PilotJob, parameters, submission_text
from launchers.slurm.environment import CLUSTERS, unset_for_sbatch
from launchers.slurm.options import SlurmOptions
from results.errors import UltrasweepError
from results.text.numbers import listed

SBATCH_LIMIT_S = 150
"""Time limit of sbatch in seconds. It needs 9 s to notice that slurmctld is down, and retries for 120 s where the
cluster holds too many jobs."""
_KILL_AFTER_S = 5
_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
"""Commands without which no pilot can be submitted, seen or ended. Others are used where they exist."""
_PASSING = (
    "unable to contact slurm controller",
    "resource temporarily unavailable",
    "timed out",
    "zero bytes",
    "connection refused",
    "connection reset",
    "slurmctld",
    "backup controller",
    "standby mode",
    "try again",
    "unexpected message received",
    "protocol authentication error",  # while munged restarts
    "munge",
)
"""Parts of sbatch's messages, in lower case, for temporary errors."""
_LIMITED = ("submitjob", "submit job", "submit limit", "maxsubmit", "job limit")
"""Parts of sbatch's messages, in lower case, for a user or account that has reached its limit of jobs."""


class SubmissionRefused(UltrasweepError):
    """sbatch refuses, and would refuse again: wrong partition or account, too many nodes ..."""


class JobLimitReached(UltrasweepError):
    """sbatch accepts no more jobs from this user now; a smaller array may be accepted."""


class SubmissionUncertain(UltrasweepError):
    """sbatch failed, or was ended, for a reason that may be temporary. The job may exist nevertheless."""


def available() -> bool:
    """Whether this machine can submit jobs and follow them."""
    return not missing_commands()


def missing_commands() -> str:
    """One line about the commands of Slurm that this machine lacks; empty when it has all. Waiting would not help."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if not missing:
        return ""
    are = "is" if len(missing) == 1 else "are"
    return f"launcher=slurm needs {listed(missing)}, which {are} not on PATH here; use a login node"


def submit(job: PilotJob, options: SlurmOptions) -> str:
    """Call sbatch. Returns the id of the job, or of the array if there are several pilots.

    Raises `SubmissionRefused`, `JobLimitReached` or `SubmissionUncertain` with sbatch's message. None of them proves
    that the job does not exist: look for the token in squeue.
    """
    if trouble := missing_commands():
        raise SubmissionRefused(trouble)
    file = job.log_dir / f"{job.token}.sh"
    text, given = submission_text(job, options), set(parameters(job, options))
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        # `timeout` creates a new process group, so a Ctrl-C in the terminal does not end sbatch.
        limit = ["timeout", "-k", str(_KILL_AFTER_S), str(SBATCH_LIMIT_S)]
        sbatch = CommandFunction(
            [*limit, "sbatch", "--parsable", str(file)], verbose=False, env=_environment(job.cluster, given)
        )
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints the errors that it raises
            job_id = _job_id(sbatch())
    except FailedJobError as error:
        raise _failure(error) from None
    except OSError as error:
        raise SubmissionUncertain(f"cannot write in {job.log_dir}: {error.strerror or error}") from None
    with contextlib.suppress(OSError):  # the job has its own copy of the file
        SlurmJob(job.log_dir, job_id).paths.move_temporary_file(file, "submission_file")
    return job_id


def _environment(cluster: str | None, given: Collection[str]) -> dict[str, str]:
    """The environment of sbatch, and so of the job. ``given``: the parameters that the batch file sets."""
    unset = {*unset_for_sbatch(os.environ, given), *(() if cluster is None else (CLUSTERS,))}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, CLUSTERS: cluster} if cluster else kept


_PARSABLE = re.compile(r"([0-9]+)(;[A-Za-z0-9_.-]+)?")
"""Output of ``sbatch --parsable``: the job's number, and the cluster's name where there are several."""


def _job_id(output: str) -> str:
    """The number that ``sbatch --parsable`` prints alone on a line. Sites may print other lines around it."""
    numbers = [match[1] for line in output.splitlines() if (match := _PARSABLE.fullmatch(line.strip()))]
    if len(numbers) != 1:  # the job exists, and its token finds it
        what = "several numbers" if numbers else "no job number"
        raise SubmissionUncertain(f"sbatch printed something unexpected: {what} in: {_one_line(output)}")
    return numbers[0]


def _failure(error: FailedJobError) -> UltrasweepError:
    if not isinstance(error.__cause__, subprocess.CalledProcessError):
        return SubmissionUncertain(f"the output of sbatch cannot be read: {_one_line(str(error.__cause__ or error))}")
    return _classify(str(error))


def _classify(message: str) -> UltrasweepError:
    line = _one_line(message)
    lower = line.lower()
    if not line:
        return SubmissionUncertain(f"sbatch did not answer within {SBATCH_LIMIT_S} s")
    if any(word in lower for word in _LIMITED):
        return JobLimitReached(line)
    return SubmissionUncertain(line) if any(word in lower for word in _PASSING) else SubmissionRefused(line)


def _one_line(message: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in message.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
