"""Claiming, releasing, finishing and taking over points, and files that hold no point."""

from __future__ import annotations

import threading

from launchers.state import queue
from launchers.state.sweep_dir import Point, SweepDir, entry_names
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points


def test_many_pilots_never_claim_a_point_twice(sweep: SweepDir) -> None:
    sweep.add_points(points(*["ok"] * 60))
    claimed: list[str] = []

    def claim_all(name: str) -> None:
        mine = queue_reader(sweep, name)
        while (claim := mine.claim_next(everything)) is not None:
            claimed.append(claim.stem)

    threads = [threading.Thread(target=claim_all, args=(f"p{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 60 and len(set(claimed)) == 60


def test_points_are_claimed_in_order_and_only_those_accepted(sweep: SweepDir) -> None:
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
    lines: list[str] = []
    claim = queue_reader(sweep, "p", lines).claim_next(everything)
    assert claim is not None and claim.point.experiment.model.name == "ok"
    assert (sweep.path / "queue" / "broken" / "000000-garbage.json").exists()
    assert len(lines) == 1 and "is not a point of a sweep" in lines[0]


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
