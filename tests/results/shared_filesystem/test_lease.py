"""Leases: one holder at a time, also while several processes take over from a dead holder at once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from results.shared_filesystem.lease import acquire
from tests.results.helpers import PausedThread

STALE_S = 60.0


@pytest.fixture(params=["today", "version 0.1"])
def dead(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The lock of a holder that was killed an hour ago."""
    path = tmp_path / "a.lock"
    if request.param == "today":
        path.mkdir()
        (path / "another-host.1234.0000").touch()
    else:
        path.write_text("another-host 1234 0000\n")
    long_ago = time.time() - 3600
    for file in [*path.rglob("*"), path]:
        os.utime(file, (long_ago, long_ago))
    return path


class Hold(threading.Thread):
    """Acquires the lease, and releases it when told to."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.path, self.inside, self.leave = path, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with acquire(self.path, stale_after_s=STALE_S, wait_s=30.0) as lease:
            assert lease is not None
            self.inside.set()
            self.leave.wait(30)
            assert lease.held()


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with acquire(path, stale_after_s=STALE_S, wait_s=0.0) as first:
        assert first is not None and first.held()
        with acquire(path, stale_after_s=STALE_S, wait_s=0.1) as second:
            assert second is None
        assert first.held()
    assert list(tmp_path.iterdir()) == []
    with acquire(path, stale_after_s=STALE_S, wait_s=0.0) as third:
        assert third is not None


@pytest.mark.slow
def test_a_slow_waiter_leaves_the_lease_of_a_quicker_one_alone(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one has found the holder dead and is about to remove its lease when the quick one takes over."""
    paused = PausedThread(monkeypatch, "slow", dead)
    slow = Hold(dead, "slow")
    assert paused.reached.wait(10)
    quick = Hold(dead, "quick")
    assert quick.inside.wait(10)
    paused.go_on.set()
    assert not slow.inside.wait(0.5)
    third = Hold(dead, "third")
    assert not third.inside.wait(0.5)
    for thread in (quick, slow, third):
        thread.leave.set()
    for thread in (quick, slow, third):
        thread.join(10)
    assert slow.inside.is_set() and third.inside.is_set()


def test_a_dead_holder_is_followed_at_once_and_nothing_is_left(dead: Path) -> None:
    with acquire(dead, stale_after_s=STALE_S, wait_s=0.0) as lease:
        assert lease is not None and lease.held()
    assert list(dead.parent.iterdir()) == []


def test_a_living_holder_of_the_old_kind_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.write_text("another-host 1234 0000\n")
    with acquire(path, stale_after_s=STALE_S, wait_s=0.1) as lease:
        assert lease is None
    assert path.read_text() == "another-host 1234 0000\n"


def test_a_holder_that_was_thought_dead_learns_it_and_leaves_the_next_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with acquire(path, stale_after_s=STALE_S, wait_s=0.0) as first:
        assert first is not None
        os.utime(path / first.token, (0, 0))
        with acquire(path, stale_after_s=STALE_S, wait_s=0.0) as second:
            assert second is not None
            assert not first.held()
            assert second.held()
    with ExitStack() as stack:
        first = stack.enter_context(acquire(path, stale_after_s=STALE_S, wait_s=0.0))
        assert first is not None
        os.utime(path / first.token, (0, 0))
        with acquire(path, stale_after_s=STALE_S, wait_s=0.0) as second:
            stack.close()
            assert second is not None and second.held()


@pytest.mark.slow
def test_never_two_at_once_with_dying_holders_and_random_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six threads take the lease in turn. Every second holder dies; every step of everyone may take long."""
    path, chance = tmp_path / "a.lock", random.Random(0)

    def slowly(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        time.sleep(chance.choice((0.0, 0.0, 0.001, 0.005)))
        original(*args, **kwargs)

    for function in ("unlink", "rename", "rmdir", "mkdir", "utime"):
        monkeypatch.setattr(os, function, partial(slowly, getattr(os, function)))
    holders: list[str] = []
    most, turns, killed = 0, 0, []

    def work(name: str) -> None:
        nonlocal most, turns
        for _ in range(6):
            stack = ExitStack()
            lease = stack.enter_context(acquire(path, stale_after_s=STALE_S, wait_s=60.0))
            assert lease is not None
            holders.append(name)
            most, turns = max(most, len(holders)), turns + 1
            time.sleep(0.005)
            holders.remove(name)
            if turns % 2:
                killed.append(stack.pop_all())  # kept, or its end would release the lease
                os.utime(path / lease.token, (0, 0))
            else:
                stack.close()

    threads = [threading.Thread(target=work, args=(f"{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert turns == 36
    assert most == 1
