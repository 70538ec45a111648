"""The pilot's end of the connections to its agents: one thread accepts them, reads them all and keeps them alive."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from launchers.node.connection import BEAT_S, SILENCE_LIMIT_S, HeadAddress, JsonLines
from launchers.node.remote import Node


class AgentServer(threading.Thread):
    """Reads every agent's connection; ``nodes`` are those that have said hello, in the order of their names."""

    def __init__(self, wake: threading.Event) -> None:
        super().__init__(name="server", daemon=True)
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

    def listen(self) -> HeadAddress:
        """Let the agents of other nodes connect. Before `start`."""
        listener = socket.create_server(("", 0), backlog=1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        return HeadAddress(addresses=_own_addresses(), port=listener.getsockname()[1], secret=self._secret)

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
        peer = _Peer(JsonLines(connection), address, expected)
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
    lines: JsonLines
    address: str
    expected: str | None
    """Name of the node; None until the agent has shown the secret."""
    node: Node | None = None


def _own_addresses() -> tuple[str, ...]:
    """Names and addresses of this machine that another node may know, the likeliest first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    return tuple(dict.fromkeys([*found, socket.getfqdn()]))
