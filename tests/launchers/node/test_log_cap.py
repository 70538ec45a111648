"""Logs of ranks that write too much, with real processes: bounded while the ranks write, and complete at the end."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from launchers.node import fork, log_cap
from launchers.node.log_cap import CappedLog
from launchers.node.rank_group import LocalRanks
from launchers.state.process_identity import process_stat
from workloads.contract import protocol

LINES, KIB = 40_000, 2**10
"""Lines of 64 bytes: 2.5 MB."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_cap, "LIMIT_BYTES", 256 * KIB)
    monkeypatch.setattr(log_cap, "KEPT_BYTES", 64 * KIB)
    monkeypatch.setattr(log_cap, "EVERY_S", 0.01)
    # An agent's only children are its ranks and their descendants. This process also has the fork server of other
    # tests.
    monkeypatch.setattr(fork, "kill_orphans", lambda limit_s: [])


def line_of(number: int) -> str:
    return f"{number:08d} {'x' * 54}\n"


def flood(folder: Path, rank: int, local_rank: int, *_: object) -> NoReturn:
    for number in range(LINES):
        sys.stdout.write(line_of(number))
        if number % 1000 == 0:
            time.sleep(0.002)  # so that the log is cut more than once
    sys.stdout.flush()
    os.write(2, b"the last words\n")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def quiet(folder: Path, rank: int, local_rank: int, *_: object) -> NoReturn:
    print("all is well", flush=True)
    os._exit(0)


def run(folder: Path, ranks: LocalRanks) -> int:
    """Maximum length of any log during the run, in bytes."""
    longest = 0
    until = time.monotonic() + 100
    while ranks.running and time.monotonic() < until:
        ranks.poll()
        longest = max([longest, *(path.stat().st_size for path in folder.glob("*.log"))])
    ranks.end()
    return longest


@pytest.mark.slow
def test_a_flood_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    ranks = LocalRanks()
    ranks.fork(tmp_path, 0, 0, {}, flood)
    ranks.fork(tmp_path, 1, 1, {}, quiet)
    longest = run(tmp_path, ranks)
    log = protocol.log_path(tmp_path, 0)
    assert log.stat().st_size <= 256 * KIB < longest < LINES * 64 / 2
    lines = log.read_text().splitlines()
    assert lines[0] == line_of(0).rstrip() and lines[-1] == "the last words"
    assert lines[-2] == line_of(LINES - 1).rstrip()
    notes = [line for line in lines if line.startswith("[ultrasweep: ")]
    assert len(notes) == 1
    numbers = [int(line[:8]) for line in lines if re.match(r"\d{8} x", line)]
    assert all(len(line) == 63 for line in lines if line[:1] == "0")  # whole lines
    assert numbers == sorted(numbers)
    left_out = int(notes[0].split()[1].replace(",", ""))
    assert left_out == (LINES - len(numbers)) * 64
    assert protocol.log_path(tmp_path, 1).read_text() == "all is well\n"


def test_a_log_of_one_line_is_cut_too(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    log.write_bytes(b"a" * 300 * KIB + b"end")
    CappedLog(log, os.getpid()).cut()
    text = log.read_bytes()
    assert len(text) < 130 * KIB
    assert text.startswith(b"aaa") and text.endswith(b"aend") and b"bytes of this log were left out here" in text


def test_a_log_that_cannot_be_cut_stays(tmp_path: Path) -> None:
    CappedLog(tmp_path / "none.log", os.getpid()).cut()
    short = tmp_path / "short.log"
    short.write_text("short\n")
    CappedLog(short, os.getpid()).cut()
    assert short.read_text() == "short\n"


def test_a_quiet_rank_costs_no_call_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CappedLog(tmp_path / "none.log", 1)
    calls: list[str] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: calls.append("stopped the rank"))
    monkeypatch.setattr(CappedLog, "cut", lambda self: calls.append("looked at the file"))
    monkeypatch.setattr(log_cap, "_position", lambda pid: 256 * KIB)
    log.trim()
    assert calls == []


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No access to a log returns before this is set, as on a file system whose server does not answer."""
    answers = threading.Event()
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self.suffix == ".log":
            answers.wait()  # who waits for it is ended by the time-out of tests
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(log_cap, "CUT_WAIT_S", 0.1)
    yield answers
    answers.set()


def sleeps(folder: Path, rank: int, local_rank: int, *_: object) -> NoReturn:
    time.sleep(60)
    os._exit(0)


def floods_and_sleeps(folder: Path, rank: int, local_rank: int, *_: object) -> NoReturn:
    os.write(1, line_of(1).encode() * 8000)  # twice the limit
    time.sleep(60)
    os._exit(0)


@pytest.mark.slow
def test_ranks_are_killed_while_the_file_system_of_their_logs_hangs(tmp_path: Path, hung: threading.Event) -> None:
    ranks = LocalRanks()
    for rank in range(3):
        ranks.fork(tmp_path, rank, rank, {}, sleeps)
    exits, survivors = ranks.end()
    assert {one.rank for one in exits} == {0, 1, 2} and not survivors


@pytest.mark.parametrize("answers", [False, True])
def test_a_hanging_cut_delays_only_its_rank(tmp_path: Path, hung: threading.Event, answers: bool) -> None:
    ranks = LocalRanks()
    ranks.fork(tmp_path, 0, 0, {}, floods_and_sleeps)
    [pid] = ranks._pids.values()

    def wait_for(states: str) -> None:
        until = time.monotonic() + 60
        while (stat := process_stat(pid)) is None or stat.state not in states:
            assert time.monotonic() < until, stat
            ranks.poll()

    wait_for("T")  # it is stopped for the cut
    if answers:
        hung.set()
        wait_for("SR")
        assert protocol.log_path(tmp_path, 0).stat().st_size < 130 * KIB
    exits, survivors = ranks.end()
    assert [one.signal for one in exits] == [signal.SIGKILL] and not survivors
