"""A point ends with results that its earlier attempt wrote after its pilot had been taken for dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.attempt.attempt import Attempt, new_attempt_id, start_attempt
from launchers.attempt.execute import Execution
from launchers.attempt.outcome import Outcome
from launchers.attempt.packing import pack_attempt
from launchers.pilot import recorder
from launchers.pilot.recorder import AttemptRecorder
from launchers.state.history import HistoryReader
from launchers.state.queue import Claim
from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables import store
from tests.launchers.pilot.test_recorder import recorder_of
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points, settings
from workloads.contract import protocol
from workloads.contract.protocol import RankResult

FAILED = Execution(outcome=Outcome(outcome="node_failure", infrastructure=True), results={}, rehearsed=None)


def fail(sweep: SweepDir, recording: AttemptRecorder, number: int, folders: list[Attempt]) -> None:
    """Claim the point, and record a further attempt as a failure of its node."""
    claim, attempt = begin(sweep, number)
    folders.append(attempt)
    assert recording.record(claim, attempt, FAILED, ended_at=attempt.started_at + 1)


def begin(sweep: SweepDir, number: int) -> tuple[Claim, Attempt]:
    claim = queue_reader(sweep, "living").claim_next(everything)
    assert claim is not None
    name = new_attempt_id(claim.point, number)
    return claim, start_attempt(claim, name, number, settings(), host="h", port=1, device_ids=None, nodes=("n",))


def unpacking(sweep: SweepDir) -> AttemptRecorder:
    """A recorder that leaves the folders of attempts as they are, as for attempts of other pilots."""
    recording = recorder_of(sweep, "living")
    recording._packer.finish()
    recording._packer.add = lambda folder: None  # type: ignore[method-assign]
    return recording


def measure(attempt: Attempt, ranks: int = 2) -> None:
    for rank in range(ranks):
        result = RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={})
        protocol.write_json(protocol.result_path(attempt.folder, rank), result)


@pytest.mark.parametrize("form", ["loose", "packed", "merged"])
def test_results_written_after_the_record_of_a_failure_count(sweep: SweepDir, form: str) -> None:
    sweep.add_points(points("ok"))
    recording, attempts = unpacking(sweep), list[Attempt]()
    for number in (1, 2):
        fail(sweep, recording, number, attempts)
    late = attempts[1]
    if form == "merged":
        assert store.compact(sweep.path)
    measure(late)
    if form == "packed":
        pack_attempt(late.folder)
        assert not late.folder.exists()
    fail(sweep, recording, 3, attempts)

    by_id = {row["attempt_id"]: row for row in store.read_attempts(sweep.path).to_pylist()}
    found = [by_id[one.attempt_id] for one in attempts]
    assert [row["outcome"] for row in found] == ["node_failure", "ok", "node_failure"]
    assert [row["will_retry"] for row in found] == [True, False, False]
    assert [row["repeat_of"] for row in found] == [None, None, late.attempt_id]
    assert "taken for dead" in found[1]["evidence"] and "may have run twice" in found[2]["evidence"]
    assert [name.partition("@")[2] for name in entry_names(sweep.done)] == ["ok.json"]
    records = HistoryReader(sweep)
    records.refresh()
    for reader in (records, recording._records):
        assert [one.outcome for one in reader.all()].count("ok") == 1
    assert store.compact(sweep.path)
    again = {row["attempt_id"]: row for row in store.read_attempts(sweep.path).to_pylist()}
    assert again == by_id


def test_incomplete_results_leave_the_failure(sweep: SweepDir) -> None:
    sweep.add_points(points("ok"))
    recording, attempts = unpacking(sweep), list[Attempt]()
    fail(sweep, recording, 1, attempts)
    measure(attempts[0], ranks=1)
    for number in (2, 3):
        fail(sweep, recording, number, attempts)
    assert [name.partition("@")[2] for name in entry_names(sweep.done)] == ["node_failure.json"]
    assert {row["repeat_of"] for row in store.read_attempts(sweep.path).to_pylist()} == {None}


def test_folders_are_looked_at_only_before_a_failure_ends_the_point(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(recorder, "late_result", lambda at, *_: looks.append(at.path))
    sweep.add_points(points("ok"))
    recording, attempts = recorder_of(sweep, "living"), list[Attempt]()
    counts = []
    for number in (1, 2, 3):
        fail(sweep, recording, number, attempts)
        counts.append(len(looks))
    assert counts == [0, 0, 1]
