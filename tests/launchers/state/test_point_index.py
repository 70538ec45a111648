"""An index gives pilots many points from one file, and is never more than a copy of the points' own files."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.state import point_index, queue, sweep_dir
from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import Point, SweepDir, entry_names
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points
from workloads.contract.protocol import write_json


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An addition of four points is large."""
    monkeypatch.setattr(point_index, "LEAST", 4)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the points' files that are read."""
    names: list[str] = []

    def read(path: Path) -> Point:
        names.append(path.name)
        return sweep_dir.read_point(path)

    monkeypatch.setattr("launchers.state.damaged.read_point", read)
    monkeypatch.setattr(queue, "read_point", read)
    return names


def many(count: int = 6, **fields: object) -> list[Point]:
    made = points(*["ok"] * count)
    return [dataclasses.replace(point, **fields) for point in made]  # type: ignore[arg-type]


def indexes(sweep: SweepDir) -> list[Path]:
    return sorted((sweep.path / "queue").glob("points-*.parquet"))


def test_a_pilot_reads_one_file_and_that_of_the_point_it_claims(sweep: SweepDir, opened: list[str]) -> None:
    added = many(
        predicted_peak_bytes=2**40,
        predicted_step_time_s=0.1,
        predicted_step_time_low_s=1 / 3,
        predicted_step_time_high_s=3.0,
        slow_step_s=1.5,
        ran_on=("a", "b"),
    )
    sweep.add_points(added)
    reader = queue_reader(sweep, "p")
    assert reader.waiting() == added and opened == []
    claim = reader.claim_next(everything)
    assert claim is not None and claim.point == added[0]
    assert opened == [f"{claim.stem}@p.json"]
    assert queue_reader(sweep, "other").claimed_by_others() == [added[0]] and len(opened) == 1


def test_points_added_later_are_found_with_and_without_an_index(sweep: SweepDir, opened: list[str]) -> None:
    added = many(12)
    sweep.add_points(added[:5])
    reader = queue_reader(sweep, "p")
    assert reader.waiting() == added[:5]
    sweep.add_points(added[:7])  # two more, too few for an index
    assert reader.waiting() == added[:7] and len(opened) == 2
    sweep.add_points(added)
    assert reader.waiting() == added and len(opened) == 2
    assert len(indexes(sweep)) == 2


@pytest.mark.parametrize("content", [None, b"", b"PAR1 cut", b"[1, 2]"], ids=["lost", "emptied", "cut", "other"])
def test_without_a_good_index_the_files_count(sweep: SweepDir, content: bytes | None) -> None:
    added = many()
    sweep.add_points(added)
    [path] = indexes(sweep)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    reader = queue_reader(sweep, "p")
    assert reader.waiting() == added
    assert reader.claim_next(everything) is not None


def test_a_row_of_an_index_that_is_no_point_is_read_from_its_file(sweep: SweepDir) -> None:
    added = many()
    plain = {point.stem: sweep_dir.point_to_dict(point) for point in added}
    plain[added[0].stem]["deadline_s"] = float("inf")
    plain[added[1].stem]["method"] = "guessed"
    plain[added[2].stem]["experiment"]["tp"] = 0
    plain[added[3].stem]["experiment"] = sweep_dir.point_to_dict(added[4])["experiment"]  # of another point
    point_index.write_index(sweep.path / "queue", plain, ())
    for point in added:
        write_json(sweep.todo / f"{point.stem}.json", sweep_dir.point_to_dict(point))
    assert queue_reader(sweep, "p").waiting() == added


def test_experiments_that_the_caller_has_are_not_read_again(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    added = many()
    sweep.add_points(added)
    monkeypatch.setattr(point_index.json, "loads", None)
    reader = QueueReader(sweep, "", print, {point.experiment.id: point.experiment for point in added})
    assert reader.waiting() == added


def test_a_point_that_comes_back_changed_is_the_new_one(sweep: SweepDir) -> None:
    sweep.add_points(many())
    old = queue_reader(sweep, "old")
    old.waiting()
    changed = many(deadline_s=77.0)
    for count in (6, 1):  # many points, and one
        for name in entry_names(sweep.todo)[:count]:
            (sweep.todo / name).unlink()
        changed = [dataclasses.replace(point, deadline_s=point.deadline_s + 1) for point in changed[:count]]
        sweep.add_points(changed)
        assert queue_reader(sweep, "p").waiting()[:count] == changed
    claim = old.claim_next(everything)
    assert claim is not None and claim.point == changed[0], "a pilot that had read the older one"


def test_a_damaged_file_of_a_point_of_an_index_costs_nothing(sweep: SweepDir) -> None:
    added = many()
    sweep.add_points(added)
    (sweep.todo / f"{added[0].stem}.json").write_bytes(b"")
    said: list[str] = []
    claim = queue_reader(sweep, "p", said).claim_next(everything)
    assert claim is not None and claim.point == added[0]
    assert len(said) == 1 and said[0].endswith("the point is taken from the index")


def test_many_index_files_become_one_with_the_points_that_are_left(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    monkeypatch.setattr(point_index, "MOST_FILES", 2)
    added = many(18)
    for count in (6, 12):
        sweep.add_points(added[:count])
    (sweep.todo / f"{added[0].stem}.json").unlink()
    assert len(indexes(sweep)) == 2
    sweep.add_points(added[1:])
    [path] = indexes(sweep)
    assert queue_reader(sweep, "p").waiting() == added[1:] and opened == []
    assert sorted(point_index._stems(path)) == [point.stem for point in added[1:]]


def test_two_processes_that_add_at_once_have_one_index_each(sweep: SweepDir, opened: list[str]) -> None:
    added = many(12)
    together = threading.Barrier(2)

    def add(mine: list[Point]) -> None:
        together.wait(10)
        sweep.add_points(mine)

    threads = [threading.Thread(target=add, args=(mine,)) for mine in (added[:8], added[4:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue_reader(sweep, "p").waiting() == added and opened == []
    assert len(indexes(sweep)) == 2


def test_whoever_finds_a_points_file_finds_its_index(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, value: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_dir, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep.add_points(many())
    assert len(indexes(sweep)) == 1 and entry_names(sweep.todo) == []
    monkeypatch.undo()
    assert sweep.add_points(many()) == 6
    assert queue_reader(sweep, "p").waiting() == many()


def test_the_right_to_add_is_checked_again_while_points_are_added(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []

    def held(lease: object) -> bool:
        checks.append(1)
        return True

    monkeypatch.setattr("results.shared_filesystem.lease.Lease.held", held)
    sweep.add_points(many(50))
    assert len(checks) < 10, "not once a point"
    checks.clear()
    monkeypatch.setattr(sweep_dir, "_CHECK_S", 0.0)

    def later() -> Iterator[Point]:
        yield from (dataclasses.replace(point, method="rehearsed") for point in many(50))

    sweep.add_points(later())
    assert len(checks) >= 100, "before each point is taken, and before each is written"
