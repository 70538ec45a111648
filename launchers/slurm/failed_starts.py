"""Finds pilots that ended before they could start, and excludes the nodes that are to blame.

Slurm does not notice a node on which Python or the shared folder is missing: jobs end there at once, so the node is
free again and gets the next job. A started pilot excludes such nodes of its own allocation. On the first node the pilot
itself cannot start, so the submitting command excludes that node.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from launchers.slurm import srun_log
from launchers.slurm.client import Job
from launchers.slurm.host_list import hostnames
from launchers.state import node_exclusions, pilot_state, submissions
from launchers.state.node_exclusions import LOST_FOR_S
from launchers.state.sweep_dir import SweepDir
from results.text.log_tail import read_tail, tail_in_one_line
from results.text.numbers import plural

_FAILED = ("BOOT_FAIL", "FAILED", "LAUNCH_FAILED", "OUT_OF_MEMORY")
"""States in which a job ends that could not start its pilot. A job ended by a person proves nothing about a node."""
_MOST_NODES = 2
"""When pilots fail to start on more nodes than this, the nodes are not to blame."""
_LOG_LINES = 6
_MISSING = re.compile(
    r"execve\(\): .*(No such file or directory|Permission denied|Exec format error)|"
    r"^srun: error: \S+: tasks? 0\b.*: Exited with exit code 12[67]$",
    re.MULTILINE,
)
"""Messages of srun and of its daemon about a program that cannot be started. A shell gives the same exit codes."""


class FailedStarts:
    """Tracks failed starts among the jobs of one sweep."""

    def __init__(self, sweep: SweepDir, report: Callable[[str], None]) -> None:
        self._sweep, self._report = sweep, report
        self._seen: set[str] = set()
        """Names of ended jobs that have been examined."""
        self._failed: dict[str, tuple[str, str]] = {}
        """By node: the pilot that could not start there, and why. Entries wait until a pilot has started elsewhere."""
        self._blamed: set[str] = set()
        """Nodes that this command has excluded."""
        self._too_many = False

    def exclude_bad_nodes(self, jobs: Sequence[Job]) -> None:
        """Exclude nodes on which pilots could not start, if pilots have started on other nodes."""
        for job in jobs:
            if job.state in _FAILED and job.name not in self._seen:
                self._seen.add(job.name)
                self._note(job)
        if not self._failed:
            return
        excluded = node_exclusions.excluded(self._sweep)
        self._blamed &= excluded.keys()
        nodes = [*self._failed, *(self._blamed - self._failed.keys())]
        if len(nodes) > _MOST_NODES:
            if not self._too_many:
                self._report(
                    f"pilots fail to start on {plural(len(nodes), 'node')} ({', '.join(nodes)}), so "
                    f"no {'other ' if self._blamed else ''}node is excluded: {next(reversed(self._failed.values()))[1]}"
                )
            self._too_many = True
            return
        for node in excluded.keys() & self._failed.keys():  # an agent of the same job was faster
            del self._failed[node]
        for node in [node for node in self._failed if self._others_work(node)]:
            pilot, why = self._failed.pop(node)
            self._blamed.add(node)
            with contextlib.suppress(OSError):
                node_exclusions.exclude(self._sweep, node, why, pilot, for_s=LOST_FOR_S)
                self._report(f"node {node} is excluded for {LOST_FOR_S / 60:.0f} min: {why}")

    def _note(self, job: Job) -> None:
        pilot = f"{job.token}.{job.index}"
        if pilot_state.has_states(self._sweep, pilot):
            return
        blamed = [task for task in srun_log.ended_tasks(self._sweep, pilot, job.name) if task.task == 0]
        if blamed:
            self._failed[blamed[0].node] = (pilot, f"a pilot could not start: {blamed[0].reason}")
        elif nodes := hostnames(job.nodes):
            self._failed[nodes[0]] = (pilot, f"a pilot's job ended there ({job.state}) before the pilot could start")

    def _others_work(self, node: str) -> bool:
        """Whether pilots of this sweep have started on other nodes, so that the environment is not to blame."""
        return any(set(state.nodes) - {node} for state in pilot_state.all_states(self._sweep))


def last_words(sweep: SweepDir, token: str) -> str:
    """Why a submission's pilots ended: the last message of one of them, or else the end of the newest log."""
    messages = [
        state.message
        for state in pilot_state.all_states(sweep)
        if state.message and submissions.token_of_pilot(state.pilot_id) == token
    ]
    if messages:
        return messages[-1]
    logs = _logs(sweep, token)
    lines = tail_in_one_line(logs[-1], _LOG_LINES) if logs else ""
    return f"{logs[-1]}: {lines}" if lines else "its log is empty"


def lacks_program(sweep: SweepDir, token: str) -> bool:
    """Whether the program of a submission's pilots is missing on the nodes, so that every next pilot would end in the
    same way. Where a pilot of the sweep has ever started, a node may be to blame instead."""
    if pilot_state.all_states(sweep):
        return False
    for log in _logs(sweep, token)[-1:]:
        with contextlib.suppress(OSError):
            return bool(_MISSING.search("\n".join(read_tail(log, _LOG_LINES).lines)))
    return False


def _logs(sweep: SweepDir, token: str) -> list[Path]:
    """The logs of a submission's pilots, the newest last."""
    try:
        return sorted(submissions.log_dir(sweep.path, token).glob("*.out"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return []
