"""Refuses a run in which two ranks train on one device.

NCCL refuses it only for ranks of one host, which it tells by the host's name. Nodes that are parts of one machine
(containers, virtual clusters) have names of their own: there two ranks would share a device by turns of about two
milliseconds, and their rows would look like rows of a slow network.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from typing import Protocol


class SharedDevice(RuntimeError):
    """Two ranks use one device."""


class Store(Protocol):
    """What is needed of `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def refuse_shared_devices(store: Store, rank: int, world_size: int, device_id: str | None) -> None:
    """Compare the devices of all ranks through the store; every rank calls this once.

    ``device_id``: the rank's device (`workloads.measuring.device.identity`), None on CPUs, which ranks share. Raises
    `SharedDevice` on every rank if two of them have the same device.
    """
    if device_id is None or world_size == 1:
        return
    store.set(f"device/{rank}", json.dumps([device_id, socket.gethostname()]))
    if rank == 0:
        devices = [json.loads(value) for value in store.multi_get([f"device/{r}" for r in range(world_size)])]
        store.set("device/problem", shared([(str(device), str(host)) for device, host in devices]))
    if problem := store.get("device/problem").decode():
        raise SharedDevice(problem)


def shared(devices: list[tuple[str, str]]) -> str:
    """One line about the first device that several ranks use; empty if there is none. ``devices``: (id, host) by
    rank."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, (device, _) in enumerate(devices):
        ranks[device].append(rank)
    for device, users in ranks.items():
        if len(users) > 1:
            hosts = ", ".join(dict.fromkeys(devices[rank][1] for rank in users))
            return (
                f"ranks {' and '.join(map(str, users))} use the same device, {device} (host {hosts}); every rank needs "
                f"one of its own: check CUDA_VISIBLE_DEVICES and the GPUs that Slurm gives each node"
            )
    return ""
