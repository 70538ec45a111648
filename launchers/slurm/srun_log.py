"""Reads srun's messages in a pilot's log about ended tasks, to find nodes whose agent could not start.

srun knows at once when a task ends or cannot be started, and prints it. There is no other source: a node without Python
has no process that could report to its pilot. The batch file marks in the log where each start of the job begins,
because Slurm restarts a job under the same number and with the same log.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from launchers.pilot.batch_system import EndedTask
from launchers.slurm.host_list import hostnames
from launchers.state import submissions
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.whole_files import open_regular
from results.text.log_tail import tail_in_one_line

MARK = "srun starts pilot"
"""Beginning of the line that a job writes into its log just before srun; the line ends with the pilot's id."""
_READ_BYTES = 2**20
_LOG_LINES = 2
_ENDED = re.compile(r"^srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<why>.+)$", re.MULTILINE)
_NOT_STARTED = re.compile(
    r"^srun: error: .*launch for \S+ failed on node (?P<nodes>[^\s:]+): (?P<why>.+)$", re.MULTILINE | re.IGNORECASE
)
_NODE_FAILED = re.compile(r"^srun: error: Node failure on (?P<nodes>\S+)$", re.MULTILINE)


def log_name(job: str, task: object) -> str:
    """The name of a task's log: the one that submitit gives it (``SlurmJob.paths.stdout``). submitit is not imported
    here, because a pilot needs none."""
    return f"{job}_{task}_log.out"


def log_path(sweep: SweepDir, token: str, job: str, task: int = 0) -> Path:
    """The log of one task of a pilot's job. Task 0 is the pilot, and its log also has srun's own messages.

    ``job``: in the form of squeue, ``1234`` or ``1234_5``.
    """
    return submissions.log_dir(sweep.path, token) / log_name(job, task)


def ended_tasks(sweep: SweepDir, pilot: str, job: str) -> list[EndedTask]:
    """Tasks that srun reports as ended since the last start of the pilot's job.

    ``pilot``: the pilot's id, or its part before the restarts for the job's last start. A log that cannot be read
    counts as empty.
    """
    token = submissions.token_of_pilot(pilot)
    if token is None:
        return []
    text = _last_start(log_path(sweep, token, job), pilot)
    ended: list[EndedTask] = []
    for match in _ENDED.finditer(text):
        tasks = _numbers(match["tasks"])
        nodes = hostnames(match["nodes"])
        if len(nodes) == len(tasks):
            ended += [
                EndedTask(node, task, _reason(sweep, token, job, task, match["why"]))
                for node, task in zip(nodes, tasks, strict=True)
            ]
        else:
            ended += [EndedTask(node, None, match["why"]) for node in nodes]
    others = [(match["nodes"], f"srun could not start a task: {match['why']}") for match in _NOT_STARTED.finditer(text)]
    others += [(match["nodes"], "the node failed") for match in _NODE_FAILED.finditer(text)]
    return ended + [EndedTask(node, None, why) for nodes, why in others for node in hostnames(nodes)]


def _reason(sweep: SweepDir, token: str, job: str, task: int, why: str) -> str:
    last_lines = tail_in_one_line(log_path(sweep, token, job, task), _LOG_LINES) if task else ""
    return f"its process ended while it started: {why}{f' ({last_lines})' if last_lines else ''}"


def _last_start(path: Path, pilot: str) -> str:
    """Part of the log since the last start of the pilot's job; empty when it cannot be read or found."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            text = file.read(_READ_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""
    starts = [match.end() for match in re.finditer(rf"^{MARK} {re.escape(pilot)}\b.*$", text, re.MULTILINE)]
    return text[starts[-1] :] if starts else ""


def _numbers(tasks: str) -> list[int]:
    """Task numbers of a list: ``0,2-3`` is 0, 2 and 3."""
    numbers: list[int] = []
    for part in tasks.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers
