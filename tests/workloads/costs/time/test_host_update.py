"""The time and the memory of an optimizer on the host, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.host_activations import node_host_bytes, rank_host_bytes
from workloads.costs.shape.params import num_params
from workloads.costs.time.host_update import added_by_host, host_update, overlapped
from workloads.costs.time.known_rates import absent_rates
from workloads.costs.time.timeline import estimate_time, step_work
from workloads.spec.cluster import ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from workloads.spec.experiment import Experiment

CLUSTER = ClusterSpec(
    name="here",
    backend="cuda",
    device=DeviceSpec(name="card", memory_bytes=80 * 2**30, peak_flops={"bf16": 1e15}, memory_bandwidth=4e12),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=1e11, latency_s=1e-6),
    inter_node=LinkSpec(bandwidth=1e10, latency_s=1e-6),
    matmul_efficiency=0.5,
    host=HostSpec(link_bandwidth=50e9, memory_bandwidth=480e9),
)
PARAMS = num_params(LLAMA_8B)


def case(share: float, **fields: object) -> Experiment:
    return Experiment.canonical(model=LLAMA_8B, global_batch_size=64, optimizer_offload=share, **fields)


def test_steps_overlap_but_for_the_first_and_the_last_piece() -> None:
    assert overlapped(1.0, 3.0, 2.0, pieces=1) == pytest.approx(6.0)
    assert overlapped(1.0, 3.0, 2.0, pieces=2) == pytest.approx(3 + 3 / 2)
    assert overlapped(1.0, 3.0, 2.0, pieces=1000) == pytest.approx(3.0, rel=2e-3)


def test_one_rank_by_hand() -> None:
    """8 bytes an element go through the link in each direction at 50e9 B/s."""
    found = host_update(case(0.5), CLUSTER)
    assert found is not None
    elements = PARAMS / 2
    assert found.link_s == pytest.approx(8 * elements / 50e9, rel=1e-6)
    assert found.streamed_s == pytest.approx(found.link_s, rel=5e-3)
    # The norm reads 4 of the 40 bytes an element that the device's memory moves for the norm, clipping and AdamW.
    assert found.update_s == found.device_s == pytest.approx(36 * elements / 4e12, rel=1e-6)
    assert found.added_s == pytest.approx(found.streamed_s - 2 * found.device_s, rel=1e-6)


def test_devices_of_a_node_share_its_memory() -> None:
    """480e9 B/s are enough for four links in both directions at once, and 30e9 for each of eight."""
    assert [CLUSTER.host.both_ways_bandwidth(devices) for devices in (1, 4, 8)] == [50e9, 50e9, 30e9]
    shared = dataclasses.replace(CLUSTER.host, link_shared_bandwidth=40e9)
    assert [shared.both_ways_bandwidth(devices) for devices in (1, 2, 4, 8)] == [50e9, 40e9, 40e9, 30e9]
    one, eight = (host_update(case(1.0, dp=dp, zero_stage=1), CLUSTER) for dp in (8, 64))
    assert one is not None and eight is not None
    assert one.link_s == pytest.approx(PARAMS / 8 * 8 / 30e9, rel=1e-6)
    assert eight.link_s == pytest.approx(one.link_s / 8, rel=1e-6)


def test_moments_in_bf16_are_half_as_long_on_the_link() -> None:
    full, half = (host_update(case(1.0, optimizer_states=states), CLUSTER) for states in ("fp32", "bf16"))
    assert full is not None and half is not None
    assert half.link_s == pytest.approx(full.link_s / 2)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        (HostSpec(), False),
        (HostSpec(memory_bandwidth=480e9), False),
        (HostSpec(link_bandwidth=50e9), True),
    ],
)
def test_without_the_link_there_is_no_time(host: HostSpec, known: bool) -> None:
    cluster = dataclasses.replace(CLUSTER, host=host)
    assert absent_rates(cluster, "bf16", uses_host=True) == ([] if known else ["host.link_bandwidth"])
    assert absent_rates(cluster, "bf16", uses_host=False) == []
    for one in (host_update(case(0.5), cluster), estimate_time(case(0.5), cluster), step_work(case(0.5), cluster)):
        assert (one is not None) == known
    assert estimate_time(case(0.0), cluster) is not None
    assert added_by_host(case(0.0), cluster) == 0.0


def test_a_step_is_longer_by_what_the_host_adds() -> None:
    without, half = estimate_time(case(0.0), CLUSTER), estimate_time(case(0.5), CLUSTER)
    added = added_by_host(case(0.5), CLUSTER)
    assert without is not None and half is not None and added is not None and added > 0
    assert half.step_time_s - without.step_time_s == pytest.approx(added)
    assert half.optimizer_s - without.optimizer_s == pytest.approx(added)
    works = step_work(case(0.0), CLUSTER), step_work(case(0.5), CLUSTER)
    assert works[0] is not None and works[1] is not None
    assert works[1].optimizer_s[0] - works[0].optimizer_s[0] == pytest.approx(added)


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("layout", [{}, {"dp": 8, "zero_stage": 3}, {"tp": 2, "pp": 2, "dp": 2}], ids=str)
def test_memory_moves_from_the_device_to_the_host(share: float, layout: dict[str, object]) -> None:
    with_share, without = (estimate_memory(case(one, **layout)) for one in (share, 0.0))
    for stage, before in zip(with_share.stages, without.stages, strict=True):
        staged = 4 * 2**21 * 8  # four pieces of two moments
        assert stage.optimizer_bytes - staged == pytest.approx((1 - share) * before.optimizer_bytes, abs=8)
        assert before.peak_bytes - stage.peak_bytes == before.optimizer_bytes - stage.optimizer_bytes
    most = max(before.optimizer_bytes for before in without.stages)
    assert rank_host_bytes(case(share, **layout)) == pytest.approx(share * most, abs=32)
    ranks = case(share, **layout).world_size
    assert node_host_bytes(case(share, **layout), 8) == rank_host_bytes(case(share, **layout)) * min(ranks, 8)
    assert rank_host_bytes(case(0.0, **layout)) == 0
