"""Heartbeats on their way from the ranks of a node to the pilot."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from launchers.node.agent import BEATS_EVERY_S, fork_agent
from launchers.node.connection import JsonLines
from launchers.node.remote import Node, RemoteRanks
from tests.launchers.scripted import settings
from workloads.contract.beats import Beat


def fast_rank(folder: Path, rank: int, local_rank: int, beat: Beat) -> NoReturn:
    """Beats without a pause for a second, then ends."""
    step, end = 0, time.monotonic() + 1.0
    while time.monotonic() < end:
        beat("step", step)
        step += 1
        time.sleep(0)
    beat("teardown")
    os._exit(0)


@pytest.mark.slow
def test_ranks_that_beat_without_a_pause_cost_five_messages_a_second(tmp_path: Path) -> None:
    agent, ours = fork_agent(settings(), "n", fast_rank)
    lines = JsonLines(ours)
    node = Node("n", "here", None, lines)
    group = RemoteRanks([node], range(3), 3, "a")
    started = threading.Thread(target=group.start, args=(tmp_path, {"n": {}}))
    started.start()
    messages: list[dict[str, Any]] = []
    while len(group.exits()) < 3:
        for message in lines.receive() or []:
            messages.append(message)
            node.handle(message)
    ours.close()
    os.waitpid(agent, 0)
    beats = [message["beats"] for message in messages if "beats" in message]
    assert 2 <= len(beats) <= 1.0 / BEATS_EVERY_S + 4  # the last ones come before the exits
    assert max(len(of_ranks) for of_ranks in beats) == 3, "one message for all ranks of the node"
    assert {beat.phase for beat in group.heartbeats().values()} == {"teardown"}
    exits = [number for number, message in enumerate(messages) if "exit" in message]
    last_beats = max(number for number, message in enumerate(messages) if "beats" in message)
    assert last_beats < max(exits)
