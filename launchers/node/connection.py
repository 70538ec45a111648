"""Connects a pilot with the agents of its nodes: messages as JSON lines, and the file that tells an agent where its
pilot is."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.errors import UltrasweepError
from results.shared_filesystem.whole_files import read_own_text

KEEPALIVE_S = 2.0
"""Each side sends an empty message after this many seconds without another message."""
SILENCE_LIMIT_S = 45.0
"""Seconds of silence after which a connection counts as cut. The limit exceeds the longest work during which an agent
sends nothing (killing ranks, `rank_group.KILL_LIMIT_S`)."""


class NodeLost(UltrasweepError):
    """A node stopped answering, or could not reach its pilot."""


class JsonLines:
    """JSON lines over a socket, read without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. Raises `OSError` when the other side has gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    @property
    def unread_bytes(self) -> int:
        """Number of received bytes of an incomplete line."""
        return len(self._rest)

    def receive(self, most_bytes: int = 1 << 20) -> list[dict[str, Any]] | None:
        """Messages received since the last call, possibly none; None when the other side has disconnected. At most
        ``most_bytes`` are received. Call it when the socket is readable."""
        try:
            chunk = self.connection.recv(most_bytes)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not chunk:
            return None
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in whole if line]


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Address at which the agents of other nodes find the pilot. It is stored in a file that only this user can
    read."""

    addresses: tuple[str, ...]
    port: int
    secret: str


def connect_to_pilot(head_address: Mapping[str, Any], name: str, limit_s: float) -> socket.socket:
    """Connect an agent to its pilot. Raises `NodeLost` when none of the pilot's addresses answers within ``limit_s``
    seconds."""
    until = time.monotonic() + limit_s
    while True:
        for address in head_address["addresses"]:
            try:
                connection = socket.create_connection((address, head_address["port"]), timeout=5.0)
            except OSError:
                continue
            connection.settimeout(SILENCE_LIMIT_S)  # an agent must not block for ever while sending over a cut network
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            JsonLines(connection).send({"secret": head_address["secret"], "name": name})
            return connection
        if time.monotonic() > until:
            addresses = ", ".join(head_address["addresses"])
            raise NodeLost(f"node {name}: the pilot answers at none of {addresses} (port {head_address['port']})")
        time.sleep(0.5)


def read_head_address(path: Path, limit_s: float) -> Mapping[str, Any]:
    """Wait for the pilot's file (see `HeadAddress`) and read it. Raises `NodeLost` when it does not appear within
    ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    while True:
        try:
            address: Mapping[str, Any] = json.loads(read_own_text(path))
            return address
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise NodeLost(f"the pilot has not written its address to {path} within {limit_s:.0f} s") from None
            time.sleep(0.2)
