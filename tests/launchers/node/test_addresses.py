"""Addresses by which other nodes may reach a pilot, on machines with either version of IP."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from launchers.node import addresses
from launchers.node.addresses import listen, own_addresses, plain_address


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine whose name resolves to some addresses, and whose interfaces have others."""

    def install(resolved: list[str], interfaces: list[str]) -> None:
        def getaddrinfo(_name: str, _port: None, **_options: Any) -> list[Any]:
            return [(None, None, None, "", (address, 0)) for address in resolved]

        monkeypatch.setattr(socket, "gethostname", lambda: "node1")
        monkeypatch.setattr(socket, "getfqdn", lambda: "node1.cluster.site")
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(addresses, "_of_interfaces", lambda: iter(interfaces))
        for name in ("SLURM_LAUNCH_NODE_IPADDR", "SLURMD_NODENAME"):
            monkeypatch.delenv(name, raising=False)

    return install


def test_another_interface_or_a_name_with_a_suffix_is_tried(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(["127.0.1.1"], ["127.0.0.1", "10.0.0.5", "192.168.7.5", "::1", "fe80::1", "fd00::5"])
    assert own_addresses() == ("node1", "node1.cluster.site", "10.0.0.5", "192.168.7.5", "fd00::5")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.9.9.9")
    monkeypatch.setenv("SLURMD_NODENAME", "node1-ib")
    assert own_addresses()[:3] == ("node1", "10.9.9.9", "node1-ib")


def test_a_machine_with_ipv6_alone_has_addresses(machine: Callable[..., None]) -> None:
    machine(["fd00::5"], ["::1", "fd00::5"])
    assert own_addresses() == ("node1", "fd00::5", "node1.cluster.site")


def test_the_addresses_of_this_machine_are_read() -> None:
    assert "127.0.0.1" in list(addresses._of_interfaces())


@pytest.mark.parametrize("dualstack", [True, False])
def test_both_versions_of_ip_reach_the_listener(monkeypatch: pytest.MonkeyPatch, dualstack: bool) -> None:
    dualstack = dualstack and socket.has_dualstack_ipv6()
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dualstack)
    with listen(backlog=4) as listener:
        for host in ("127.0.0.1", "::1") if dualstack else ("127.0.0.1",):
            with socket.create_connection((host, listener.getsockname()[1]), timeout=5.0):
                accepted, (peer, *_) = listener.accept()
                accepted.close()
                assert plain_address(peer) == host
