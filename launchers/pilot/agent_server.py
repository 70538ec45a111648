"""The pilot's side of the connections to its agents: one thread accepts, reads and keeps them alive."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from launchers.node.addresses import listen, own_addresses, plain_address
from launchers.node.connection import KEEPALIVE_S, SILENCE_LIMIT_S, HeadAddress, JsonLines
from launchers.node.remote import Node

_LONGEST_GREETING = 1 << 20
"""Maximum bytes of one message before an agent is ready."""


class AgentServer(threading.Thread):
    """Reads the connections of all agents. ``nodes`` holds the ready ones by name."""

    def __init__(self, wake: threading.Event) -> None:
        super().__init__(name="server", daemon=True)
        self.nodes: dict[str, Node] = {}
        self.refused: dict[str, str] = {}
        """Agents that could not start, by name, with the reason that they reported."""
        self.notes: list[str] = []
        """Lines for the pilot's log, sent by the agents."""
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._secret = secrets.token_hex(16)
        self._closing = False
        self._last_beat_at = time.monotonic()

    def attach(self, connection: socket.socket, name: str) -> None:
        """Use the connection to the agent of this machine. Call it before `start`."""
        self._watch(connection, address="127.0.0.1", expected=name)

    def listen(self) -> HeadAddress:
        """Let the agents of other nodes connect. Returns the address to give them. Call it before `start`."""
        listener = listen(backlog=1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        return HeadAddress(addresses=own_addresses(), port=listener.getsockname()[1], secret=self._secret)

    def run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=0.5):
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._read(key.data)
            self._keep_alive()

    def close(self) -> None:
        """Close all connections. An agent whose connection closes ends the ranks that it still runs."""
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
        self._watch(connection, address=plain_address(host), expected=None)

    def _watch(self, connection: socket.socket, address: str, expected: str | None) -> None:
        peer = _Peer(JsonLines(connection), address, expected)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        messages = self._received(peer)
        if messages is None:
            self._selector.unregister(peer.lines.connection)
            peer.lines.connection.close()
            if peer.node is not None:
                peer.node.mark_lost("its agent's connection closed")
            elif peer.expected is not None:
                self.refused.setdefault(peer.expected, "its agent ended before it was ready")
            self._wake.set()
            return
        for message in messages:
            assert peer.node is not None
            peer.node.handle(message)
        self._wake.set()

    def _received(self, peer: _Peer) -> list[dict[str, Any]] | None:
        """Messages that a ready agent has sent; None when the connection has ended or does not come from an agent.

        Every machine of a cluster can reach the port: data from a scanner or another program must end only its own
        connection.
        """
        try:
            messages = peer.lines.receive()
            while messages and peer.node is None:
                self._admit(peer, messages.pop(0))
            if peer.node is None and peer.lines.unread_bytes > _LONGEST_GREETING:
                return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return messages

    def _admit(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Handle one of the first messages on a connection: the secret, then whether the agent could start. Raises
        ValueError when the secret is wrong."""
        if peer.expected is None:
            if message.get("secret") != self._secret or not isinstance(message.get("name"), str):
                raise ValueError("not one of this pilot's agents")
            peer.expected = message["name"]
            # Ranks of other nodes can use the address by which this agent reached this machine.
            head_address = plain_address(peer.lines.connection.getsockname()[0])
            for node in self.nodes.values():
                if node.address == "127.0.0.1":
                    node.address = head_address
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

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._last_beat_at < KEEPALIVE_S:
            return
        self._last_beat_at = now
        for node in list(self.nodes.values()):
            if node.lost is not None:
                continue
            if now - node.heard_at > SILENCE_LIMIT_S:
                node.mark_lost(f"no message from its agent for {SILENCE_LIMIT_S:.0f} s")
                self._wake.set()
            else:
                node.send({})


@dataclass(slots=True)
class _Peer:
    lines: JsonLines
    address: str
    expected: str | None
    """Name of the node; None until the agent has sent the secret."""
    node: Node | None = None
    """The connected node; None until its agent is ready."""
