"""A cut of the study's grid through a real Slurm, and the cost of pilots compared with one Slurm job per point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.overhead import measure_overhead
from tests.slurm.study import run_study

POINTS = 120


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_every_layout_of_a_cut_of_the_study_has_one_last_row(lab: Lab, tmp_path: Path) -> None:
    words = (f"+grid.subsample.count={POINTS}", "grid.axes.nodes=[1,2,4,8]", "launcher.max_nodes=8")
    measured = run_study(lab, tmp_path, words=words, limit_s=400)
    print(f"\n{measured}")
    assert measured.one_last_row == measured.points > POINTS / 2
    assert measured.slurm_jobs < measured.points / 4
    assert measured.outcomes["ok"] > 0.8 * measured.points


@pytest.mark.slurm
@pytest.mark.timeout(400)
@pytest.mark.exhaustive(seconds=90)
def test_pilots_cost_less_than_one_job_a_point(lab: Lab) -> None:
    """With more points (``python -m tests.slurm.overhead``) the start of the pilots weighs even less."""
    measured = measure_overhead(lab, lab.state / "overhead", points=40, nodes=2)
    print(f"\n{measured}")
    assert measured.ratio > 1.3
    assert measured.idle_share < 0.7
