"""The text of the batch file of pilots: parameters of sbatch, shell lines before srun, srun, and lines after it.

A job depends on no step of its submitter after sbatch: a pilot's config is a JSON file written before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.pilot.allocation import STARTED_AT
from launchers.slurm.options import SlurmOptions, check_path
from launchers.slurm.srun_log import MARK, log_name
from launchers.state import submissions
from launchers.state.code_snapshot import check_line
from launchers.state.pilot_state import REQUEUE_REQUEST
from launchers.state.sweep_dir import SweepDir


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
    stdin: Path | None = None
    """File that srun gives every task as its standard input; None: an empty one."""

    @property
    def log_dir(self) -> Path:
        return submissions.log_dir(self.sweep_dir, self.token)


def submission_text(job: PilotJob, options: SlurmOptions) -> str:
    """The text of the batch file. Raises `InvalidSweep` for a path that cannot be written into one."""
    for path in (job.sweep_dir, job.code_dir):  # stdin is a file of the second
        check_path(path)
    pilot = list(job.pilot)
    if options.python is not None:
        pilot[0] = options.python
    command = [*options.prefix, *pilot, str(job.sweep_dir), job.token]
    lines = [
        "#!/bin/bash",
        "",
        "# Parameters",
        *(_directive(name, value) for name, value in sorted(parameters(job, options).items())),
        "",
        "# setup",
        *_setup(job, options),
        "",
        "# command",
        "export SUBMITIT_EXECUTOR=slurm",  # submitit.JobEnvironment() tells the user's code about the job
        shlex.join(["srun", "--unbuffered", "--output", _log(job, "%t"), *_srun_args(job, options), *command])
        + (f" < {shlex.quote(str(job.stdin))}" if job.stdin is not None else ""),
        "",
        "",
        "# teardown",
        *_teardown(job),
    ]
    return "\n".join(lines)


def parameters(job: PilotJob, options: SlurmOptions) -> Mapping[str, Any]:
    """Parameters of sbatch by their long names; true for one without a value."""
    everything: dict[str, Any] = {
        "job-name": job.job_name,
        "comment": f"ultrasweep:{job.token}",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "array": f"0-{job.count - 1}%{job.count}" if job.count > 1 else None,
        "time": options.time_min,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "nodelist": options.nodelist,
        "exclude": ",".join(name for name in (options.exclude, *job.excluded) if name) or None,
        "exclusive": options.exclusive or None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "nice": options.nice,
        # `python -m` searches the working directory before PYTHONPATH, so it must be the copy of the code.
        "chdir": str(job.code_dir),
        "requeue" if options.requeue else "no-requeue": True,
        "signal": f"USR2@{options.signal_delay_s}",
        "output": _log(job, "0"),
        "open-mode": "append",  # a requeued pilot writes into the same log
        **_gpus(job, options),
        **{name.replace("_", "-"): value for name, value in options.sbatch.items() if value is not False},
    }
    return {name: value for name, value in everything.items() if value is not None}


def _gpus(job: PilotJob, options: SlurmOptions) -> Mapping[str, str]:
    if not job.gpus_per_node or options.gpus == "none":
        return {}
    count = f"{options.gpu_type}:{job.gpus_per_node}" if options.gpu_type else str(job.gpus_per_node)
    return {"gpus-per-node": count} if options.gpus == "gpus_per_node" else {"gres": f"gpu:{count}"}


def _directive(name: str, value: Any) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _log(job: PilotJob, task: str) -> str:
    """The log of a task, in which Slurm fills in the job's id."""
    return str(job.log_dir / log_name("%A_%a" if job.count > 1 else "%j", task))


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
    """The user's lines, so that the first line that fails ends the job and is named in its log: a pilot must not
    measure in an environment that was not set up."""
    # Bash also calls the trap inside of $(...), and goes on after `export X=$(false)` or `eval "$(false)"`: only the
    # job's own shell, which ends, has failed.
    inside = '[ "$BASHPID" = "$$" ] && setup_how=failed || setup_how="goes on, but a command inside of \\$(...) failed"'
    report = 'echo "launcher.setup $setup_how with exit code $setup_status: $BASH_COMMAND" >&2'
    report_failure = f"trap 'setup_status=$?; {inside}; {report}' ERR"
    return ["set -eE", report_failure, *lines, "trap - ERR", "set +eE"]


def _teardown(job: PilotJob) -> list[str]:
    """Shell lines after srun: requeue the job for a pilot whose image has no ``scontrol``, and keep srun's status. The
    element of an array is named by its index, because the last one's own id is that of the whole array."""
    pilots = shlex.quote(f"{SweepDir(job.sweep_dir).pilots}/{job.token}.")
    request = f'{pilots}"${{SLURM_ARRAY_TASK_ID:-0}}.${{SLURM_RESTART_COUNT:-0}}{REQUEUE_REQUEST}"'
    element = 'job="${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"'
    running = '[ "$(squeue -h -j "$job" -o %T)" = RUNNING ]'
    return [
        "status=$?",
        f"if [ -e {request} ]; then",
        f"  rm -f {request}",
        f"  {element}",
        f'  {running} && scontrol requeue "$job"',
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
