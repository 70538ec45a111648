"""Pilots on a filesystem that fails, and pilots that die at any call: every point runs once and ends once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.attempt import packing
from launchers.pilot import pilot as pilot_module
from launchers.pilot import recorder
from launchers.state import pilot_state, queue
from launchers.state.pilot_state import Liveness
from launchers.state.sweep_dir import SweepDir, entry_names
from launchers.status.retry import retry
from launchers.status.status import sweep_status
from results.shared_filesystem import packed_folder, patience
from results.tables import compaction, store
from tests.launchers import local_runs
from tests.launchers.failing_calls import Death, FailingFiles
from tests.launchers.failing_files import FakeAttempts, run_pilot
from tests.launchers.local_runs import start_pilot
from tests.launchers.scripted import points, settings
from tests.sampling import sampled

POINTS = 3
SEEDS = 10
"""Seeds of one test; each is a sweep of its own."""


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A pilot sets handlers; give them back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "BRIEF_WAITS_S", (1e-5,) * 4)
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 1e-4)
    monkeypatch.setattr(patience, "LONGEST_WAIT_S", 1e-3)
    monkeypatch.setattr(compaction, "_STALE_AFTER_S", 0.01)


class AtOnce:
    """Replaces the thread that packs folders and merges rows: a pilot dies there, too."""

    def __init__(self, **_: Any) -> None:
        pass

    def submit(self, step: Callable[..., None], *arguments: Any) -> None:
        step(*arguments)

    def shutdown(self) -> None:
        pass


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each attempt its folder is packed and its row merged before the pilot goes on."""
    monkeypatch.setattr(packing, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(recorder, "_LEAST_PARTS", 1)


def check(sweep: SweepDir, runs: Counter[str]) -> None:
    """Every point ran once, has one row, and has ended."""
    assert sweep_status(sweep).done == {"ok": POINTS}
    assert entry_names(sweep.todo) == entry_names(sweep.claimed) == []
    assert sorted(runs.values()) == [1] * POINTS, runs
    rows = store.read_attempts(sweep.path).to_pylist()
    final: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["will_retry"]:
            final.setdefault(row["experiment_id"], []).append(row)
    assert [len(of_point) for of_point in final.values()] == [1] * POINTS
    assert {row["outcome"] for of_point in final.values() for row in of_point} == {"ok"}
    assert not any(row["repeat_of"] for row in rows)
    known = {record.attempt_id for record in sweep_status(sweep).attempts}
    assert known == {row["attempt_id"] for row in rows}


@pytest.mark.slow
@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("block", sampled(range(10), 1, seconds=4))
def test_every_point_ends_once_whatever_calls_fail(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        with monkeypatch.context() as patch:
            sweep = SweepDir.create(tmp_path / str(seed), {})
            sweep.add_points(points(*["ok"] * POINTS))
            files = FailingFiles(patch.setattr, sweep.path, seed, rate=(0.01, 0.05, 0.2)[seed % 3])
            attempts = FakeAttempts(patch, files)
            files.active = True
            status = run_pilot(sweep, "p")
            files.active = False
            assert status == pilot_module.FINISHED, (seed, files.failed)
            check(sweep, attempts.runs)
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("block", sampled(range(10), 1, seconds=4))
def test_every_point_ends_once_wherever_pilots_die(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four pilots dies at a different call, and some calls fail; the fifth pilot finishes the rest."""
    monkeypatch.setattr(Liveness, "judge", lambda self, pilot_id: "dead")
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        with monkeypatch.context() as patch:
            sweep = SweepDir.create(tmp_path / str(seed), {})
            sweep.add_points(points(*["ok"] * POINTS))
            files = FailingFiles(patch.setattr, sweep.path, seed, rate=(0.0, 0.02)[seed % 2])
            attempts = FakeAttempts(patch, files)
            deaths = (7 + seed % 97, 11 + 3 * seed % 61, 5 + 7 * seed % 67, 9 + 5 * seed % 71)
            for number, dies_after in enumerate(deaths):
                files.dies_at, files.active = files.calls + dies_after, True
                try:
                    run_pilot(sweep, f"p{number}")
                    break
                except Death:
                    pass
                finally:
                    files.active = False
            files.dies_at, files.active = None, True
            run_pilot(sweep, "last")
            files.active = False
            check(sweep, attempts.runs)


@pytest.mark.slow(seconds=2)
def test_real_pilots_on_failing_files_run_each_point_exactly_once(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pilots with agents and ranks; every thirtieth file call of the pilots fails."""
    sweep.add_points(points(*["ok"] * 10))
    pilot = (sys.executable, "-m", "tests.launchers.failing_files")
    monkeypatch.setattr(local_runs, "SCRIPTED", pilot)
    pilots = [start_pilot(sweep, name, settings(lease_s=60.0)) for name in ("p1", "p2")]
    assert [one.wait(120) for one in pilots] == [0, 0]
    assert sweep_status(sweep).done == {"ok": 10}
    rows = store.read_attempts(sweep.path).to_pylist()
    assert sorted(row["seed"] for row in rows) == list(range(10))
    assert len(packed_folder.folders(sweep.attempts)) == 10, "a point ran twice"
    log = "".join(pilot_state.log_path(sweep, name).read_text() for name in ("p1", "p2"))
    assert "on shared files had to be repeated" in log and "Traceback" not in log


@pytest.mark.parametrize("takers", [1, 2, 3])
def test_a_recorded_point_is_only_moved_however_often_its_pilots_die(
    takers: int, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pilot dies between record and move, and each pilot that takes over dies before it can move the
    point."""
    sweep.add_points(points("ok"))
    attempts = FakeAttempts(monkeypatch, FailingFiles(monkeypatch.setattr, sweep.path, 0, rate=0.0))
    monkeypatch.setattr(Liveness, "judge", lambda self, pilot_id: "dead")

    def die(*_: object) -> bool:
        raise Death

    with monkeypatch.context() as patch:
        patch.setattr(queue, "finish", die)
        for number in range(takers + 1):
            with pytest.raises(Death):
                run_pilot(sweep, f"p{number}")
    [record] = sweep_status(sweep).attempts
    [name] = entry_names(sweep.claimed)
    assert name.endswith(f"@p{takers}@{record.attempt_id}.json")
    assert run_pilot(sweep, "last") == pilot_module.FINISHED
    assert list(attempts.runs.values()) == [1]
    assert sweep_status(sweep).done == {"ok": 1}
    assert [row["attempt_id"] for row in store.read_attempts(sweep.path).to_pylist()] == [record.attempt_id]


def test_a_retried_point_runs_although_an_earlier_claim_was_recorded(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim names the attempt recorded under it; a point that a user has requeued since then starts anew."""
    sweep.add_points(points("ok"))
    attempts = FakeAttempts(monkeypatch, FailingFiles(monkeypatch.setattr, sweep.path, 0, rate=0.0))
    monkeypatch.setattr(Liveness, "judge", lambda self, pilot_id: "dead")
    run_pilot(sweep, "first")
    assert retry(sweep, ["ok"]) == 1
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(pilot_module, "start_attempt", lambda *_, **__: (_ for _ in ()).throw(Death()))
        run_pilot(sweep, "second")
    run_pilot(sweep, "third")
    assert list(attempts.runs.values()) == [2]


@pytest.mark.slow
def test_a_failed_call_is_repeated_and_no_pass_over_the_queue(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first open of every waiting point fails, and so does the first look at each folder of the queue: no point is
    read twice, no claim is given back, and the folder of waiting points is listed for each claim and once more."""
    sweep.add_points(points(*["ok"] * 12))
    attempts = FakeAttempts(monkeypatch, FailingFiles(monkeypatch.setattr, sweep.path, 0, rate=0.0))
    calls: Counter[str] = Counter()
    opened, listed, renamed = os.open, os.scandir, os.rename

    def once(name: str, path: Path | str) -> None:
        calls[name] += 1
        if calls[name] == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    def open_file(path: Any, *more: Any, **options: Any) -> int:
        if Path(path).parent == sweep.todo:
            once(Path(path).name, path)
        return opened(path, *more, **options)

    def list_folder(path: Any) -> Any:
        if Path(path).parent == sweep.todo.parent:
            once(Path(path).name, path)
        return listed(path)

    def rename(source: Any, target: Any) -> None:
        calls["given back"] += Path(target).parent == sweep.todo
        renamed(source, target)

    with monkeypatch.context() as patch:
        for name, failing in (("open", open_file), ("scandir", list_folder), ("rename", rename)):
            patch.setattr(os, name, failing)
        assert run_pilot(sweep, "p") == pilot_module.FINISHED
    assert sum(attempts.runs.values()) == len(attempts.runs) == 12
    assert calls["given back"] == 0
    assert all(calls[f"{point.stem}.json"] == 2 for point in points(*["ok"] * 12)), calls
    assert calls["todo"] <= 12 + 3, calls


def test_a_pilot_gives_up_on_a_queue_that_stays_unreadable(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.add_points(points("ok"))
    files = FailingFiles(monkeypatch.setattr, sweep.path / "queue", 0, rate=1.0)
    FakeAttempts(monkeypatch, files)
    monkeypatch.setattr(pilot_module, "QUEUE_LIMIT_S", 0.05)
    files.active = True
    assert run_pilot(sweep, "p") == pilot_module.TROUBLE
    files.active = False
    log = capsys.readouterr().out
    assert log.count("trying again, nothing is lost") == 1
    assert "stopping: cannot read or move the points of the queue: [Errno" in log
    assert sweep_status(sweep).todo == 1


def test_a_pilot_whose_sweep_is_removed_ends_at_once(sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not wait for files that cannot be read, as it does for a quarter of an hour where the folder is there."""
    shutil.rmtree(sweep.path)
    assert run_pilot(sweep, "p") == pilot_module.TROUBLE
    said = capsys.readouterr().out
    assert f"stopping: {sweep.path} was removed" in said and "trying again" not in said
