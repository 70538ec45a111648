"""The nodes of one pilot: brings their agents together at the start, knows which are free, in use or left out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launchers.agent import fork_agent
from launchers.nodes import Hub, Node
from launchers.payload import Payload
from launchers.spawn import RunRank
from results.errors import UltrasweepError
from workloads.protocol import write_json

AGENTS_LIMIT_S = 180.0
"""From the pilot's start to the last agent's first word: a busy shared filesystem may take minutes to give torch."""


class NoNodes(UltrasweepError):
    """Not a single node of the allocation can be used."""


class Crew:
    """Nodes by name, the pilot's own first."""

    def __init__(self, hub: Hub, own: str, expected: int, agent_pid: int) -> None:
        self._hub = hub
        self._own = own
        self._expected = expected
        self._agent_pid = agent_pid
        self._left_out: dict[str, str] = {}
        self._busy: set[str] = set()

    @property
    def size(self) -> int:
        """Nodes that can be used, busy or not."""
        return len(self._usable())

    @property
    def lost_all(self) -> bool:
        """Every agent has gone."""
        return all(node.lost is not None for node in self._ordered())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._ordered())

    @property
    def left_out(self) -> dict[str, str]:
        """Nodes of this allocation that are not used, and why."""
        lost = {node.name: node.lost for node in self._ordered() if node.lost is not None}
        return {**self._hub.refused, **lost, **self._left_out}

    def gather(self, meanwhile: Callable[[], bool]) -> list[str]:
        """Wait for every agent; lines worth saying. ``meanwhile`` is called often and ends the wait by returning False.

        Raises `NoNodes` when none came.
        """
        until = time.monotonic() + AGENTS_LIMIT_S
        while len(self._hub.nodes) + len(self._hub.refused) < self._expected and time.monotonic() < until:
            if not meanwhile():
                break
            time.sleep(0.01)
        if not self._hub.nodes:
            why = "; ".join(dict.fromkeys(self._hub.refused.values())) or "no agent came"
            raise NoNodes(why)
        lines = list(self._hub.notes)
        if (missing := self._expected - len(self._hub.nodes)) > 0 and self._expected > 1:
            refused = "; ".join(f"{name}: {why}" for name, why in self._hub.refused.items())
            lines.append(f"{missing} of {self._expected} nodes cannot be used{': ' + refused if refused else ''}")
        return lines

    def free(self) -> list[Node]:
        return [node for node in self._usable() if node.name not in self._busy]

    def take(self, nodes: Sequence[Node]) -> None:
        self._busy.update(node.name for node in nodes)

    def give_back(self, nodes: Sequence[Node]) -> None:
        self._busy.difference_update(node.name for node in nodes)

    def leave_out(self, name: str, why: str) -> None:
        """Do not use this node again."""
        self._left_out.setdefault(name, why)

    def dismiss(self) -> None:
        """Let the agents go, and bury that of this machine."""
        self._hub.close()
        until = time.monotonic() + 20.0
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._agent_pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)

    def _ordered(self) -> list[Node]:
        return sorted(self._hub.nodes.values(), key=lambda node: (node.name != self._own, node.name))

    def _usable(self) -> list[Node]:
        return [node for node in self._ordered() if node.lost is None and node.name not in self._left_out]


def gather_here(payload: Payload, name: str, run_rank: RunRank | None, meeting: Path, hub: Hub) -> Crew:
    """Fork this machine's agent, and open the door for those of the other nodes. Before any thread is started."""
    pid, connection = fork_agent(payload.settings, name, run_rank)
    hub.attach(connection, name)
    if payload.nodes > 1:
        place = hub.listen()
        write_json(meeting, {"addresses": place.addresses, "port": place.port, "secret": place.secret}, private=True)
    hub.start()
    return Crew(hub, name, payload.nodes, pid)
