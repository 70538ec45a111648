"""An attempt whose ranks cannot be started."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launchers.attempt import execute
from launchers.node.connection import JsonLines
from launchers.node.rank_group import RankGroup
from launchers.node.remote import Node, RemoteRanks
from launchers.state.sweep_dir import SweepDir
from tests.launchers.scripted import settings


def _answering(number: int, error: str | None) -> Node:
    """A node whose agent answers every request, with this error if there is one."""
    ours, theirs = socket.socketpair()
    node = Node(f"n{number}", "here", None, JsonLines(ours))
    agent = JsonLines(theirs)

    def serve() -> None:
        while (requests := agent.receive()) is not None:
            for request in requests:
                failed = {"error": error} if error is not None and request["do"] == "start" else {}
                node.handle({"answer": request["request"], **failed})

    threading.Thread(target=serve, daemon=True).start()
    return node


@pytest.mark.parametrize(
    ("lost", "outcome", "evidence", "rank"),
    [(True, "node_failure", "node n1: its agent's connection closed", 2), (False, "crash", "no memory to fork", 0)],
)
def test_ranks_that_do_not_start_are_the_lost_nodes_fault_if_there_is_one(
    tmp_path: Path, lost: bool, outcome: str, evidence: str, rank: int
) -> None:
    nodes = [_answering(0, "no memory to fork"), _answering(1, None)]
    if lost:
        nodes[1].mark_lost("its agent's connection closed")

    def start(ranks: Any) -> RankGroup:
        group = RemoteRanks(nodes, ranks, 2, "a")
        group.start(tmp_path, {"n0": {}, "n1": {}})
        return group

    attempt: Any = SimpleNamespace(task=SimpleNamespace(method="measured"), ranks=lambda: [0, 1, 2, 3])
    control = cast(execute.Control, SimpleNamespace(start=start))
    ended = execute.execute(attempt, settings(), control, SweepDir(tmp_path).stages).outcome
    assert (ended.outcome, ended.evidence, ended.failed_rank) == (outcome, evidence, rank)
    assert ended.phase == "spawn" and ended.infrastructure
