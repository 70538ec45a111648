"""Follows a sweep that pilots run, without submitting any pilot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from launchers.interrupts import interrupts
from launchers.slurm.client import jobs_of
from launchers.slurm.job_summary import describe_jobs
from launchers.slurm.polling import files_timer, sleep_until_signal, squeue_timer
from launchers.state.sweep_dir import SweepDir
from launchers.status.run_summary import RunSummary, summarize
from launchers.status.status import StatusReader, SweepStatus
from launchers.status.view import choose_view
from results.text.numbers import plural

_LOOKS_WITHOUT_PILOT = 2
"""Number of polls in a row that must have found no pilot: one pilot may end just before the next begins."""


class Follower(Protocol):
    """What else follows a sweep that is watched, such as a page. It returns lines to print."""

    def update(self, status: SweepStatus) -> Sequence[str]: ...


def watch(sweep: SweepDir, *, live: bool | None = None, follower: Follower | None = None) -> RunSummary:
    """Show the sweep until no point or no pilot is left, or until Ctrl-C. ``live``: as in `choose_view`."""
    reader = StatusReader(sweep)
    before = status = reader.read()
    view = choose_view(live, before)
    message, shown, detached = "", "", False
    files, squeue = files_timer(), squeue_timer()
    without_pilot = 0
    with interrupts(limit=2) as signals, view:
        while True:
            status = reader.read()
            view.show(status)
            for said in follower.update(status) if follower is not None else ():
                view.print_line(said)
            if not status.left:
                break
            if squeue.due():
                jobs = jobs_of(sweep)
                line = describe_jobs(jobs)
                if line != shown:
                    view.print_line(line)
                squeue.polled(changed=line != shown)
                shown = line
                gone = jobs is not None and not any(job.alive for job in jobs) and not status.pilots
                without_pilot = without_pilot + 1 if gone else 0
                if without_pilot >= _LOOKS_WITHOUT_PILOT:
                    left = plural(status.left, "point")
                    message = f"no pilot waits or runs, {left} left; repeat the command that ran them to continue"
                    break
            if signals:
                detached = True
                break
            files.polled(changed=False)
            sleep_until_signal(files.period_s, signals)
    return summarize(before, status, message=message, detached=detached)
