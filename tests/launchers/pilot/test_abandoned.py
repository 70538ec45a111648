"""Outcome of an attempt whose pilot died before recording it."""

from __future__ import annotations

import pytest

from launchers.attempt.attempt import Attempt, new_attempt_id, start_attempt
from launchers.attempt.outcome import Outcome
from launchers.pilot.dead_pilots import abandoned
from launchers.state.sweep_dir import SweepDir
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points, settings
from workloads.contract import protocol
from workloads.contract.protocol import RankResult


@pytest.fixture
def attempt(sweep: SweepDir) -> Attempt:
    """An attempt of two ranks that the pilot ended at a user's request before it was killed itself."""
    sweep.add_points(points("ok"))
    claim = queue_reader(sweep, "p").claim_next(everything)
    assert claim is not None
    name = new_attempt_id(claim.point, 1)
    made = start_attempt(claim, name, 1, settings(), host="h", port=1, device_ids=None, nodes=("n",))
    protocol.write_json(made.folder / "outcome.json", Outcome(outcome="cancelled", phase="step", phase_step=1))
    return made


def write_results(attempt: Attempt, ranks: int) -> None:
    for rank in range(ranks):
        result = RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={})
        protocol.write_json(protocol.result_path(attempt.folder, rank), result)


@pytest.mark.parametrize(("ranks", "outcome"), [(2, "ok"), (1, "cancelled"), (0, "cancelled")])
def test_an_attempt_measured_before_its_cancellation_counts(
    sweep: SweepDir, attempt: Attempt, ranks: int, outcome: str
) -> None:
    write_results(attempt, ranks)
    done = abandoned(sweep, attempt, "pilot p died")
    assert (done.outcome.outcome, len(done.results)) == (outcome, ranks)
