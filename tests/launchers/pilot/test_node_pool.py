"""Which nodes of an allocation a pilot uses."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from launchers.pilot.node_pool import NodePool


def pool_of(**device_ids: tuple[str, ...] | None) -> NodePool:
    """A pool whose agents have all connected."""
    nodes = {name: SimpleNamespace(name=name, device_ids=ids, lost=None) for name, ids in device_ids.items()}
    server: Any = SimpleNamespace(nodes=nodes, refused={}, notes=[], missing=lambda: ())
    allocation: Any = SimpleNamespace(node=next(iter(nodes)), nodes=tuple(nodes), pilot_id="p")
    return NodePool(server, allocation, len(nodes), os.getpid(), None)


def test_of_two_nodes_with_one_device_only_the_first_is_used() -> None:
    pool = pool_of(n0=("GPU-a", "GPU-b"), n1=("GPU-c", "GPU-a"), n2=("GPU-d", "GPU-e"))
    lines = pool.wait_for_agents(lambda: True)
    assert pool.usable == ("n0", "n2")
    assert [line for line in lines if "n1" in line] == [
        "node n1 is not used: its device GPU-a is one of n0; check CUDA_VISIBLE_DEVICES and the GPUs that Slurm gives "
        "each node"
    ]


def test_nodes_with_devices_of_their_own_and_cpus_are_used() -> None:
    assert pool_of(n0=("GPU-a",), n1=("GPU-b",)).wait_for_agents(lambda: True) == []
    cpus = pool_of(n0=None, n1=None)
    assert cpus.wait_for_agents(lambda: True) == [] and cpus.usable == ("n0", "n1")
