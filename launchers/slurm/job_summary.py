"""One line about the jobs of a sweep's pilots, for status and for the view of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from launchers.slurm.client import Job

_MOST_REASONS = 3


def describe_jobs(jobs: Sequence[Job] | None) -> str:
    """For example ``Slurm: 3 running, 2 pending (2 Priority)``. ``jobs`` is None when Slurm does not answer."""
    if jobs is None:
        return "Slurm does not answer"
    alive = [job for job in jobs if job.alive]
    if not alive:
        return "Slurm: no pilot waits or runs"
    states = Counter(job.state.lower() for job in alive)
    reasons = Counter(job.reason for job in alive if job.waiting and job.reason not in ("", "None"))
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(_MOST_REASONS))
    parts = [
        f"{count} {state}" + (f" ({why})" if why and state == "pending" else "")
        for state, count in states.most_common()
    ]
    never = sum(job.never_starts for job in alive)
    note = f"; {never} of them will never start: the reason is permanent" if never else ""
    return f"Slurm: {', '.join(parts)}{note}"
