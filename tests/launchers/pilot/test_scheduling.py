"""Points that do not fit the time that is left."""

from __future__ import annotations

from launchers.pilot.scheduling import Scheduler
from launchers.state.history import HistoryReader
from launchers.state.sweep_dir import SweepDir
from tests.launchers.scripted import points, settings


def test_no_point_begins_that_cannot_end_and_the_pilot_says_so(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "ok", deadline_s=300.0))
    scheduler = Scheduler(sweep, "p", settings(), HistoryReader(sweep), lambda line: None)
    for left_s in (299.0, -5.0):
        assert scheduler.claim_next(1, ["node1"], left_s, []) is None
    assert (
        scheduler.why_waiting()
        == "2 points need 5 min or more, and this job has 0 s left for points (launcher.time_min)"
    )
    assert scheduler.claim_next(1, ["node1"], 301.0, []) is not None and scheduler.why_waiting() == ""
