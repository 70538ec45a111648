"""The folder of a sweep, and adding points to its queue."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.state import queue
from launchers.state.process_identity import own_identity
from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point
from results.errors import InvalidResults
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points
from tests.results.helpers import PausedThread


def test_a_point_survives_the_trip_through_its_file(sweep: SweepDir) -> None:
    [point] = points("ok", method="rehearsed")
    interval = {"predicted_step_time_low_s": 0.2, "predicted_step_time_high_s": 0.5}
    point = dataclasses.replace(point, predicted_peak_bytes=5, predicted_step_time_s=0.25, **interval)
    assert sweep.add_points([point]) == 1
    path = sweep.todo / f"000000-{point.experiment.id}+rehearsed.json"
    assert read_point(path) == point
    written = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in written.items() if name not in interval}))
    assert read_point(path) == dataclasses.replace(point, **dict.fromkeys(interval)), "a queue of before intervals"


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


@pytest.mark.slow
def test_a_slow_adder_leaves_the_lock_of_a_quicker_one_alone(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find the lock of a dead one. The slow one is about to remove the lock when the quick one takes it
    over."""
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


def test_a_folder_that_is_not_a_sweep_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("lacks_room", ["sweep.json", "todo", "losses"])
def test_a_folder_begun_on_a_full_disk_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks_room: str
) -> None:
    def full(call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(path: str | Path, *args: Any, **options: Any) -> Any:
            if lacks_room == Path(path).name or f".{lacks_room}." in Path(path).name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(path, *args, **options)

        return fail

    with monkeypatch.context() as disk:
        disk.setattr(Path, "mkdir", full(Path.mkdir))
        disk.setattr(os, "replace", full(os.replace))
        with pytest.raises(InvalidResults, match=r"cannot make a sweep in .*: No space left on device"):
            SweepDir.create(tmp_path / "s", {})
    assert not [path for path in (tmp_path / "s").rglob("*") if path.name.endswith(".tmp")]
    sweep = SweepDir.create(tmp_path / "s", {"note": 1})
    assert sweep.marker.exists() and all(path.is_dir() for path in (sweep.todo, sweep.losses))


def test_empty_folders_of_a_sweep_without_its_marker_are_taken(tmp_path: Path) -> None:
    """Version 0.2.0 wrote the marker last, so a full disk left such folders."""
    (tmp_path / "queue" / "todo").mkdir(parents=True)
    (tmp_path / "pilots").mkdir()
    (tmp_path / ".sweep.json.12.abcdef.tmp").touch()
    (tmp_path / "pilots" / "mine.txt").touch()
    with pytest.raises(InvalidResults, match="exists and is not a sweep"):
        SweepDir.create(tmp_path, {})
    (tmp_path / "pilots" / "mine.txt").unlink()
    assert SweepDir.create(tmp_path, {}).marker.exists()


def test_creating_an_existing_sweep_opens_it(sweep: SweepDir) -> None:
    assert SweepDir.create(sweep.path, {"note": 2}).settings() == {"note": 1}


def test_a_folder_that_leads_out_of_the_sweep_is_refused(sweep: SweepDir, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    for place in (sweep.path / "nodes", sweep.path / "queue" / "broken"):
        place.symlink_to(tmp_path / "theirs")
        with pytest.raises(InvalidResults, match=f"{place} is a link to {tmp_path / 'theirs'}, outside the sweep"):
            SweepDir.open(sweep.path)
        place.unlink()
    (sweep.path / "nodes").symlink_to(sweep.attempts)
    assert SweepDir.open(sweep.path) == sweep


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_the_folder_of_another_user_is_refused(sweep: SweepDir) -> None:
    os.chown(sweep.path, 65534, -1)
    before = sorted(sweep.path.iterdir())
    with pytest.raises(InvalidResults, match="belongs to nobody, who could change what your pilots run") as error:
        SweepDir.create(sweep.path, {})
    assert "choose another name or results_dir" in str(error.value)
    assert sorted(sweep.path.iterdir()) == before
    assert SweepDir.open(sweep.path) == sweep  # reading is allowed
