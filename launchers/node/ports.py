"""Reserves a TCP port for the rendezvous of an attempt, so that no other process takes it before rank 0 listens on it.

Asking the kernel for a free port and closing it again would leave a gap. Here ports come from outside the kernel's
range for outgoing connections, so that no such connection can take one. Among the pilots of one machine a port belongs
to the process that holds the *UDP* socket of the same number: a lock that ends with its process and leaves the TCP port
free for the rank.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from results.errors import UltrasweepError

_LOWEST = 10_240
_HIGHEST = 65_535
_count = itertools.count()


class NoFreePort(UltrasweepError):
    """Every port in the range for rendezvous is taken."""


@contextmanager
def reserve_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A TCP port for a rank to listen on, reserved while the block runs. Raises `NoFreePort`."""
    candidates = _candidates()
    start = os.getpid() * 7 + next(_count)  # a different port each time: the last one may be in TIME_WAIT
    for offset in range(len(candidates)):
        port = candidates[(start + offset) % len(candidates)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lock:
            try:
                lock.bind(("127.0.0.1", port))
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                    probe.bind(("", port))
            except OSError:
                continue
            yield port
            return
    raise NoFreePort(f"no free port for a rendezvous on {host} among {candidates[0]} to {candidates[-1]}")


def _candidates() -> range:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    below, above = range(_LOWEST, low), range(high + 1, _HIGHEST + 1)
    best = max(below, above, key=len)
    return best if len(best) >= 1000 else range(_LOWEST, _HIGHEST + 1)
