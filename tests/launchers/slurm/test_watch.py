"""Watching a sweep that other commands have submitted."""

from __future__ import annotations

import pytest

from launchers.slurm.watch import watch
from launchers.state.sweep_dir import SweepDir
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import finish_all, interrupt, meanwhile, run


@pytest.mark.slow
def test_watch_ends_with_the_last_point_or_the_last_pilot(fake: FakeSlurm, sweep: SweepDir) -> None:
    run(sweep, detach=True)
    with meanwhile(lambda: len(fake.calls("squeue")) > 3, fake.forget):
        summary = watch(sweep, live=False)
    assert "no pilot waits or runs, 3 points left" in summary.message and len(fake.calls("sbatch")) == 1
    with meanwhile(lambda: True, lambda: finish_all(sweep)):
        assert watch(sweep, live=False).left == 0


@pytest.mark.slow
def test_ctrl_c_only_ends_the_watching(fake: FakeSlurm, sweep: SweepDir) -> None:
    run(sweep, detach=True)
    before = len(fake.calls("squeue"))
    with meanwhile(lambda: len(fake.calls("squeue")) > before + 1, interrupt):
        summary = watch(sweep, live=False)
    assert (summary.detached, summary.exit_code, summary.left) == (True, 0, 3)
    assert [job["state"] for job in fake.jobs] == ["PENDING"]
