"""The time and the memory of an optimizer on the host, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.host_activations import node_host_bytes, rank_host_bytes
from workloads.costs.shape.params import num_params
from workloads.costs.time.host_update import PIECE, added_by_host, host_update, overlapped, unknown_rates, update_rate
from workloads.costs.time.timeline import estimate_time, step_work
from workloads.engine.training import host_optimizer
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
    host=HostSpec(link_bandwidth=50e9, memory_bandwidth=360e9),
)
PARAMS = num_params(LLAMA_8B)


def case(share: float, **fields: object) -> Experiment:
    return Experiment.canonical(model=LLAMA_8B, global_batch_size=64, optimizer_offload=share, **fields)


def test_pieces_are_those_of_the_engine() -> None:
    assert PIECE == host_optimizer.PIECE


def test_steps_overlap_but_for_the_first_and_the_last_piece() -> None:
    assert overlapped(1.0, 3.0, 2.0, pieces=1) == pytest.approx(6.0)
    assert overlapped(1.0, 3.0, 2.0, pieces=2) == pytest.approx(3 + 3 / 2)
    assert overlapped(1.0, 3.0, 2.0, pieces=1000) == pytest.approx(3.0, rel=2e-3)


def test_one_rank_by_hand() -> None:
    """One rank has an eighth of its node's processors: 0.88 of 360e9 / (8 x 36) bytes are 1.1e9 parameters a second."""
    found = host_update(case(0.5), CLUSTER)
    assert found is not None
    elements = PARAMS / 2
    assert found.down_s == found.up_s == pytest.approx(4 * elements / 50e9, rel=1e-6)
    assert found.update_s == pytest.approx(elements / 1.1e9, rel=1e-6)
    assert found.host_s == pytest.approx(found.update_s, rel=5e-3)
    # Norm, clipping and AdamW move 40 bytes a parameter on the device.
    assert found.device_s == pytest.approx(40 * elements / 4e12, rel=1e-6)
    assert found.added_s == pytest.approx(found.host_s - 2 * found.device_s, rel=1e-6)


def test_ranks_have_their_share_of_the_processors_and_their_own_links() -> None:
    one, eight = (host_update(case(1.0, dp=dp, zero_stage=1), CLUSTER) for dp in (8, 64))
    assert one is not None and eight is not None
    assert one.update_s == pytest.approx(PARAMS / 8 / 1.1e9, rel=1e-6)
    assert one.down_s == pytest.approx(PARAMS / 8 * 4 / 50e9, rel=1e-6)
    assert eight.update_s == pytest.approx(one.update_s / 8, rel=1e-6)


def test_a_measured_rate_counts_and_fp64_has_half_of_it() -> None:
    host = dataclasses.replace(CLUSTER.host, adamw_rate=2e9)
    probed = dataclasses.replace(CLUSTER, host=host)
    assert (update_rate(probed, 4), update_rate(probed, 8)) == (1.76e9, 0.88e9)
    assert update_rate(CLUSTER, 8) == pytest.approx(0.55e9)


@pytest.mark.parametrize(
    ("host", "lacks"),
    [
        (HostSpec(), ["host.link_bandwidth", "host.memory_bandwidth"]),
        (HostSpec(link_bandwidth=50e9), ["host.memory_bandwidth"]),
        (HostSpec(adamw_rate=1e9), ["host.link_bandwidth"]),
        (HostSpec(link_bandwidth=50e9, adamw_rate=1e9), []),
    ],
)
def test_without_a_rate_there_is_no_time(host: HostSpec, lacks: list[str]) -> None:
    cluster = dataclasses.replace(CLUSTER, host=host)
    assert unknown_rates(cluster) == lacks
    for known in (host_update(case(0.5), cluster), estimate_time(case(0.5), cluster), step_work(case(0.5), cluster)):
        assert (known is None) == bool(lacks)
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
        assert stage.optimizer_bytes == pytest.approx((1 - share) * before.optimizer_bytes, abs=8)
        assert before.peak_bytes - stage.peak_bytes == before.optimizer_bytes - stage.optimizer_bytes
    most = max(before.optimizer_bytes for before in without.stages)
    assert rank_host_bytes(case(share, **layout)) == pytest.approx(2 * share * most, abs=32)
    ranks = case(share, **layout).world_size
    assert node_host_bytes(case(share, **layout), 8) == rank_host_bytes(case(share, **layout)) * min(ranks, 8)
    assert rank_host_bytes(case(0.0, **layout)) == 0
