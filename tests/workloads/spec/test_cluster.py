"""Descriptions of clusters: quantities with units, and what is wrong in one is said with its place."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.cluster_fields import check_cluster, cluster_from_dict, to_dict


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


def device(**changes: Any) -> dict[str, Any]:
    return {"device": {**fields()["device"], **changes}}


def test_a_cluster_survives_the_trip_through_plain_data() -> None:
    cluster = check_cluster(cluster_from_dict(fields(environment={"NCCL_CROSS_NIC": 0}, nodes=4)))
    assert cluster.environment == {"NCCL_CROSS_NIC": "0"}
    assert cluster_from_dict(to_dict(cluster)) == cluster
    assert cluster_from_dict({k: v for k, v in fields().items() if k != "inter_node"}).inter_node is None


def test_quantities_may_have_units() -> None:
    written = fields(
        device={"name": "h100", "memory_bytes": "80 GB", "peak_flops": {"bf16": "989 TFLOP/s"}, "driver_names": "X"},
        intra_node={"bandwidth": "450 GB/s", "latency_s": "1 us"},
        inter_node={"bandwidth": "400 Gb/s", "latency_s": "5us"},
        reserved_bytes="3 GiB",
        host={"memory_bytes": "2 TiB", "link_bandwidth": "55 GB/s", "memory_bandwidth": None},
    )
    plain = fields(reserved_bytes=3 * 2**30, host={"memory_bytes": 2 * 2**40, "link_bandwidth": 55e9})
    plain["device"]["driver_names"] = ("X",)
    assert check_cluster(cluster_from_dict(written)) == cluster_from_dict(plain)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"node": 4}, r"cluster ours: no option 'node'; did you mean 'nodes'\? known: backend"),
        ({"nodes": 0}, "cluster ours: nodes=0 must be a whole number of at least 1"),
        ({"intra_node": None}, "cluster ours: neither intra_node nor tiers describe the network; give one of them"),
        ({"device": {"memory_bytes": 1}}, "cluster ours: device: name must be given"),
        ({"device": "h100"}, "cluster ours: device='h100' must be a mapping"),
        ({"intra_node": {"bandwith": 1.0}}, "cluster ours: intra_node: no option 'bandwith'; did you mean 'bandwidth'"),
        ({"environment": ["A"]}, r"cluster ours: environment=\['A'\] must be a mapping"),
        ({"environment": {"A B": 1}}, "cluster ours: environment: 'A B' cannot be the name of a variable"),
        ({"environment": {"A": True}}, "cluster ours: environment: A=True must be text or a number; put it in quotes"),
        ({"backend": "tpu"}, "cluster ours: backend='tpu'; it may be cuda, cpu or rocm"),
        ({"devices_per_node": 0}, "cluster ours: devices_per_node=0 must be a whole number of at least 1"),
        (
            {"reserved_bytes": "2 Gi"},
            "cluster ours: reserved_bytes='2 Gi': 'Gi' is not a unit of memory; write",
        ),
        ({"reserved_bytes": 3}, r"reserved_bytes=3 means 3 B; between 1\.04858e\+06 and 1e\+14 B is plausible"),
        (
            {"reserved_bytes": 90 * 10**9},
            "=90000000000 leaves nothing of device.memory_bytes=80000000000",
        ),
        ({"intra_node": {"bandwidth": 0, "latency_s": 0}}, "intra_node.bandwidth=0 means 0 B/s; between 1e.07 and"),
        (
            {"inter_node": {"bandwidth": 12.5, "latency_s": 5e-6}},
            r"cluster ours: inter_node\.bandwidth=12\.5 means 12\.5 B/s; between 1e\+07 and 1e\+13 B/s is plausible; "
            "write the unit with the number: '50 GB/s'",
        ),
        ({"inter_node": {"bandwidth": None, "latency_s": 0}}, "inter_node.bandwidth=None must be a number of B/s"),
        ({"inter_node": {"bandwidth": 1e10, "latency_s": -1}}, "inter_node.latency_s=-1 means -1 s"),
        (
            {"inter_node": {"bandwidth": 1e10, "latency_s": 5}},
            "latency_s=5 means 5 s; between 0 and 0.1 s is",
        ),
        (device(memory_bytes=80), "device.memory_bytes=80 means 80 B"),
        (device(peak_flops={"bf16": 989}), "device.peak_flops.bf16=989 means 989 FLOP/s"),
        (device(peak_flops={"bf61": 9e14}), "device.peak_flops: no precision 'bf61'; did you mean 'bf16'"),
        (device(memory_bandwidth=3.35), "device.memory_bandwidth=3.35 means 3.35 B/s"),
        (device(power_w=0.7), "device.power_w=0.7 means 0.7 W; between 1 and 100000 W is plausible"),
        (device(power_w="700 J"), "device.power_w='700 J': 'J' is not a unit of power; write it like '700 W'"),
        ({"matmul_efficiency": 68}, "matmul_efficiency=68 must be a share above 0, at most 1"),
        (
            {"host": {"memory": "2 TB"}},
            "cluster ours: host: no option 'memory'; .* known: link_bandwidth, link_one_way_bandwidth",
        ),
        ({"host": {"memory_bytes": 2}}, "host.memory_bytes=2 means 2 B; between"),
        ({"host": {"link_bandwidth": 55}}, "host.link_bandwidth=55 means 55 B/s; between"),
        ({"host": "big"}, "cluster ours: host='big' must be a mapping"),
        ({"linked_devices": 12}, "linked_devices=12 is not a multiple of devices_per_node=8"),
        ({"linked_devices": 0}, "linked_devices=0 must be a whole number of at least 1"),
        ({"matmul_efficiency": "high"}, "matmul_efficiency='high' must be a number"),
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


AMD = ("AMD Instinct MI300X", "mi250x", "amd_mi325x", "mi300a")


@pytest.mark.parametrize("changes", [*({"name": name} for name in AMD), {"name": "ours", "driver_names": [AMD[0]]}])
def test_amd_gpus_need_their_backend(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSweep, match=r"is an AMD GPU; give backend: rocm, with which it can be planned"):
        check_cluster(cluster_from_dict(fields(**device(**changes))))
    planned = check_cluster(cluster_from_dict(fields(**device(**changes), backend="rocm")))
    assert planned.is_planned_only


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
@pytest.mark.parametrize("name", ["Intel Gaudi 3", "TPU v5p", "trainium2"])
def test_other_accelerators_are_neither_run_nor_predicted(name: str, backend: str) -> None:
    with pytest.raises(InvalidSweep, match=r"is no NVIDIA or AMD GPU .*; other accelerators are neither run nor"):
        check_cluster(cluster_from_dict(fields(**device(name=name), backend=backend)))


def test_rocm_is_no_backend_of_nvidia_gpus() -> None:
    with pytest.raises(InvalidSweep, match="device 'NVIDIA H200' is an NVIDIA GPU; give backend: cuda"):
        check_cluster(cluster_from_dict(fields(**device(name="NVIDIA H200"), backend="rocm")))


@pytest.mark.parametrize("name", ["NVIDIA H100 MIG 1g.10gb", "gh200", "A100-SXM4-80GB", "Tesla V100", "midrange"])
def test_nvidia_gpus_are_taken_by_any_name(name: str) -> None:
    check_cluster(cluster_from_dict(fields(**device(name=name))))
