"""The lease that one process holds while it submits jobs for a sweep, so that no other process does so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from launchers.state import submissions
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.lease import Lease, acquire, kept_alive

_STALE_S = 30.0


@contextmanager
def only_submitter(sweep: SweepDir, wait_s: float) -> Iterator[Lease | None]:
    """Hold the lease of the sweep's submitter; None when another process holds it for all of ``wait_s`` seconds."""
    with acquire(submissions.lease_path(sweep), stale_after_s=_STALE_S, wait_s=wait_s) as lease:
        if lease is None:
            yield None
            return
        with kept_alive(lease):  # in a thread, since sbatch may block for minutes
            yield lease
