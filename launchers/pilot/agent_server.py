"""The pilot's side of the connections to its agents: one thread accepts, reads and keeps them alive."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from launchers.node.addresses import listen, own_addresses, plain_address
from launchers.node.connection import KEEPALIVE_S, SILENCE_LIMIT_S, HeadAddress, JsonLines
from launchers.node.remote import Node

GREETING_LIMIT_S = 20.0
"""Seconds after which a connection that has not sent the secret is closed. An agent sends it as soon as it connects."""
MOST_STRANGERS = 256
"""Maximum number of connections that have not sent the secret; the oldest is closed for a new one."""
_LONGEST_GREETING = 4096
"""Maximum bytes that are received and kept of a connection that has not sent the secret."""
_LONGEST_START = 1 << 20
"""Maximum bytes of one message of an agent that is not ready yet."""
_PAUSE_S = 1.0
"""Seconds without a new connection after one could not be accepted, such as for want of open files."""


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
        self._strangers: dict[int, _Peer] = {}
        """Connections that have not sent the secret, oldest first, by descriptor."""
        self._listener: socket.socket | None = None
        self._listen_again_at: float | None = None
        """When the listener is watched again; None while it is watched."""
        self._last_beat_at = time.monotonic()

    def attach(self, connection: socket.socket, name: str) -> None:
        """Use the connection to the agent of this machine. Call it before `start`."""
        self._watch(connection, address="127.0.0.1", expected=name)

    def listen(self) -> HeadAddress:
        """Let the agents of other nodes connect. Returns the address to give them. Call it before `start`."""
        listener = listen(backlog=1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._listener = listener
        return HeadAddress(addresses=own_addresses(), port=listener.getsockname()[1], secret=self._secret)

    def run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=0.5):
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._read(key.data)
            self._keep_alive()
            self._close_silent_strangers()
            self._listen_again()

    def close(self) -> None:
        """Close all connections. An agent whose connection closes ends the ranks that it still runs."""
        self._closing = True
        self.join(2.0)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: Any) -> None:
        try:
            connection, (host, *_) = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no more files or memory: the listener stays readable, so watching it would take all time
            self._selector.unregister(listener)
            self._listen_again_at = time.monotonic() + _PAUSE_S
            if self._strangers:
                self._drop(next(iter(self._strangers.values())))
            return
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._watch(connection, address=plain_address(host), expected=None)
        except OSError:  # it has gone again
            connection.close()

    def _listen_again(self) -> None:
        if self._listener is None or self._listen_again_at is None or time.monotonic() < self._listen_again_at:
            return
        self._listen_again_at = None
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _watch(self, connection: socket.socket, address: str, expected: str | None) -> None:
        peer = _Peer(JsonLines(connection), address, expected)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if expected is None:
            self._strangers[connection.fileno()] = peer
            if len(self._strangers) > MOST_STRANGERS:
                self._drop(next(iter(self._strangers.values())))

    def _drop(self, peer: _Peer) -> None:
        """Close a connection."""
        self._strangers.pop(peer.lines.connection.fileno(), None)
        self._selector.unregister(peer.lines.connection)
        peer.lines.connection.close()

    def _close_silent_strangers(self) -> None:
        until = time.monotonic() - GREETING_LIMIT_S
        for peer in [peer for peer in self._strangers.values() if peer.since < until]:
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        if peer.lines.connection.fileno() < 0:  # closed since the selector has reported it
            return
        messages = self._received(peer)
        if messages is None:
            self._drop(peer)
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
            stranger = peer.expected is None
            messages = peer.lines.receive(_LONGEST_GREETING) if stranger else peer.lines.receive()
            while messages and peer.node is None:
                self._admit(peer, messages.pop(0))
            longest = _LONGEST_GREETING if peer.expected is None else _LONGEST_START
            if peer.node is None and peer.lines.unread_bytes >= longest:
                return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return messages

    def _admit(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Handle one of the first messages on a connection: the secret, then whether the agent could start. Raises
        ValueError when the secret is wrong."""
        if peer.expected is None:
            secret, name = message.get("secret"), message.get("name")
            if not isinstance(secret, str) or not isinstance(name, str):
                raise ValueError("no secret or no name")
            if not secrets.compare_digest(secret.encode(errors="replace"), self._secret.encode()):
                raise ValueError("not one of this pilot's agents")
            peer.expected = name
            self._strangers.pop(peer.lines.connection.fileno(), None)
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
    since: float = field(default_factory=time.monotonic)
