"""Cancelling the pilots of a sweep."""

from __future__ import annotations

import pytest

from launchers.slurm.cancel import cancel
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import meanwhile, run


@pytest.mark.slow
def test_cancel_ends_the_pilots_and_the_watchers(fake: FakeSlurm, sweep: SweepDir) -> None:
    found: list[int] = []
    with meanwhile(lambda: len(fake.calls("squeue")) > 2, lambda: found.append(cancel(sweep))):
        summary = run(sweep, target_h=1e-4)
    assert found == [3] and "cancelled by another command" in summary.message
    assert summary.exit_code == 1 and [job["state"] for job in fake.jobs] == ["CANCELLED"] * 3
    assert cancel(sweep) == 0
    run(sweep, detach=True)  # a new run is a new wish
    assert sum(job["state"] == "PENDING" for job in fake.jobs) == 1


def test_cancel_without_slurm(fake: FakeSlurm, sweep: SweepDir) -> None:
    assert cancel(sweep) == 0  # nothing was ever submitted
    run(sweep, detach=True)
    fake.mode("squeue", "down")
    with pytest.raises(UltrasweepError, match="nothing was cancelled, the pilots go on: squeue: error: Unable"):
        cancel(sweep)
