"""A node as its pilot sees it: requests to its agent, and the ranks of one attempt on one or more nodes.

Every request to an agent gets an answer. A node whose connection closes or falls silent is lost, with everything that
runs on it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from launchers.node.connection import JsonLines, NodeLost
from launchers.node.fork import RankExit
from launchers.node.ports import NoFreePort
from launchers.node.rank_group import KILL_LIMIT_S, StartFailed, Termination
from workloads.contract.beats import Heartbeat

_ANSWER_LIMIT_S = 30.0
"""Seconds that an agent may take for an answer, on top of the time for the requested work."""


class Node:
    """One machine of the allocation, seen through its agent."""

    def __init__(self, name: str, address: str, device_ids: Sequence[str] | None, lines: JsonLines) -> None:
        self.name = name
        self.address = address
        """Host name or IP address by which other nodes reach it."""
        self.device_ids = tuple(device_ids) if device_ids is not None else None
        self.lost: str | None = None
        """Why the node is lost; None while it answers."""
        self.heard_at = time.monotonic()
        """When its agent last sent anything."""
        self.groups: dict[str, RemoteRanks] = {}
        """The attempts that run on it, by group name."""
        self._lines = lines
        self._sending = threading.Lock()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    def ask(self, do: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send the request ``do``; the future fails with `NodeLost` when the node is lost before it has answered."""
        future: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        self._pending[number] = future
        if self.lost is not None:
            self._fail(number)
        elif not self.send({"request": number, "do": do, **fields}):
            self.mark_lost("its agent's connection broke")
        return future

    def request(self, do: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `NodeLost` when none comes within ``limit_s`` seconds."""
        return self.wait(self.ask(do, **fields), do, limit_s)

    def reserve_port(self) -> int:
        """A port of this node for a rendezvous. Raises `NodeLost`, or `NoFreePort` when the agent finds none."""
        answer = self.request("port", _ANSWER_LIMIT_S)
        if "port" not in answer:
            raise NoFreePort(f"node {self.name}: {answer.get('error', 'its agent gave no port')}")
        return int(answer["port"])

    def wait(self, future: Future[dict[str, Any]], do: str, limit_s: float) -> dict[str, Any]:
        """The answer to a request of `ask`. Raises `NodeLost` as `request` does."""
        try:
            return future.result(limit_s)
        except FutureTimeout:
            self.mark_lost(f"its agent did not answer {do!r} within {limit_s:.0f} s")
            raise NodeLost(f"node {self.name}: {self.lost}") from None

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message that needs no answer; False when the connection is broken."""
        with self._sending:
            try:
                self._lines.send(message)
            except OSError:
                return False
        return True

    def handle(self, message: dict[str, Any]) -> None:
        """Take in one message from the agent: heartbeats, the exit of a rank, or an answer."""
        self.heard_at = time.monotonic()
        if "beats" in message and (group := self.groups.get(message.get("group", ""))) is not None:
            group.add_beats(message["beats"])
        if "exit" in message:
            group = self.groups.get(message["group"])
            if group is not None:
                group.add_exit(RankExit(**message["exit"]))
        elif "answer" in message and (future := self._pending.pop(message["answer"], None)) is not None:
            future.set_result(message)

    def mark_lost(self, why: str) -> None:
        """Mark the node as lost; every request that waits for its answer fails."""
        if self.lost is None:
            self.lost = why
        for number in list(self._pending):
            self._fail(number)

    def _fail(self, number: int) -> None:
        if (future := self._pending.pop(number, None)) is not None:
            future.set_exception(NodeLost(f"node {self.name}: {self.lost}"))


class RemoteRanks:
    """The ranks of one attempt (a `RankGroup`): the first ``per_node`` on the first node, the next on the second ..."""

    def __init__(self, nodes: Sequence[Node], ranks: Sequence[int], per_node: int, group: str) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._places = [
            (node, self.ranks[start : start + per_node])
            for node, start in zip(nodes, range(0, len(self.ranks), per_node), strict=False)
        ]
        self._single = len(nodes) == 1
        self._exits: dict[int, RankExit] = {}
        self._beats: dict[int, Heartbeat] = {}

    def start(self, folder: Path, environments: Mapping[str, Mapping[str, str]]) -> None:
        """Start all ranks. ``environments``: environment variables by node name.

        Raises `StartFailed` when a rank could not be started; the others have been killed then.
        """
        asked = []
        for node, ranks in self._places:
            node.groups[self._group] = self
            placed = [(rank, local) for local, rank in enumerate(ranks)]
            asked.append(
                node.ask(
                    "start",
                    group=self._group,
                    folder=str(folder),
                    ranks=placed,
                    environment=dict(environments[node.name]),
                )
            )
        lost: tuple[str, int] | None = None
        failed: tuple[str, int] | None = None
        for (node, ranks), future in zip(self._places, asked, strict=True):
            try:
                answer = node.wait(future, "start", _ANSWER_LIMIT_S)
            except NodeLost as error:
                lost = lost or (str(error), ranks[0])
                continue
            if "error" in answer:
                failed = failed or (answer["error"], answer.get("rank", ranks[0]))
        if (why := lost or failed) is not None:
            raise StartFailed(*why, survivors=self.end().survivors, node_lost=lost is not None)

    def add_exit(self, exit_: RankExit) -> None:
        """Record that a rank has ended."""
        self._exits[exit_.rank] = exit_

    def add_beats(self, beats: Iterable[Mapping[str, Any]]) -> None:
        """Record the latest heartbeats of ranks; see `launchers.node.agent` for the message."""
        for fields in beats:
            beat = Heartbeat(**fields)
            self._beats[beat.rank] = beat

    def exits(self) -> Mapping[int, RankExit]:
        return dict(self._exits)

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        return dict(self._beats)

    def lost(self) -> Mapping[int, str]:
        return {
            rank: f"node {node.name} was lost: {node.lost}"
            for node, ranks in self._places
            if node.lost is not None
            for rank in ranks
            if rank not in self._exits
        }

    def request_stacks(self, ranks: Iterable[int]) -> None:
        asked = set(ranks)
        for node, node_ranks in self._places:
            if chosen := [rank for rank in node_ranks if rank in asked]:
                node.ask("stacks", group=self._group, ranks=chosen)

    def end(self) -> Termination:
        asked = [node.ask("end", group=self._group) for node, _ in self._places]
        survivors: list[str] = []
        kills = 0
        for (node, _), future in zip(self._places, asked, strict=True):
            try:
                answer = node.wait(future, "end", KILL_LIMIT_S + _ANSWER_LIMIT_S)
            except NodeLost:
                continue  # the agent kills its ranks once the pilot is silent; the node is not used further
            finally:
                node.groups.pop(self._group, None)
            self.add_beats(answer.get("beats", ()))
            for fields in answer.get("exits", ()):
                self.add_exit(RankExit(**fields))
            survivors += [str(pid) if self._single else f"{pid} on {node.name}" for pid in answer.get("survivors", ())]
            kills += answer.get("host_oom_kills", 0)
        return Termination(survivors=tuple(survivors), host_oom_kills=kills)
