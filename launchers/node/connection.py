"""The connection between a pilot and the agents of its nodes: JSON lines, and how an agent finds its pilot."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.errors import UltrasweepError

KEEPALIVE_S = 2.0
SILENCE_LIMIT_S = 45.0
"""Without a word from the other side for this long, a connection counts as cut. Above the longest blocking answer
that is not kept alive by beats (ending ranks, `rankgroup.KILL_LIMIT_S`)."""


class NodeLost(UltrasweepError):
    """A node that does not answer any more."""


class JsonLines:
    """JSON lines over a socket, read without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `OSError` when the other side is gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come in; None when the other side has closed. Call when the socket is readable."""
        try:
            chunk = self.connection.recv(1 << 20)
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
    """Where the agents of other nodes find the pilot: a file that only this user can read."""

    addresses: tuple[str, ...]
    port: int
    secret: str


def connect_to_pilot(head_address: Mapping[str, Any], name: str, limit_s: float) -> socket.socket:
    """Connect an agent to its pilot. Raises `NodeLost` when none of the pilot's addresses answers in time."""
    until = time.monotonic() + limit_s
    while True:
        for address in head_address["addresses"]:
            try:
                connection = socket.create_connection((address, head_address["port"]), timeout=5.0)
            except OSError:
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            JsonLines(connection).send({"secret": head_address["secret"], "name": name})
            return connection
        if time.monotonic() > until:
            where = ", ".join(head_address["addresses"])
            raise NodeLost(f"node {name}: the pilot answers at none of {where} (port {head_address['port']})")
        time.sleep(0.5)


def read_head_address(path: Path, limit_s: float) -> Mapping[str, Any]:
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
