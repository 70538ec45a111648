"""Two ranks on one device are refused, by name, on every rank."""

from __future__ import annotations

import pytest

from workloads.measuring.shared_devices import SharedDevice, refuse_shared_devices, shared


class InMemory:
    """A store of one process; ranks call it one after the other, rank 0 last."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


def devices_of(*ids: str) -> InMemory:
    store = InMemory()
    for rank, device in enumerate(ids):
        store.set(f"device/{rank}", f'["{device}", "node{rank // 2}"]')
    return store


def test_ranks_of_two_nodes_on_one_device_are_refused() -> None:
    store = devices_of("GPU-a", "GPU-b", "GPU-a", "GPU-b")
    with pytest.raises(SharedDevice, match=r"ranks 0 and 2 use the same device, GPU-a .*each node"):
        refuse_shared_devices(store, 0, 4, "GPU-a")
    with pytest.raises(SharedDevice, match="ranks 0 and 2"):  # every rank, not only the two
        refuse_shared_devices(store, 3, 4, "GPU-b")


def test_one_device_a_rank_and_cpus_are_accepted() -> None:
    apart = devices_of("GPU-a", "GPU-b")
    refuse_shared_devices(apart, 0, 2, "GPU-a")
    assert apart.get("device/problem") == b"", "the other ranks read that there is none"
    unused = InMemory()
    refuse_shared_devices(unused, 0, 2, None)
    refuse_shared_devices(unused, 0, 1, "GPU-a")
    assert unused.values == {}, "CPUs and a single rank ask nobody"


def test_the_line_names_the_hosts() -> None:
    assert "(host node0, node1)" in shared([("GPU-a", "node0"), ("GPU-a", "node1")])
    assert shared([("GPU-a", "node0"), ("GPU-b", "node1")]) == ""
