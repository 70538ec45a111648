"""The nodes of one pilot: brings their agents together at the start, knows which are free, in use or left out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launchers import nodebook
from launchers.agent import fork_agent
from launchers.allocation import Allocation
from launchers.nodes import Hub, Node
from launchers.payload import Payload
from launchers.queue import AttemptRecord
from launchers.spawn import RunRank
from launchers.sweepdir import SweepDir
from results.errors import UltrasweepError
from workloads.protocol import write_json

AGENTS_LIMIT_S = 180.0
"""From the pilot's start to the last agent's first word: a busy shared filesystem may take minutes to give torch."""


GONE_FOR_S = 1800.0
"""How long a node that was lost is left out."""


class NoNodes(UltrasweepError):
    """Not a single node of the allocation can be used."""


class Crew:
    """Nodes by name, the pilot's own first."""

    def __init__(
        self, hub: Hub, own: str, expected: int, agent_pid: int, memory: SweepDir | None, pilot_id: str
    ) -> None:
        """``memory``: where nodes that are left out are remembered for other pilots; None where no scheduler hands out
        nodes."""
        self._memory = memory
        self._pilot_id = pilot_id
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
        return {**self._gone(), **self._left_out}

    @property
    def left_out_told(self) -> str:
        """`left_out` in one line; just the reason where there is one node."""
        left_out = self.left_out
        if len(left_out) == 1:
            return next(iter(left_out.values()))
        return "; ".join(f"{node}: {why}" for node, why in left_out.items())

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
        if self._memory is not None:
            known = nodebook.excluded(self._memory)
            self._left_out |= {node: known[node].reason for node in self.names if node in known}
        return [*lines, *self.leave_out_gone()]

    def free(self) -> list[Node]:
        return [node for node in self._usable() if node.name not in self._busy]

    def take(self, nodes: Sequence[Node]) -> None:
        self._busy.update(node.name for node in nodes)

    def give_back(self, nodes: Sequence[Node]) -> None:
        self._busy.difference_update(node.name for node in nodes)

    def leave_out(self, node: str, why: str, *, for_s: float = nodebook.EXPIRES_AFTER_S) -> list[str]:
        """Do not use this node again, here or in later pilots; lines worth saying."""
        if node in self._left_out:
            return []
        self._left_out[node] = why
        if self._memory is None:
            return []
        with contextlib.suppress(OSError):
            nodebook.exclude(self._memory, node, why, self._pilot_id, for_s=for_s)
        return [f"node {node} is left out: {why}"]

    def leave_out_gone(self) -> list[str]:
        """The same for nodes that were lost or never came, for a while: Slurm itself keeps away from those that are
        down."""
        return [line for node, why in self._gone().items() for line in self.leave_out(node, why, for_s=GONE_FOR_S)]

    def leave_out_failing(self, records: Sequence[AttemptRecord], nodes: Sequence[Node]) -> list[str]:
        """The same for those of ``nodes`` on which points keep failing."""
        if self._memory is None:
            return []
        failing = nodebook.failing(records, [node.name for node in nodes], time.time())
        return [
            line for node, how in failing.items() for line in self.leave_out(node, f"points keep failing on it: {how}")
        ]

    def dismiss(self) -> None:
        """Let the agents go, and bury that of this machine."""
        self._hub.close()
        until = time.monotonic() + 20.0
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._agent_pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)

    def _gone(self) -> dict[str, str]:
        lost = {node.name: node.lost for node in self._ordered() if node.lost is not None}
        return {**self._hub.refused, **lost}

    def _ordered(self) -> list[Node]:
        return sorted(self._hub.nodes.values(), key=lambda node: (node.name != self._own, node.name))

    def _usable(self) -> list[Node]:
        return [node for node in self._ordered() if node.lost is None and node.name not in self._left_out]


def gather_here(
    sweep: SweepDir, allocation: Allocation, payload: Payload, run_rank: RunRank | None, meeting: Path, hub: Hub
) -> Crew:
    """Fork this machine's agent, and open the door for those of the other nodes. Before any thread is started."""
    name = allocation.node
    pid, connection = fork_agent(payload.settings, name, run_rank)
    hub.attach(connection, name)
    if payload.nodes > 1:
        place = hub.listen()
        write_json(meeting, {"addresses": place.addresses, "port": place.port, "secret": place.secret}, private=True)
    hub.start()
    memory = sweep if payload.scheduler != "none" else None
    return Crew(hub, name, payload.nodes, pid, memory, allocation.pilot_id)
