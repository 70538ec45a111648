"""A pilot's view of its nodes: one connection to the agent of each, and the ranks of an attempt over several of them.

One thread reads all connections and keeps what it hears; whoever wants something of a node sends a request and waits
for the answer. A node whose connection closes or falls silent is lost, and so is everything that runs on it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.agent import BEAT_S, SILENCE_LIMIT_S, Lines
from launchers.rankgroup import KILL_LIMIT_S, Ended, StartFailed
from launchers.spawn import RankExit
from results.errors import UltrasweepError

_SLACK_S = 30.0


class NodeLost(UltrasweepError):
    """A node that does not answer any more."""


class Node:
    """One machine of the allocation, seen through its agent."""

    def __init__(self, name: str, address: str, device_ids: Sequence[str] | None, lines: Lines) -> None:
        self.name = name
        self.address = address
        """Where other nodes reach it."""
        self.device_ids = tuple(device_ids) if device_ids is not None else None
        self.lost: str | None = None
        self.heard = time.monotonic()
        self.groups: dict[str, RemoteRanks] = {}
        self._lines = lines
        self._sending = threading.Lock()
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    def ask(self, do: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a request; the future fails with `NodeLost` when the node goes before it has answered."""
        future: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        self._asked[number] = future
        if self.lost is not None:
            self._fail(number)
        elif not self.send({"request": number, "do": do, **fields}):
            self.lose("its agent's connection broke")
        return future

    def request(self, do: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Ask and wait. Raises `NodeLost` when there is no answer within ``limit_s``."""
        return self.wait(self.ask(do, **fields), do, limit_s)

    def wait(self, future: Future[dict[str, Any]], do: str, limit_s: float) -> dict[str, Any]:
        try:
            return future.result(limit_s)
        except FutureTimeout:
            self.lose(f"its agent did not answer {do!r} within {limit_s:.0f} s")
            raise NodeLost(f"node {self.name}: {self.lost}") from None

    def send(self, message: Mapping[str, Any]) -> bool:
        with self._sending:
            try:
                self._lines.send(message)
            except OSError:
                return False
        return True

    def hear(self, message: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        if "exit" in message:
            group = self.groups.get(message["group"])
            if group is not None:
                group.noticed(RankExit(**message["exit"]))
        elif "answer" in message and (future := self._asked.pop(message["answer"], None)) is not None:
            future.set_result(message)

    def lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        for number in list(self._asked):
            self._fail(number)

    def _fail(self, number: int) -> None:
        if (future := self._asked.pop(number, None)) is not None:
            future.set_exception(NodeLost(f"node {self.name}: {self.lost}"))


class RemoteRanks:
    """The ranks of one attempt on one or more nodes, in order: the first ``per_node`` on the first node, and so on."""

    def __init__(self, nodes: Sequence[Node], ranks: Sequence[int], per_node: int, group: str) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._places = [
            (node, self.ranks[start : start + per_node])
            for node, start in zip(nodes, range(0, len(self.ranks), per_node), strict=False)
        ]
        self._single = len(nodes) == 1
        self._exits: dict[int, RankExit] = {}

    def start(self, folder: Path, environments: Mapping[str, Mapping[str, str]]) -> None:
        """``environments``: by node. Raises `StartFailed` when not all could be started; none is left then."""
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
        failed: tuple[str, int] | None = None
        for (node, ranks), future in zip(self._places, asked, strict=True):
            try:
                answer = node.wait(future, "start", _SLACK_S)
            except NodeLost as error:
                failed = failed or (str(error), ranks[0])
                continue
            if "error" in answer:
                failed = failed or (answer["error"], answer.get("rank", ranks[0]))
        if failed is not None:
            raise StartFailed(*failed, survivors=self.end().survivors)

    def noticed(self, exit_: RankExit) -> None:
        self._exits[exit_.rank] = exit_

    def exits(self) -> Mapping[int, RankExit]:
        return dict(self._exits)

    def lost(self) -> Mapping[int, str]:
        return {
            rank: f"node {node.name} was lost: {node.lost}"
            for node, ranks in self._places
            if node.lost is not None
            for rank in ranks
            if rank not in self._exits
        }

    def ask_where(self, ranks: Iterable[int]) -> None:
        wanted = set(ranks)
        for node, own in self._places:
            if chosen := [rank for rank in own if rank in wanted]:
                node.ask("where", group=self._group, ranks=chosen)

    def end(self) -> Ended:
        asked = [node.ask("end", group=self._group) for node, _ in self._places]
        survivors: list[str] = []
        kills = 0
        for (node, _), future in zip(self._places, asked, strict=True):
            try:
                answer = node.wait(future, "end", KILL_LIMIT_S + _SLACK_S)
            except NodeLost:
                continue  # its agent ends them when it hears nothing; the node is not used further
            finally:
                node.groups.pop(self._group, None)
            for fields in answer.get("exits", ()):
                self.noticed(RankExit(**fields))
            survivors += [str(pid) if self._single else f"{pid} on {node.name}" for pid in answer.get("survivors", ())]
            kills += answer.get("host_oom_kills", 0)
        return Ended(survivors=tuple(survivors), host_oom_kills=kills)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the agents of other nodes find the pilot: a file that only this user can read."""

    addresses: tuple[str, ...]
    port: int
    secret: str


class Hub(threading.Thread):
    """Reads every agent's connection; ``nodes`` are those that have said hello, in the order of their names."""

    def __init__(self, wake: threading.Event) -> None:
        super().__init__(name="hub", daemon=True)
        self.nodes: dict[str, Node] = {}
        self.refused: dict[str, str] = {}
        """Agents that could not start, and why, in their own words."""
        self.notes: list[str] = []
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._secret = secrets.token_hex(16)
        self._closing = False
        self._beaten = time.monotonic()

    def attach(self, connection: socket.socket, name: str) -> None:
        """Take the connection to the agent of this machine. Before `start`."""
        self._watch(connection, address="127.0.0.1", expected=name)

    def listen(self) -> Meeting:
        """Let the agents of other nodes connect. Before `start`."""
        listener = socket.create_server(("", 0), backlog=1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        return Meeting(addresses=_own_addresses(), port=listener.getsockname()[1], secret=self._secret)

    def run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=0.5):
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._read(key.data)
            self._beat()

    def close(self) -> None:
        """Let the agents go: they end what they still run."""
        self._closing = True
        self.join(2.0)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _accept(self, listener: Any) -> None:
        try:
            connection, (host, *_) = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The address by which this machine was reached is one by which other nodes reach its ranks, too.
        own = connection.getsockname()[0]
        for node in self.nodes.values():
            if node.address == "127.0.0.1":
                node.address = own
        self._watch(connection, address=host, expected=None)

    def _watch(self, connection: socket.socket, address: str, expected: str | None) -> None:
        peer = _Peer(Lines(connection), address, expected)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            messages = peer.lines.receive()
        except ValueError:  # not one of ours
            messages = None
        if messages is None:
            self._selector.unregister(peer.lines.connection)
            peer.lines.connection.close()
            if peer.node is not None:
                peer.node.lose("its agent's connection closed")
            elif peer.expected is not None:
                self.refused.setdefault(peer.expected, "its agent ended before it was ready")
            self._wake.set()
            return
        for message in messages:
            if peer.node is not None:
                peer.node.hear(message)
            else:
                self._greet(peer, message)
        self._wake.set()

    def _greet(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.expected is None:
            if message.get("secret") == self._secret and isinstance(message.get("name"), str):
                peer.expected = message["name"]
            return
        if "refused" in message:
            self.refused[peer.expected] = message["refused"]
        elif "hello" in message:
            hello = message["hello"]
            peer.node = Node(peer.expected, peer.address, hello["device_ids"], peer.lines)
            self.notes += hello["notes"]
            if hello["threads"] > 1:
                self.notes.append(
                    f"warning: agent {peer.expected} has {hello['threads']} threads before its first fork"
                )
            self.nodes[peer.expected] = peer.node

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        for node in list(self.nodes.values()):
            if node.lost is not None:
                continue
            if now - node.heard > SILENCE_LIMIT_S:
                node.lose(f"no word from its agent for {SILENCE_LIMIT_S:.0f} s")
                self._wake.set()
            else:
                node.send({})


@dataclass(slots=True)
class _Peer:
    lines: Lines
    address: str
    expected: str | None
    """Name of the node; None until the agent has shown the secret."""
    node: Node | None = None


def join(meeting: Mapping[str, Any], name: str, limit_s: float) -> socket.socket:
    """Connect an agent to its pilot. Raises `NodeLost` when none of the pilot's addresses answers in time."""
    until = time.monotonic() + limit_s
    while True:
        for address in meeting["addresses"]:
            try:
                connection = socket.create_connection((address, meeting["port"]), timeout=5.0)
            except OSError:
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Lines(connection).send({"secret": meeting["secret"], "name": name})
            return connection
        if time.monotonic() > until:
            where = ", ".join(meeting["addresses"])
            raise NodeLost(f"node {name}: the pilot answers at none of {where} (port {meeting['port']})")
        time.sleep(0.5)


def read_meeting(path: Path, limit_s: float) -> Mapping[str, Any]:
    """Wait for the pilot's file. Raises `NodeLost` when it does not appear in time."""
    until = time.monotonic() + limit_s
    while True:
        try:
            found: Mapping[str, Any] = json.loads(path.read_text())
            return found
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise NodeLost(f"the pilot did not say within {limit_s:.0f} s where it is ({path})") from None
            time.sleep(0.2)


def _own_addresses() -> tuple[str, ...]:
    """Names and addresses of this machine that another node may know, the likeliest first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    return tuple(dict.fromkeys([*found, socket.getfqdn()]))
