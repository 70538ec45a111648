"""Writes the batch file of pilots and submits it. Only this file uses submitit.

submitit writes the file and calls sbatch. Its pickles are not used, because a job must not depend on steps of its
submitter after sbatch: a pilot's config is a JSON file written before.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from launchers.pilot.allocation import STARTED_AT
from launchers.slurm.environment import CLUSTERS, unset_for_sbatch
from launchers.slurm.options import SlurmOptions, check_path
from launchers.slurm.srun_log import MARK
from launchers.state import submissions
from launchers.state.code_snapshot import check_line
from launchers.state.pilot_state import REQUEUE_REQUEST
from launchers.state.sweep_dir import SweepDir
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotJob:
    """One submission: ``count`` pilots of ``nodes`` nodes each."""

    token: str
    """Name of the submission and of its pilots' config."""
    job_name: str
    sweep_dir: Path
    """Absolute path."""
    code_dir: Path
    """Folder of the pilots' code (see `launchers.state.code_snapshot`)."""
    code_digest: str
    """Digest of the files that must be in ``code_dir`` when the job starts."""
    nodes: int
    count: int
    gpus_per_node: int
    """0: no GPUs are requested."""
    pilot: Sequence[str]
    """Command line of a pilot, to which the sweep's folder and the token are appended."""
    excluded: Sequence[str] = ()
    """Nodes that the sweep has excluded."""
    cluster: str | None = None
    """Cluster, as in `launchers.state.submissions.Submission`."""

    @property
    def log_dir(self) -> Path:
        return submissions.log_dir(self.sweep_dir, self.token)


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


def submission_text(job: PilotJob, options: SlurmOptions) -> str:
    """The text of the batch file. Raises `InvalidSweep` for a path that cannot be written into one."""
    executor, command = _prepare(job, options)
    return executor.text(command)


def submit(job: PilotJob, options: SlurmOptions) -> str:
    """Call sbatch. Returns the id of the job, or of the array if there are several pilots.

    Raises `SubmissionRefused`, `JobLimitReached` or `SubmissionUncertain` with sbatch's message. None of them proves
    that the job does not exist: look for the token in squeue.
    """
    if trouble := missing_commands():
        raise SubmissionRefused(trouble)
    executor, command = _prepare(job, options)
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints the errors that it raises
            return str(executor._submit_command(command).job_id)
    except FailedJobError as error:
        raise _classify(str(error)) from None
    except FailedSubmissionError as error:
        raise SubmissionUncertain(f"sbatch printed something unexpected: {_one_line(str(error))}") from None
    except OSError as error:
        raise SubmissionUncertain(f"cannot write in {job.log_dir}: {error.strerror or error}") from None


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


class _PilotExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's executor with a time limit and a clean environment for sbatch; it writes the file without a
    cluster."""

    cluster: str | None = None
    """Cluster of the job; see `PilotJob`."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # `submit` has checked for sbatch; a dry run needs none

    def text(self, command: str) -> str:
        return str(self._make_submission_file_text(command, ""))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # `timeout` creates a new process group, so a Ctrl-C in the terminal does not end sbatch.
        limit = ["timeout", "-k", str(_KILL_AFTER_S), str(SBATCH_LIMIT_S)]
        names = [*unset_for_sbatch(os.environ, self._given()), *([] if self.cluster is None else [CLUSTERS])]
        unset = [word for name in names for word in ("-u", name)]
        chosen = [f"{CLUSTERS}={self.cluster}"] if self.cluster else []
        return [*limit, "env", *unset, *chosen, "sbatch", "--parsable", str(submission_file_path)]

    def _given(self) -> set[str]:
        """Names of the parameters that the batch file sets."""
        everything = {**self.parameters, **(self.parameters.get("additional_parameters") or {})}
        return {name for name, value in everything.items() if value is not None}

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """The number that ``sbatch --parsable`` prints alone on a line. Sites may print other lines around it."""
        text = string if isinstance(string, str) else string.decode(errors="replace")
        numbers = [match[1] for line in text.splitlines() if (match := _PARSABLE.fullmatch(line.strip()))]
        if len(numbers) != 1:  # the job exists, and its token finds it
            raise FailedSubmissionError(f"no job number in: {text}" if not numbers else f"several numbers in: {text}")
        return str(numbers[0])


_PARSABLE = re.compile(r"([0-9]+)(;[A-Za-z0-9_.-]+)?")
"""Output of ``sbatch --parsable``: the job's number, and the cluster's name where there are several."""


def _prepare(job: PilotJob, options: SlurmOptions) -> tuple[_PilotExecutor, str]:
    for path in (job.sweep_dir, job.code_dir):
        check_path(path)
    executor = _PilotExecutor(folder=job.log_dir)
    executor.cluster = job.cluster
    executor.update_parameters(**_parameters(job, options))
    if job.count > 1:
        executor.parameters["map_count"] = job.count
    pilot = list(job.pilot)
    if options.python is not None:
        pilot[0] = options.python
    return executor, shlex.join([*options.prefix, *pilot, str(job.sweep_dir), job.token])


