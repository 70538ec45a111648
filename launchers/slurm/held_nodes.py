"""Names the jobs of a finished sweep that still hold nodes.

A job ends some seconds after its pilot. It does not where Slurm's own daemon of the job was killed, or where a node's
clean-up hangs, and the nodes are paid for until somebody notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from launchers.slurm import polling
from launchers.slurm.client import Job, jobs_of
from launchers.state.sweep_dir import SweepDir
from results.text.numbers import plural

RELEASE_S = 15.0
"""Seconds in which a job ends after its pilot."""
_MOST_JOBS = 3


def wait_for_release(sweep: SweepDir, report: Callable[[str], None], signals: list[int]) -> Collection[str]:
    """Wait until no job of the sweep holds nodes; after `RELEASE_S` seconds, name those that do. Returns the names of
    the jobs that are left. ``signals``: the wait ends when it grows."""
    until = time.monotonic() + RELEASE_S
    while True:
        holding = [job for job in jobs_of(sweep) or () if job.alive and not job.waiting]
        if holding and time.monotonic() >= until and not signals:
            report(_line(holding))
        if not holding or signals or time.monotonic() >= until:
            return {job.name for job in holding}
        polling.sleep_until_signal(polling.SQUEUE_S, signals)


def _line(jobs: Sequence[Job]) -> str:
    shown = ", ".join(f"job {job.name} ({job.state}) on {job.nodes or 'unknown nodes'}" for job in jobs[:_MOST_JOBS])
    more = f" and {plural(len(jobs) - _MOST_JOBS, 'more job')}" if len(jobs) > _MOST_JOBS else ""
    names = " ".join(job.name for job in jobs[:_MOST_JOBS])
    return f"every point has ended, but nodes are still held by {shown}{more}; scancel {names} releases them"
