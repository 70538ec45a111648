"""Ports for the rendezvous of attempts."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from launchers.node import ports


def test_a_reserved_port_is_free_for_a_rank_and_no_other_pilots() -> None:
    with ports.reserve_port() as first, ports.reserve_port() as second:
        assert first != second
        with socket.socket() as rank:
            rank.bind(("", first))
            rank.listen()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", first))


def test_no_port_is_one_that_the_kernel_gives_to_outgoing_connections() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert listener.getsockname()[1] not in ports._candidates()


@pytest.mark.parametrize("missing", [socket.AF_INET, socket.AF_INET6])
def test_a_machine_with_one_version_of_ip_has_ports(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    class OneVersion(socket.socket):
        def __init__(self, family: int = -1, *arguments: Any) -> None:
            if family == missing:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments)

    if missing == socket.AF_INET and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(ports.socket, "socket", OneVersion)
    with ports.reserve_port() as first, ports.reserve_port() as second:
        assert first != second