def _parameters(job: PilotJob, options: SlurmOptions) -> dict[str, Any]:
    """submitit's parameters; None leaves a parameter out of the file."""
    more: dict[str, Any] = {
        "requeue" if options.requeue else "no-requeue": True,
        # `python -m` searches the working directory before PYTHONPATH, so it must be the copy of the code.
        "chdir": str(job.code_dir),
        "signal": f"USR2@{options.signal_delay_s}",  # overrides submitit's environment variable
        "open-mode": "append",  # a requeued pilot writes into the same log
    }
    if options.nice is not None:
        more["nice"] = options.nice
    if options.reservation is not None:
        more["reservation"] = options.reservation
    more |= {key.replace("_", "-"): value for key, value in options.sbatch.items() if value is not False}
    gpus = gres = None
    if job.gpus_per_node:
        count = f"{options.gpu_type}:{job.gpus_per_node}" if options.gpu_type else str(job.gpus_per_node)
        if options.gpus == "gpus_per_node":
            gpus = count
        elif options.gpus == "gres":
            gres = f"gpu:{count}"
    excluded = [name for name in (options.exclude, *job.excluded) if name]
    return {
        "job_name": job.job_name,
        "comment": f"ultrasweep:{job.token}",
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "time": options.time_min,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "nodelist": options.nodelist,
        "exclude": ",".join(excluded) or None,
        "exclusive": options.exclusive or None,
        "cpus_per_task": options.cpus_per_task,
        "mem": options.mem,
        "gpus_per_node": gpus,
        "gres": gres,
        "array_parallelism": job.count,
        "wckey": None,
        "stderr_to_stdout": True,
        "additional_parameters": more,
        "setup": _setup(job, options),
        "teardown": _teardown(job),
        "srun_args": _srun_args(job, options),
    }


def _setup(job: PilotJob, options: SlurmOptions) -> list[str]:
    """Shell lines before srun. The user's lines come before our settings, so that they cannot undo what a pilot
    needs. The start is noted before all lines, because they may take minutes of the job's time limit."""
    noted = f"read -r {STARTED_AT} _ < /proc/uptime; export {STARTED_AT}"
    ours = {
        # Where the working folder is missing, Slurm goes to /tmp, and Python would import from there first.
        "PYTHONSAFEPATH": "1",
        # Libraries must not start threads in a pilot at import: a process with threads must not fork.
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONUNBUFFERED": "1",
        # Compiled files in the copy of the code would be run in place of the files that `check_line` compares.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if options.cpus_per_task is not None:
        ours["SRUN_CPUS_PER_TASK"] = str(options.cpus_per_task)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in ours.items()]
    path = f'export PYTHONPATH={shlex.quote(str(job.code_dir))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    # An empty part of a user's PYTHONPATH means the working folder.
    no_empty_part = "while [[ $PYTHONPATH == *::* ]]; do PYTHONPATH=${PYTHONPATH/::/:}; done"
    no_empty_end = "PYTHONPATH=${PYTHONPATH%:}"
    # See `launchers.slurm.srun_log`. This line comes last: later lines of the log are from srun and the pilot.
    start = f"{job.token}.${{SLURM_ARRAY_TASK_ID:-0}}.${{SLURM_RESTART_COUNT:-0}}"
    return [
        noted,
        *(_checked(options.setup) if options.setup else ()),
        *lines,
        path,
        no_empty_part,
        no_empty_end,
        check_line(job.code_dir, job.code_digest),
        f'echo "{MARK} {start}"',
    ]


def _checked(lines: Sequence[str]) -> list[str]:
    """The user's lines, of which the first that fails ends the job and is named in its log: a pilot must not measure in
    an environment that was not set up."""
    told = """trap 'echo "launcher.setup failed with exit code $?: $BASH_COMMAND" >&2' ERR"""
    return ["set -eE", told, *lines, "trap - ERR", "set +eE"]


def _teardown(job: PilotJob) -> list[str]:
    """Shell lines after srun: requeue the job for a pilot whose image has no ``scontrol``, and keep srun's status."""
    pilots = shlex.quote(f"{SweepDir(job.sweep_dir).pilots}/{job.token}.")
    request = f'{pilots}"${{SLURM_ARRAY_TASK_ID:-0}}.${{SLURM_RESTART_COUNT:-0}}{REQUEUE_REQUEST}"'
    running = '[ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]'
    return [
        "status=$?",
        f"if [ -e {request} ]; then",
        f"  rm -f {request}",
        f'  {running} && scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $status",
    ]


def _srun_args(job: PilotJob, options: SlurmOptions) -> list[str]:
    # Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch. Without it a step of whole nodes has all
    # cores. Binding is off, because it would bind the one task of a node, and so all its ranks, to one core.
    cpus = [f"--cpus-per-task={options.cpus_per_task}"] if options.cpus_per_task is not None else []
    return [
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes}",
        "--ntasks-per-node=1",
        *cpus,
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--open-mode=append",
        # Sites set KillOnBadExit=1 and a WaitTime, which would end the whole step when the first agent dies or ends.
        # The pilot can continue without a dead agent's node, and all agents end when the pilot ends.
        "--kill-on-bad-exit=0",
        "--wait=0",
        *options.srun_args,
    ]


_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def node_names(names: Sequence[str]) -> list[str]:
    """The ``names`` that Slurm accepts as names of nodes."""
    return [name for name in names if _NODE.fullmatch(name)]
