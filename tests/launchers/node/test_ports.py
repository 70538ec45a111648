"""Ports for the rendezvous of attempts."""

from __future__ import annotations

import socket

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
