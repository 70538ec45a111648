"""The clusters that the tests of this folder share."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab

NODES = 20
PLAIN_NODES = 4


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A cluster with accounting (slurmdbd, MariaDB)."""
    with Lab(nodes=NODES, accounting="dbd", port_base=free_ports(NODES + 2)) as lab:
        yield lab


@pytest.fixture(scope="session")
def plain_lab() -> Iterator[Lab]:
    """A cluster without accounting: no sacct."""
    with Lab(nodes=PLAIN_NODES, accounting="none", port_base=free_ports(PLAIN_NODES + 2)) as lab:
        yield lab


def free_ports(count: int) -> int:
    """The first of ``count`` free ports of this machine."""
    for first in random.sample(range(10_000, 32_000, 100), 100):  # below those that the system hands out itself
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError(f"no {count} free ports in a row")
