"""A sweep of which nothing has begun may be planned anew for another device; every trace of a run forbids it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.state import submissions
from launchers.state.fresh_start import describe_anew, has_begun, has_pilots
from launchers.state.submissions import new_submission
from launchers.state.sweep_dir import SweepDir, entry_names


def test_traces_of_a_run(tmp_path: Path) -> None:
    assert not has_begun(SweepDir.create(tmp_path / "new", {}))
    for place in ("queue/claimed/p.json", "queue/done/p@ok.json", "queue/history/p@a.json", "attempts/a/task.json",
                  "parts/attempts/a.parquet", "attempts.parquet"):  # fmt: skip
        sweep = SweepDir.create(tmp_path / place.replace("/", "-"), {})
        (sweep.path / place).parent.mkdir(parents=True, exist_ok=True)
        (sweep.path / place).write_text("")
        assert has_begun(sweep), place


@pytest.mark.parametrize(
    ("stage", "alive"), [("submitted", True), ("unsure", True), ("ended", False), ("failed", False)]
)
def test_pilots_that_may_come(stage: submissions.Stage, alive: bool, tmp_path: Path) -> None:
    sweep = SweepDir.create(tmp_path / "s", {})
    submission = new_submission(sweep, nodes=1, count=1, time_min=60)
    submissions.write(sweep, submission)
    submissions.update(sweep, submission, stage=stage)
    assert has_pilots(sweep) is alive
    submissions.mark_cancelled(sweep)
    assert not has_pilots(sweep)


def test_points_of_the_other_device_leave_the_queue(tmp_path: Path) -> None:
    sweep = SweepDir.create(tmp_path / "s", {"device": "one"})
    (sweep.todo / "000000-x.json").write_text("{}")
    describe_anew(sweep, {"device": "two"})
    assert SweepDir.open(sweep.path).settings() == {"device": "two"}
    assert entry_names(sweep.todo) == []
