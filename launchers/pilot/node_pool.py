"""The nodes of one pilot: starts their agents, and tracks which nodes are free, in use or excluded."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from launchers.node.agent import fork_agent
from launchers.node.fork import RunRank
from launchers.node.remote import Node
from launchers.pilot.agent_server import AgentServer
from launchers.pilot.allocation import Allocation
from launchers.pilot.batch_system import LOOK_S, BatchSystem, is_environment_fault
from launchers.state import node_exclusions, pilot_state
from launchers.state.history import AttemptRecord
from launchers.state.node_exclusions import LOST_FOR_S
from launchers.state.pilot_config import PilotConfig
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from results.shared_filesystem.patience import patiently
from workloads.contract.protocol import write_json

AGENTS_LIMIT_S = 180.0
"""Seconds from the pilot's start until the last agent must be ready. A busy shared filesystem may need minutes to
deliver torch."""
FILES_LIMIT_S = 120.0
"""Seconds that a starting pilot waits for a filesystem that fails."""


class NoNodes(UltrasweepError):
    """No node of the allocation can be used."""


class NodePool:
    """The nodes of the allocation: the pilot's own first, the others sorted by name."""

    def __init__(
        self,
        server: AgentServer,
        allocation: Allocation,
        expected: int,
        agent_pid: int,
        shared: SweepDir | None,
        *,
        batch: BatchSystem | None = None,
        use_excluded: bool = False,
    ) -> None:
        """``expected``: number of nodes of the allocation. ``shared``: the sweep in whose folder all pilots keep the
        excluded nodes; None without a scheduler. ``use_excluded``: ignore the exclusions of earlier pilots."""
        self._shared = shared
        self._allocation = allocation
        self._batch = batch
        self._use_excluded = use_excluded
        self._server = server
        self._expected = expected
        self._agent_pid = agent_pid
        self._excluded: dict[str, str] = {}
        self._busy: set[str] = set()

    @property
    def expected(self) -> int:
        """Number of nodes of the allocation, usable or not."""
        return self._expected

    @property
    def size(self) -> int:
        """Number of nodes that can be used, busy or not."""
        return len(self._usable())

    @property
    def usable(self) -> tuple[str, ...]:
        """Names of the nodes that can be used, busy or not."""
        return tuple(node.name for node in self._usable())

    @property
    def lost_all(self) -> bool:
        """Whether the connections to all agents are lost."""
        return all(node.lost is not None for node in self._ordered())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._ordered())

    @property
    def excluded(self) -> dict[str, str]:
        """Nodes of this allocation that are not used, with the reason."""
        return {**self._lost(), **self._excluded}

    @property
    def exclusion_summary(self) -> str:
        """`excluded` in one line; only the reason if there is one node."""
        excluded = self.excluded
        if len(excluded) == 1:
            return next(iter(excluded.values()))
        return "; ".join(f"{node}: {why}" for node, why in excluded.items())

    def wait_for_agents(self, meanwhile: Callable[[], bool]) -> list[str]:
        """Wait until every agent is ready or refuses. Returns lines for the log. ``meanwhile`` is called often; it
        returns False to end the wait.

        Raises `NoNodes` when no agent is ready.
        """
        silent = self._wait(meanwhile)
        lines = list(self._server.notes)
        not_started = {**self._server.refused, **silent}
        lines += self._exclude_not_started(not_started, silent)
        if not self._server.nodes:
            raise NoNodes("; ".join([*dict.fromkeys(not_started.values())]) or "no agent has connected")
        if (missing := self._expected - len(self._server.nodes)) > 0 and self._expected > 1:
            refused = "; ".join(f"{name}: {why}" for name, why in not_started.items())
            lines.append(f"{missing} of {self._expected} nodes cannot be used{': ' + refused if refused else ''}")
        if self._shared is not None and not self._use_excluded:
            shared = self._shared
            exclusions = patiently(lambda: node_exclusions.excluded(shared), limit_s=FILES_LIMIT_S)
            self._excluded |= {node: exclusions[node].reason for node in self.names if node in exclusions}
        return [*lines, *self._leave_out_shared_devices(), *self.exclude_lost()]

    def _leave_out_shared_devices(self) -> list[str]:
        """Exclude a node if another node of this pilot has the same devices: Slurm may give the same devices to two
        nodes that are parts of one machine. Returns lines for the log."""
        lines: list[str] = []
        owner: dict[str, str] = {}
        for node in self._usable():
            twice = next((device for device in node.device_ids or () if device in owner), None)
            if twice is None:
                owner |= dict.fromkeys(node.device_ids or (), node.name)
                continue
            self._excluded[node.name] = f"its device {twice} is one of {owner[twice]}"
            lines.append(
                f"node {node.name} is not used: {self._excluded[node.name]}; check CUDA_VISIBLE_DEVICES and the GPUs "
                f"that Slurm gives each node"
            )
        return lines

    def free(self) -> list[Node]:
        return [node for node in self._usable() if node.name not in self._busy]

    def mark_busy(self, nodes: Sequence[Node]) -> None:
        self._busy.update(node.name for node in nodes)

    def mark_free(self, nodes: Sequence[Node]) -> None:
        self._busy.difference_update(node.name for node in nodes)

    def exclude(self, node: str, why: str, *, for_s: float = node_exclusions.EXPIRES_AFTER_S) -> list[str]:
        """Stop using this node, here and in later pilots, for ``for_s`` seconds. Returns lines for the log."""
        if node in self._excluded:
            return []
        self._excluded[node] = why
        if self._shared is None:
            return []
        with contextlib.suppress(OSError):
            node_exclusions.exclude(self._shared, node, why, self._allocation.pilot_id, for_s=for_s)
        return [f"node {node} is excluded: {why}"]

    def exclude_lost(self) -> list[str]:
        """Exclude nodes that were lost or never connected. Returns lines for the log. A short time is enough, since
        Slurm does not use nodes that are down."""
        return [line for node, why in self._lost().items() for line in self.exclude(node, why, for_s=LOST_FOR_S)]

    def exclude_unclean(self, unclean: Mapping[str, str], of: int) -> list[str]:
        """Exclude nodes that an attempt on ``of`` nodes has left unclean, each with its reason. Returns lines for the
        log. When most nodes are unclean at once, the cause is a hanging file system, so the time is short."""
        for_s = LOST_FOR_S if is_environment_fault(len(unclean), of) else node_exclusions.EXPIRES_AFTER_S
        return [line for node, why in unclean.items() for line in self.exclude(node, why, for_s=for_s)]

    def exclude_failing(self, records: Sequence[AttemptRecord], nodes: Sequence[Node]) -> list[str]:
        """Exclude those of ``nodes`` on which points keep failing. Returns lines for the log."""
        if self._shared is None:
            return []
        failing = node_exclusions.failing(records, [node.name for node in nodes], time.time())
        return [
            line for node, how in failing.items() for line in self.exclude(node, f"points keep failing on it: {how}")
        ]

    def close(self) -> None:
        """Close the connections and wait for the end of this machine's agent, which is a child of this process."""
        self._server.close()
        until = time.monotonic() + 20.0
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._agent_pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)

    def _wait(self, meanwhile: Callable[[], bool]) -> dict[str, str]:
        """Wait as `wait_for_agents` does. Returns the nodes that were silent until the limit, with a reason."""
        until, look_at = time.monotonic() + AGENTS_LIMIT_S, 0.0
        while len(self._server.nodes.keys() | self._server.refused.keys()) < self._expected:
            if not meanwhile():
                return {}
            if time.monotonic() > until:
                answered = self._server.nodes.keys() | self._server.refused.keys()
                late = f"its agent did not start within {AGENTS_LIMIT_S:.0f} s"
                return dict.fromkeys(set(self._batch.nodes() if self._batch is not None else ()) - answered, late)
            if self._batch is not None and self._shared is not None and time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                for ended in self._batch.ended_tasks(self._shared, self._allocation):
                    if ended.node not in self._server.nodes:
                        self._server.refused.setdefault(ended.node, ended.reason)
            time.sleep(0.01)
        return {}

    def _exclude_not_started(self, failed: Mapping[str, str], silent: Collection[str]) -> list[str]:
        """Exclude the nodes whose agents did not start, unless the environment is to blame. Returns lines for the
        log."""
        if is_environment_fault(len(failed), self._expected):
            self._excluded |= failed
            return [
                f"the agents of {len(failed)} of {self._expected} nodes did not start, so no node is excluded: look at "
                "the environment (modules, image, launcher.python, the network between the nodes)"
            ]
        if not self._server.nodes and not self._others_work():
            return []  # nothing shows that this node is to blame
        return [
            line
            for node, why in failed.items()
            for line in self.exclude(node, why, for_s=LOST_FOR_S if node in silent else node_exclusions.EXPIRES_AFTER_S)
        ]

    def _others_work(self) -> bool:
        """Whether a pilot of this sweep has ever started on a node other than this one."""
        if self._shared is None:
            return False
        return any(set(state.nodes) - {self._own} for state in pilot_state.all_states(self._shared))

    @property
    def _own(self) -> str:
        return self._allocation.node

    def _lost(self) -> dict[str, str]:
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
    batch: BatchSystem | None = None,
) -> NodePool:
    """Fork this machine's agent and let the agents of other nodes connect. Call it before any thread is started.

    ``head_address``: file from which the other nodes read where to connect. ``run_rank``: code that a rank runs; None:
    the engine. ``batch``: None without a batch system.
    """
    name = allocation.node
    pid, connection = fork_agent(config.settings, name, run_rank)
    server.attach(connection, name)
    if config.nodes > 1:
        place = server.listen()
        about = {"addresses": place.addresses, "port": place.port, "secret": place.secret}
        patiently(lambda: write_json(head_address, about, private=True), limit_s=FILES_LIMIT_S)
    server.start()
    shared = sweep if config.batch_system != "none" else None
    return NodePool(server, allocation, config.nodes, pid, shared, batch=batch, use_excluded=config.use_excluded)
