"""Cancels every pilot of a sweep in Slurm, including those whose submission is not finished."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from launchers.slurm import polling
from launchers.slurm.client import SlurmClient, SlurmUnreachable
from launchers.slurm.sbatch import SBATCH_LIMIT_S
from launchers.slurm.submitter_lease import only_submitter
from launchers.state import submissions
from launchers.state.sweep_dir import SweepDir
from results.errors import InvalidResults
from results.shared_filesystem.lease import filesystem_time
from results.text.numbers import plural


def cancel(sweep: SweepDir, report: Callable[[str], None] = lambda line: None) -> int:
    """Cancel every pilot of the sweep, and stop the commands that would submit more. Returns the number of cancelled
    pilots. ``report`` takes a line about records that cannot be read.

    Points that they ran wait again. Raises `SlurmUnreachable` when Slurm does not answer, and `InvalidResults` when the
    sweep's folder is not writable, or is a copy of the folder whose pilots run.
    """
    if not submissions.all_submissions(sweep):
        if (original := submissions.copied_from(sweep)) is not None:
            raise InvalidResults(
                f"{sweep.path} is a copy of {original}: the pilots that its files name belong to that folder, and "
                f"nothing was cancelled; python -m sweep cancel {shlex.quote(original)} ends them"
            )
        return 0
    client = SlurmClient(submissions.cluster_of(sweep))
    if line := submissions.damage(submissions.all_submissions(sweep)):
        report(line)
    try:
        filesystem_time(sweep.path)  # a folder of another user is refused before Slurm is asked
        if client.jobs({one.uid for one in submissions.all_submissions(sweep)}) is None:  # nothing is changed then
            raise SlurmUnreachable(f"nothing was cancelled, the pilots keep running: {client.complaint}")
        submissions.mark_cancelled(sweep)
    except OSError as error:
        raise InvalidResults(
            f"cannot write in {sweep.path}: {error.strerror or error}; nothing was cancelled"
        ) from None
    cancelled: set[tuple[str, str]] = set()
    begun = time.monotonic()
    # A command in the middle of a submission finishes it, notices the cancellation and releases the lease.
    with only_submitter(sweep, wait_s=SBATCH_LIMIT_S + 10.0):
        while True:
            ours = submissions.all_submissions(sweep)
            jobs = client.jobs({one.uid for one in ours})
            if jobs is None:
                raise SlurmUnreachable(_unfinished(len(cancelled), client.complaint))
            tokens = {one.token for one in ours}
            alive = [job for job in jobs if job.token in tokens and job.alive and not job.ending]
            fresh = [job for job in alive if (job.token, job.name) not in cancelled]
            if fresh and not client.cancel(fresh):
                raise SlurmUnreachable(_unfinished(len(cancelled), client.complaint))
            cancelled |= {(job.token, job.name) for job in fresh}
            shown = {job.token for job in jobs}
            # An sbatch whose caller was killed may still run: its job would appear after we have returned.
            unfinished = [
                one
                for one in ours
                if one.stage == "intent"
                and one.token not in shown
                and submissions.intent_age_s(sweep, one) < SBATCH_LIMIT_S
            ]
            # Times in the files may be wrong, so the wait is limited by this process's own clock, too.
            if not unfinished or time.monotonic() - begun > SBATCH_LIMIT_S:
                return len(cancelled)
            time.sleep(polling.SQUEUE_S)


def _unfinished(cancelled: int, complaint: str) -> str:
    """What has changed although Slurm does not let all pilots be cancelled."""
    count = plural(cancelled, "pilot") if cancelled else "no pilot"
    return (
        f"{count} cancelled, others may keep running: {complaint}; commands that watch this sweep submit no more; "
        "cancel again when Slurm answers"
    )
