"""A living pilot finishes a point that a dead pilot had begun."""

from __future__ import annotations

import pytest

from launchers.attempt import rows
from launchers.attempt.attempt import new_attempt_id, start_attempt
from launchers.pilot.dead_pilots import DeadPilots
from launchers.pilot.patience import Patience
from launchers.pilot.recorder import AttemptRecorder
from launchers.state.history import HistoryReader, write_record
from launchers.state.sweep_dir import Point, SweepDir, entry_names
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import attempt_record, cluster, points, settings
from workloads.contract import protocol
from workloads.contract.protocol import RankResult


def take_over(sweep: SweepDir, point: Point, holder: str) -> None:
    records = HistoryReader(sweep)
    context = rows.RunContext(sweep="s", launcher="local", cluster=cluster(), provenance={}, pilot_id="living")
    patience = Patience(sweep, print, lambda *_: True)
    recorder = AttemptRecorder(sweep, "living", settings(), context, records, print, patience)
    assert DeadPilots(sweep, "living", records, recorder, print).take_over(point.stem, holder)


@pytest.mark.parametrize("name", ["ok", "a-model-with-a-name-of-its-own"])
def test_measurements_are_found_under_long_ids(sweep: SweepDir, name: str) -> None:
    (point,) = points(name, recompute="selective", micro_batch_size=2)
    sweep.add_points([point])
    claim = queue_reader(sweep, "dead").claim_next(everything)
    assert claim is not None
    begun = new_attempt_id(point, 1)
    attempt = start_attempt(claim, begun, 1, settings(), host="h", port=1, device_ids=None, nodes=("n",))
    for rank in range(2):
        result = RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={})
        protocol.write_json(protocol.result_path(attempt.folder, rank), result)
    take_over(sweep, point, "dead")
    assert entry_names(sweep.todo) == []
    assert entry_names(sweep.done) == [f"{point.stem}@ok.json"]
    assert entry_names(sweep.history) == [f"{point.stem}@{begun}.json"]


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
def test_a_dead_pilots_record_counts_despite_wrong_clocks(sweep: SweepDir, ahead_s: float) -> None:
    """An earlier pilot, whose clock was ahead, had also begun the point."""
    (point,) = points("ok")
    sweep.add_points([point])
    assert queue_reader(sweep, "second").claim_next(everything) is not None
    by_first = {"pilot_id": "first", "attempt_id": "x.a1", "started_at": 100.0 + ahead_s}
    first = attempt_record(1, "hang", will_retry=True, **by_first)
    second = attempt_record(2, "ok", pilot_id="second", attempt_id="x.a2")
    for record in (first, second):
        write_record(sweep, point.stem, record)
    take_over(sweep, point, "second")
    assert entry_names(sweep.todo) == []
    assert entry_names(sweep.done) == [f"{point.stem}@ok.json"]
