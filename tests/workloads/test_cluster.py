"""Descriptions of clusters: what is wrong in one is said with its place."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.cluster import check_cluster, cluster_from_dict, to_dict
from workloads.errors import InvalidSweep


def fields(**changes: Any) -> dict[str, Any]:
    cluster = {
        "name": "ours",
        "backend": "cuda",
        "device": {"name": "h100", "memory_bytes": 80 * 10**9, "peak_flops": {"bf16": 9.89e14}},
        "devices_per_node": 8,
        "intra_node": {"bandwidth": 4.5e11, "latency_s": 1e-6},
        "inter_node": {"bandwidth": 5e10, "latency_s": 5e-6},
    }
    return {**cluster, **changes}


def test_a_cluster_survives_the_trip_through_plain_data() -> None:
    cluster = check_cluster(cluster_from_dict(fields(environment={"NCCL_CROSS_NIC": 0})))
    assert cluster.environment == {"NCCL_CROSS_NIC": "0"}
    assert cluster_from_dict(to_dict(cluster)) == cluster
    assert cluster_from_dict({k: v for k, v in fields().items() if k != "inter_node"}).inter_node is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": 4}, r"cluster ours: no option 'nodes'; did you mean 'intra_node'\? known: backend"),
        ({"intra_node": None}, "cluster ours: intra_node=None must be a mapping"),
        ({"device": {"memory_bytes": 1}}, "cluster ours: device: name must be given"),
        ({"device": "h100"}, "cluster ours: device='h100' must be a mapping"),
        ({"intra_node": {"bandwith": 1.0}}, "cluster ours: intra_node: no option 'bandwith'; did you mean 'bandwidth'"),
        ({"environment": ["A"]}, r"cluster ours: environment=\['A'\] must be a mapping"),
        ({"environment": {"A B": 1}}, "cluster ours: environment: 'A B' cannot be the name of a variable"),
        ({"environment": {"A": True}}, "cluster ours: environment: A=True must be text or a number; put it in quotes"),
        ({"backend": "tpu"}, "cluster ours: backend='tpu'; it may be cuda or cpu"),
        ({"devices_per_node": 0}, "cluster ours: devices_per_node=0 must be a whole number of at least 1"),
        ({"reserved_bytes": "2 GiB"}, "cluster ours: reserved_bytes='2 GiB' must be a number of at least 0"),
        ({"intra_node": {"bandwidth": 0, "latency_s": 0}}, "intra_node.bandwidth=0 must be a number above 0"),
        ({"inter_node": {"bandwidth": 1, "latency_s": -1}}, "inter_node.latency_s=-1 must be a number of at least 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSweep, match=told) as error:
        check_cluster(cluster_from_dict(fields(**changes)))
    assert "\n" not in str(error.value)


def test_a_missing_part_is_named() -> None:
    without_device = {key: value for key, value in fields().items() if key not in ("device", "backend")}
    with pytest.raises(InvalidSweep, match="cluster ours: backend, device must be given"):
        cluster_from_dict(without_device)
