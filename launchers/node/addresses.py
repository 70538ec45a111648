"""Names and addresses by which another node may reach this machine, and a listener for both versions of IP."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915
_FROM_SLURM = ("SLURM_LAUNCH_NODE_IPADDR", "SLURMD_NODENAME")
"""Slurm starts all tasks of a job from the job's first node, and tells each of them that node's address."""
_MAPPED = "::ffff:"


def own_addresses() -> tuple[str, ...]:
    """The most likely first: the name and what it resolves to, what Slurm says, and the address of each interface.

    Addresses that only this machine can use are left out, unless there is no other.
    """
    name = socket.gethostname()
    likely = [name, *_resolved(name), *(os.environ.get(variable, "") for variable in _FROM_SLURM), socket.getfqdn()]
    everything = list(dict.fromkeys(one for one in [*likely, *_of_interfaces()] if one))
    return tuple([one for one in everything if not _is_local(one)] or everything)


def listen(backlog: int) -> socket.socket:
    """A listener on a free port of every address of this machine."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    try:
        return socket.create_server(("", 0), backlog=backlog)
    except OSError:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog)


def plain_address(host: str) -> str:
    """An IPv4 address without the prefix that it has on a socket of IPv6."""
    return host.removeprefix(_MAPPED)


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []


def _of_interfaces() -> Iterator[str]:
    """One IPv4 address of each interface, and the IPv6 addresses that are valid beyond one link."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                yield socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0]))


def _is_local(address: str) -> bool:
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:  # a name
        return False
    return parsed.is_loopback or parsed.is_link_local
