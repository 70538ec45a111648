"""Which outcomes are retried, and how often."""

from __future__ import annotations

import pytest

from launchers.attempt.outcome import Outcome
from launchers.pilot.recorder import wants_retry
from launchers.state.history import AttemptRecord
from tests.launchers.scripted import attempt_record, settings


@pytest.mark.parametrize(
    ("outcome", "before", "again"),
    [
        (Outcome(outcome="ok"), [], False),
        (Outcome(outcome="oom"), [], False),
        (Outcome(outcome="crash"), [], False),
        (Outcome(outcome="timeout"), [], False),
        (Outcome(outcome="diverged"), [], False),
        (Outcome(outcome="cancelled"), [attempt_record(n, "cancelled") for n in range(9)], True),
        (Outcome(outcome="preempted"), [attempt_record(n, "preempted") for n in range(9)], True),
        (Outcome(outcome="hang"), [], True),
        (Outcome(outcome="hang"), [attempt_record(1, "node_failure", True)], True),
        (Outcome(outcome="hang"), [attempt_record(1, "hang")], False),
        (Outcome(outcome="node_failure", infrastructure=True), [attempt_record(1, "hang")], True),
        (Outcome(outcome="nccl_error", infrastructure=True), [attempt_record(n, "crash", True) for n in (1, 2)], False),
        (Outcome(outcome="crash", infrastructure=True), [attempt_record(1, "crash", True)], True),
    ],
)
def test_retries_are_bounded_by_kind(outcome: Outcome, before: list[AttemptRecord], again: bool) -> None:
    assert wants_retry(outcome, before, settings(max_attempts=3)) is again
