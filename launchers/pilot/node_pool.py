"""The nodes of one pilot: brings their agents together at the start, knows which are free, in use or left out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launchers.node.agent import fork_agent
from launchers.node.fork import RunRank
from launchers.node.remote import Node
from launchers.pilot.agent_server import AgentServer
from launchers.pilot.allocation import Allocation
from launchers.state import node_exclusions
from launchers.state.history import AttemptRecord
from launchers.state.pilot_config import PilotConfig
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from workloads.protocol import write_json

AGENTS_LIMIT_S = 180.0
"""From the pilot's start to the last agent's first word: a busy shared filesystem may take minutes to give torch."""


GONE_FOR_S = 1800.0
"""How long a node that was lost is left out."""


class NoNodes(UltrasweepError):
    """Not a single node of the allocation can be used."""


class NodePool:
    """Nodes by name, the pilot's own first."""

    def __init__(
        self, server: AgentServer, own: str, expected: int, agent_pid: int, memory: SweepDir | None, pilot_id: str
    ) -> None:
        """``memory``: where nodes that are left out are remembered for other pilots; None where no scheduler hands out
        nodes."""
        self._memory = memory
        self._pilot_id = pilot_id
        self._server = server
        self._own = own
        self._expected = expected
        self._agent_pid = agent_pid
        self._excluded: dict[str, str] = {}
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
    def excluded(self) -> dict[str, str]:
        """Nodes of this allocation that are not used, and why."""
        return {**self._gone(), **self._excluded}

    @property
    def exclusion_summary(self) -> str:
        """`excluded` in one line; just the reason where there is one node."""
        excluded = self.excluded
        if len(excluded) == 1:
            return next(iter(excluded.values()))
        return "; ".join(f"{node}: {why}" for node, why in excluded.items())

    def wait_for_agents(self, meanwhile: Callable[[], bool]) -> list[str]:
        """Wait for every agent; lines worth saying. ``meanwhile`` is called often and ends the wait by returning False.

        Raises `NoNodes` when none came.
        """
        until = time.monotonic() + AGENTS_LIMIT_S
        while len(self._server.nodes) + len(self._server.refused) < self._expected and time.monotonic() < until:
            if not meanwhile():
                break
            time.sleep(0.01)
        if not self._server.nodes:
            why = "; ".join(dict.fromkeys(self._server.refused.values())) or "no agent came"
            raise NoNodes(why)
        lines = list(self._server.notes)
        if (missing := self._expected - len(self._server.nodes)) > 0 and self._expected > 1:
            refused = "; ".join(f"{name}: {why}" for name, why in self._server.refused.items())
            lines.append(f"{missing} of {self._expected} nodes cannot be used{': ' + refused if refused else ''}")
        if self._memory is not None:
            known = node_exclusions.excluded(self._memory)
            self._excluded |= {node: known[node].reason for node in self.names if node in known}
        return [*lines, *self.exclude_lost()]

    def free(self) -> list[Node]:
        return [node for node in self._usable() if node.name not in self._busy]

    def mark_busy(self, nodes: Sequence[Node]) -> None:
        self._busy.update(node.name for node in nodes)

    def mark_free(self, nodes: Sequence[Node]) -> None:
        self._busy.difference_update(node.name for node in nodes)

    def exclude(self, node: str, why: str, *, for_s: float = node_exclusions.EXPIRES_AFTER_S) -> list[str]:
        """Do not use this node again, here or in later pilots; lines worth saying."""
        if node in self._excluded:
            return []
        self._excluded[node] = why
        if self._memory is None:
            return []
        with contextlib.suppress(OSError):
            node_exclusions.exclude(self._memory, node, why, self._pilot_id, for_s=for_s)
        return [f"node {node} is left out: {why}"]

    def exclude_lost(self) -> list[str]:
        """The same for nodes that were lost or never came, for a while: Slurm itself keeps away from those that are
        down."""
        return [line for node, why in self._gone().items() for line in self.exclude(node, why, for_s=GONE_FOR_S)]

    def exclude_failing(self, records: Sequence[AttemptRecord], nodes: Sequence[Node]) -> list[str]:
        """The same for those of ``nodes`` on which points keep failing."""
        if self._memory is None:
            return []
        failing = node_exclusions.failing(records, [node.name for node in nodes], time.time())
        return [
            line for node, how in failing.items() for line in self.exclude(node, f"points keep failing on it: {how}")
        ]

    def close(self) -> None:
        """Let the agents go, and bury that of this machine."""
        self._server.close()
        until = time.monotonic() + 20.0
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._agent_pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)

    def _gone(self) -> dict[str, str]:
        lost = {node.name: node.lost for node in self._ordered() if node.lost is not None}
        return {**self._server.refused, **lost}

    def _ordered(self) -> list[Node]:
        return sorted(self._server.nodes.values(), key=lambda node: (node.name != self._own, node.name))

    def _usable(self) -> list[Node]:
        return [node for node in self._ordered() if node.lost is None and node.name not in self._excluded]


def start_pool(
    sweep: SweepDir,
    allocation: Allocation,
    config: PilotConfig,
    run_rank: RunRank | None,
    head_address: Path,
    server: AgentServer,
) -> NodePool:
    """Fork this machine's agent, and open the door for those of the other nodes. Before any thread is started."""
    name = allocation.node
    pid, connection = fork_agent(config.settings, name, run_rank)
    server.attach(connection, name)
    if config.nodes > 1:
        place = server.listen()
        write_json(
            head_address, {"addresses": place.addresses, "port": place.port, "secret": place.secret}, private=True
        )
    server.start()
    memory = sweep if config.scheduler != "none" else None
    return NodePool(server, name, config.nodes, pid, memory, allocation.pilot_id)
