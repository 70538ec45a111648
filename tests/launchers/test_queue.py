from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.attempt.outcome import Outcome
from launchers.pilot.recorder import wants_retry
from launchers.state import history, pilot_state, queue
from launchers.state.history import AttemptRecord
from launchers.state.pilot_state import Liveness, PilotState, write_state
from launchers.state.process_identity import ProcessIdentity, own_identity, provably_dead
from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point
from launchers.status.status import sweep_status
from results.errors import InvalidResults
from tests.launchers.scripted import points, settings
from tests.results.helpers import PausedThread


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "sweep", {"note": 1})


def everything(waiting: list[Point]) -> list[Point]:
    return waiting


def queue_reader(sweep: SweepDir, pilot_id: str, said: list[str] | None = None) -> QueueReader:
    return QueueReader(sweep, pilot_id, (said if said is not None else []).append)


def attempt(number: int, outcome: str = "hang", infrastructure: bool = False, **changes: object) -> AttemptRecord:
    fields = {
        "attempt_id": f"a{number}",
        "attempt_number": number,
        "pilot_id": "p",
        "experiment_id": "e",
        "world_size": 8,
        "outcome": outcome,
        "phase": "step",
        "phase_step": 1,
        "failed_rank": 0,
        "evidence": "because",
        "infrastructure": infrastructure,
        "will_retry": False,
        "started_at": 100.0 * number,
        "ended_at": 100.0 * number + 45.0,
    }
    return AttemptRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_point_survives_the_trip_through_its_file(sweep: SweepDir) -> None:
    [point] = points("ok", method="rehearsed")
    point = dataclasses.replace(point, predicted_peak_bytes=5, predicted_step_time_s=0.25)
    assert sweep.add_points([point]) == 1
    assert read_point(sweep.todo / f"000000-{point.experiment.id}+rehearsed.json") == point


def test_points_are_added_once_whatever_their_index_and_state(sweep: SweepDir) -> None:
    first, second, third = points("a", "b", "c")
    assert sweep.add_points([first, second]) == 2
    claim = queue_reader(sweep, "p").claim_next(everything)
    assert claim is not None and claim.point == first
    queue.finish(claim, "ok")
    queue_reader(sweep, "p").claim_next(everything)
    moved = dataclasses.replace(first, index=77)
    measured_and_rehearsed = dataclasses.replace(first, method="rehearsed")
    assert sweep.add_points([moved, second, third, third, measured_and_rehearsed]) == 2
    assert [len(entry_names(folder)) for folder in (sweep.todo, sweep.claimed, sweep.done)] == [2, 1, 1]


def test_a_lock_of_a_dead_adder_does_not_hold_others_up(sweep: SweepDir) -> None:
    dead = dataclasses.replace(own_identity(), start_ticks=1)
    lock = sweep.path / "queue" / "adding.lock"
    lock.write_text(json.dumps(dataclasses.asdict(dead)))
    os.utime(lock, (0, 0))
    assert sweep.add_points(points("a")) == 1


