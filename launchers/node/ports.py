"""Reserves a TCP port for the rendezvous of an attempt, so that no other process takes it before rank 0 listens on it.

Asking the kernel for a free port and closing it again would leave a gap. Here ports come from outside the kernel's
range for outgoing connections, so that no such connection can take one. Among the pilots of one machine a port belongs
to the process that holds the *UDP* socket of the same number: a lock that ends with its process and leaves the TCP port
free for the rank.
"""

from __future__ import annotations

import errno
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
        lock = _lock(port)
        if lock is None:
            continue
        with lock:
            if not _is_free(port):
                continue
            yield port
            return
    raise NoFreePort(f"no free port for a rendezvous on {host} among {candidates[0]} to {candidates[-1]}")


def _lock(port: int) -> socket.socket | None:
    """The socket that reserves a port among the pilots of this machine; None when another pilot has it."""
    for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            lock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError:  # this machine has only the other version of IP
            continue
        try:
            lock.bind((loopback, port))
        except OSError as error:
            lock.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            return None
        return lock
    return None


def _is_free(port: int) -> bool:
    """Whether no process listens on the TCP port, by either version of IP: a rank listens on both."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        with probe:
            try:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return False
    return True


def _candidates() -> range:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    below, above = range(_LOWEST, low), range(high + 1, _HIGHEST + 1)
    best = max(below, above, key=len)
    return best if len(best) >= 1000 else range(_LOWEST, _HIGHEST + 1)
