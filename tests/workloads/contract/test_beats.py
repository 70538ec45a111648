"""Heartbeats in shared memory."""

from __future__ import annotations

import os
import time

import pytest

from workloads.contract.beats import _HEAD, Heartbeat, HeartbeatSlot


def test_a_heartbeat_reaches_the_process_that_made_the_slot() -> None:
    slot = HeartbeatSlot()
    assert slot.read() is None
    pid = os.fork()
    if pid == 0:
        beat = slot.writer(3)
        for step in range(1000):
            beat("step", step)
        beat("step", 999, failed=True)
        os._exit(0)
    while (pid, 0) != os.waitpid(pid, 0):
        pass
    found = slot.read()
    assert found is not None
    assert (found.rank, found.phase, found.step, found.pid, found.failed) == (3, "step", 999, pid, True)
    assert 0 <= time.time() - found.time < 60


@pytest.mark.slow
def test_every_reading_while_a_rank_writes_is_a_whole_heartbeat() -> None:
    slot = HeartbeatSlot()
    pid = os.fork()
    if pid == 0:
        while True:
            for step in (1, 10**9):  # texts of different lengths
                slot.write(Heartbeat(rank=0, phase="step", step=step, time=float(step), pid=1))
    try:
        least, most = time.monotonic() + 0.3, time.monotonic() + 10
        seen = set()
        while time.monotonic() < least or (len(seen) < 2 and time.monotonic() < most):
            if (found := slot.read()) is not None:
                assert found.time == found.step
                seen.add(found.step)
        assert seen == {1, 10**9}
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_slot_that_is_half_written_is_no_heartbeat() -> None:
    slot = HeartbeatSlot()
    slot.write(Heartbeat(rank=0, phase="build", step=None, time=1.0, pid=1))
    slot._memory[_HEAD.size + 4] ^= 1
    assert slot.read() is None
