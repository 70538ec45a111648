"""The progress of a sweep, read from its files."""

from __future__ import annotations

import pytest

from launchers.state import history, queue
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import StatusReader, sweep_status
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import attempt_record, points


def test_status_counts_from_files(sweep: SweepDir) -> None:
    sweep.add_points(points(*["ok"] * 5))
    mine = queue_reader(sweep, "p")
    for number, outcome in enumerate(("ok", "oom")):
        claim = mine.claim_next(everything)
        assert claim is not None
        history.write_record(sweep, claim.stem, attempt_record(number, outcome))
        queue.finish(claim, outcome)
    mine.claim_next(everything)
    status = sweep_status(sweep)
    assert (status.total, status.todo, status.claimed, status.done) == (5, 2, 1, {"ok": 1, "oom": 1})
    assert status.left == 3 and status.finished == 2
    assert status.device_hours == pytest.approx(2 * 45 * 8 / 3600)
    assert status.expected_left_s == pytest.approx(2 * 45)
    assert [record.outcome for record in status.failures()] == ["oom"]


def test_a_run_that_adds_points_knows_its_total_before(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "oom"))
    assert sweep_status(sweep).total == StatusReader(sweep).read().total == 2
    assert StatusReader(sweep, most_points=9).read().total == 9
    assert StatusReader(sweep, most_points=1).read().total == 2


def test_a_failure_of_a_point_that_has_finished_since_is_not_listed(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "ok"))
    mine = queue_reader(sweep, "p")
    for number, outcomes in enumerate((("cancelled", "ok"), ("hang", "hang"))):
        claim = mine.claim_next(everything)
        assert claim is not None
        for again, outcome in enumerate(outcomes):
            record = attempt_record(2 * number + again, outcome, experiment_id=claim.point.experiment.id)
            history.write_record(sweep, claim.stem, record)
        queue.finish(claim, outcomes[-1])
    assert [record.attempt_number for record in sweep_status(sweep).failures()] == [3]
