"""Which outcomes are retried, and how often; records are copied into one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launchers.attempt import rows
from launchers.attempt.attempt import new_attempt_id, start_attempt
from launchers.attempt.execute import Execution
from launchers.attempt.outcome import Outcome
from launchers.pilot import recorder
from launchers.pilot.patience import Patience
from launchers.pilot.recorder import AttemptRecorder, wants_retry
from launchers.state import history
from launchers.state.history import AttemptRecord, HistoryReader
from launchers.state.merged_history import read_merged
from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables import files, store
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import attempt_record, cluster, points, settings


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


def test_a_pilot_copies_its_records_into_one_file_after_many_and_at_its_end(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LEAST", 0)
    monkeypatch.setattr("launchers.state.merged_history.LEAST", 0)
    monkeypatch.setattr(recorder, "_MERGED_AFTER", 1)
    recording = recorder_of(sweep, "p")
    merged = [len(read_merged(sweep.history)) for _ in recorded(sweep, recording, 3)]
    recording.compact()
    assert merged == [0, 2, 2] and len(read_merged(sweep.history)) == 3


@pytest.mark.slow
def test_few_attempts_have_files_of_rows_of_their_own_while_pilots_run(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pilots record in turn, and neither records as many attempts as are merged at once."""
    monkeypatch.setattr(recorder, "_LEAST_PARTS", 4)
    pilots = [recorder_of(sweep, name) for name in ("p", "q")]
    parts = []
    for number, recording in enumerate(pilots * 3):
        for _ in recorded(sweep, recording, 1):
            recording._packer._thread.submit(lambda: None).result()  # what was added before is done
        parts.append(len(files.part_paths(sweep.path, "attempts")))
        assert store.read_attempts(sweep.path).num_rows == number + 1
    assert parts == [1, 2, 3, 0, 1, 2]
    folder = files.part_path(sweep.path, "attempts", "").parent
    assert sum(entry.is_file() for entry in sweep.path.rglob("*")) <= 3 * len(parts) + len(list(folder.iterdir())) + 3


def recorder_of(sweep: SweepDir, pilot_id: str) -> AttemptRecorder:
    context = rows.RunContext(sweep="s", launcher="local", cluster=cluster(), provenance={}, pilot_id=pilot_id)
    patience = Patience(sweep, print, lambda *_: True)
    return AttemptRecorder(sweep, pilot_id, settings(), context, HistoryReader(sweep), print, patience)


def recorded(sweep: SweepDir, recording: AttemptRecorder, count: int) -> Iterator[None]:
    """Claim and record so many new points of the sweep, one after another."""
    queue = queue_reader(sweep, recording._pilot_id)
    for _ in range(count):
        sweep.add_points(points(*["oom"] * (1 + len(entry_names(sweep.done)))))
        recording._records.refresh()
        claim = queue.claim_next(everything)
        assert claim is not None
        attempt_id = new_attempt_id(claim.point, 1)
        attempt = start_attempt(claim, attempt_id, 1, settings(), host="h", port=1, device_ids=None, nodes=("n",))
        done = Execution(outcome=Outcome(outcome="oom"), results={}, rehearsed=None)
        assert recording.record(claim, attempt, done, ended_at=attempt.started_at + 1)
        yield