def test_a_slow_adder_leaves_the_lock_of_a_quicker_one_alone(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adders find the lock of a dead one. The slow one is about to remove it when the quick one takes over."""
    lock = sweep.path / "queue" / "adding.lock"
    dead = dataclasses.replace(own_identity(), start_ticks=1)
    lock.write_text(json.dumps(dataclasses.asdict(dead)))
    os.utime(lock, (0, 0))
    paused = PausedThread(monkeypatch, "slow", lock)
    quick_inside, slow_inside, quick_may_end = threading.Event(), threading.Event(), threading.Event()

    def of_the_slow() -> Iterator[Point]:
        slow_inside.set()
        yield from points("a", "b")

    def of_the_quick() -> Iterator[Point]:
        quick_inside.set()
        assert quick_may_end.wait(30)
        yield from points("a", "b")

    slow = threading.Thread(target=sweep.add_points, args=(of_the_slow(),), name="slow")
    slow.start()
    assert paused.reached.wait(10)
    quick = threading.Thread(target=sweep.add_points, args=(of_the_quick(),), name="quick")
    quick.start()
    assert quick_inside.wait(10)
    paused.go_on.set()
    both = slow_inside.wait(0.5)
    quick_may_end.set()
    slow.join()
    quick.join()
    assert not both, "two add points at once"
    assert slow_inside.is_set()
    assert len(entry_names(sweep.todo)) == 2


def test_many_drawers_never_draw_a_point_twice(sweep: SweepDir) -> None:
    sweep.add_points(points(*["ok"] * 60))
    drawn: list[str] = []

    def draw_all(name: str) -> None:
        mine = queue_reader(sweep, name)
        while (claim := mine.claim_next(everything)) is not None:
            drawn.append(claim.stem)

    threads = [threading.Thread(target=draw_all, args=(f"p{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 60 and len(set(drawn)) == 60


def test_points_are_drawn_in_order_and_only_those_accepted(sweep: SweepDir) -> None:
    sweep.add_points(points(*["ok"] * 12))
    mine = queue_reader(sweep, "p")

    def even(waiting: list[Point]) -> list[Point]:
        return [point for point in waiting if point.index % 2 == 0]

    first, second = mine.claim_next(even), mine.claim_next(even)
    assert first is not None and second is not None
    assert [first.point.index, second.point.index] == [0, 2]
    queue.release(first)
    again = mine.claim_next(even)
    assert again is not None and again.point.index == 0


def test_a_claim_taken_over_is_noticed_by_its_old_owner(sweep: SweepDir) -> None:
    sweep.add_points(points("ok"))
    old = queue_reader(sweep, "slow").claim_next(everything)
    assert old is not None and old.held
    new = queue.take_over(sweep, old.stem, "slow", "fresh")
    assert new is not None and new.held and not old.held
    assert queue.take_over(sweep, old.stem, "slow", "third") is None
    assert not queue.finish(old, "ok") and not queue.release(old)
    assert queue.finish(new, "ok")
    assert entry_names(sweep.done) == [f"{old.stem}@ok.json"]


def test_a_garbage_file_in_the_queue_is_put_aside(sweep: SweepDir) -> None:
    sweep.add_points(points("ok"))
    (sweep.todo / "000000-garbage.json").write_text("{not json")
    said: list[str] = []
    claim = queue_reader(sweep, "p", said).claim_next(everything)
    assert claim is not None and claim.point.experiment.model.name == "ok"
    assert (sweep.path / "queue" / "broken" / "000000-garbage.json").exists()
    assert len(said) == 1 and "is not a point of a sweep" in said[0]


def test_a_folder_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidResults, match=r"is not a sweep: it has no sweep\.json"):
        SweepDir.open(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InvalidResults, match="exists and is not a sweep"):
        SweepDir.create(tmp_path, {})
    (tmp_path / "sweep.json").write_text('{"format": 99}')
    with pytest.raises(InvalidResults, match="is not of format 1"):
        SweepDir.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidResults):
        SweepDir.create(tmp_path / "file" / "sweep", {})


def test_creating_an_existing_sweep_opens_it(sweep: SweepDir) -> None:
    assert SweepDir.create(sweep.path, {"note": 2}).settings() == {"note": 1}


def state(identity: ProcessIdentity, count: int = 1, activity: pilot_state.Activity = "running") -> PilotState:
    return PilotState(pilot_id="p", identity=identity, count=count, time=0.0, started_at=0.0, activity=activity)


def test_a_process_is_told_from_another_of_the_same_pid() -> None:
    me = own_identity()
    assert not provably_dead(me)
    assert provably_dead(dataclasses.replace(me, start_ticks=me.start_ticks + 1))
    assert provably_dead(dataclasses.replace(me, pid=2**22 + 1))
    assert provably_dead(dataclasses.replace(me, boot_id="before"))
    # What another machine or namespace does cannot be seen from here.
    assert not provably_dead(dataclasses.replace(me, pid=2**22 + 1, host="elsewhere"))
    assert not provably_dead(dataclasses.replace(me, pid=2**22 + 1, pid_namespace=1))


def test_a_pilot_elsewhere_is_judged_by_its_count_not_by_its_clock(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = dataclasses.replace(own_identity(), host="elsewhere")
    now = [1000.0]
    monkeypatch.setattr(pilot_state.time, "monotonic", lambda: now[0])
    liveness = Liveness(sweep, lease_s=60.0)
    write_state(sweep, state(elsewhere, count=1))  # its own clock says 1970
    assert liveness.judge("p") == "unknown"
    now[0] += 59
    assert liveness.judge("p") == "unknown"
    write_state(sweep, state(elsewhere, count=2))
    assert liveness.judge("p") == "alive"
    now[0] += 61
    assert liveness.judge("p") == "dead"
    write_state(sweep, state(elsewhere, count=3))
    assert liveness.judge("p") == "alive"
    write_state(sweep, state(elsewhere, count=4, activity="ended"))
    assert liveness.judge("p") == "dead"


def test_a_pilot_without_a_state_is_dead_after_a_lease(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pilot_state.time, "monotonic", lambda: now[0])
    liveness = Liveness(sweep, lease_s=60.0)
    assert liveness.judge("gone") == "unknown"
    now[0] = 61.0
    assert liveness.judge("gone") == "dead"


@pytest.mark.parametrize(
    ("outcome", "before", "again"),
    [
        (Outcome(outcome="ok"), [], False),
        (Outcome(outcome="oom"), [], False),
        (Outcome(outcome="crash"), [], False),
        (Outcome(outcome="timeout"), [], False),
        (Outcome(outcome="diverged"), [], False),
        (Outcome(outcome="cancelled"), [attempt(n, "cancelled") for n in range(9)], True),
        (Outcome(outcome="preempted"), [attempt(n, "preempted") for n in range(9)], True),
        (Outcome(outcome="hang"), [], True),
        (Outcome(outcome="hang"), [attempt(1, "node_failure", True)], True),
        (Outcome(outcome="hang"), [attempt(1, "hang")], False),
        (Outcome(outcome="node_failure", infrastructure=True), [attempt(1, "hang")], True),
        (Outcome(outcome="nccl_error", infrastructure=True), [attempt(n, "crash", True) for n in (1, 2)], False),
        (Outcome(outcome="crash", infrastructure=True), [attempt(1, "crash", True)], True),
    ],
)
def test_retries_are_bounded_by_kind(outcome: Outcome, before: list[AttemptRecord], again: bool) -> None:
    assert wants_retry(outcome, before, settings(max_attempts=3)) is again


def test_status_counts_from_files(sweep: SweepDir) -> None:
    sweep.add_points(points(*["ok"] * 5))
    mine = queue_reader(sweep, "p")
    for number, outcome in enumerate(("ok", "oom")):
        claim = mine.claim_next(everything)
        assert claim is not None
        history.write_record(sweep, claim.stem, attempt(number, outcome))
        queue.finish(claim, outcome)
    mine.claim_next(everything)
    status = sweep_status(sweep)
    assert (status.total, status.todo, status.claimed, status.done) == (5, 2, 1, {"ok": 1, "oom": 1})
    assert status.left == 3 and status.finished == 2
    assert status.device_hours == pytest.approx(2 * 45 * 8 / 3600)
    assert status.expected_left_s == pytest.approx(2 * 45)
    assert [record.outcome for record in status.failures()] == ["oom"]


def test_garbage_in_the_queue_is_set_aside_not_run(sweep: SweepDir) -> None:
    sweep.add_points(points("ok"))
    (sweep.todo / "000000-a.json").write_text("garbage{")
    (sweep.todo / "folder.json").mkdir()
    (sweep.claimed / "000001-b@gone.json").write_bytes(b"\xff\xfe")
    (sweep.claimed / "000002-c.json").write_text("{}")
    claim = queue_reader(sweep, "p").claim_next(everything)
    assert claim is not None and claim.point.index == 0
    for stem, holder in queue.claims_of_others(sweep, "p"):
        assert queue.take_over(sweep, stem, holder, "p") is None
    assert queue.claims_of_others(sweep, "p") == []
    broken = sorted(path.name for path in (sweep.path / "queue" / "broken").iterdir())
    assert broken == ["000000-a.json", "000001-b@gone.json", "000002-c.json"]
