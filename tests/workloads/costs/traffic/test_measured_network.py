"""Times of collectives between nodes come from a probe where it has timed them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import LLAMA_1B
from tests.workloads.costs.traffic.test_collectives import H200
from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.collectives import (
    COMPUTE_BESIDE,
    TRAFFIC_BESIDE,
    Contention,
    collective_time_s,
    contention_of,
    group_of,
)
from workloads.costs.traffic.measured_network import ProbedCluster, network_of
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

MIB = 2**20


def figure(name: str, size: int, seconds: float, ranks: int = 2, placement: str = "between_nodes") -> dict[str, Any]:
    return {
        "kind": "collective",
        "backend": "cuda",
        "name": name,
        "bytes": size,
        "value": seconds,
        "group_size": ranks,
        "placement": placement,
    }


def probed(*figures: dict[str, Any]) -> ProbedCluster:
    cluster = dataclasses.replace(H200, devices_per_node=2)
    network = network_of(figures, 2)
    assert network is not None
    fields = {one.name: getattr(cluster, one.name) for one in dataclasses.fields(ClusterSpec)}
    return ProbedCluster(**fields, network=network)


def test_times_are_interpolated_between_sizes_and_grow_in_proportion_beyond() -> None:
    cluster = probed(figure("all_gather", 4 * MIB, 2e-3), figure("all_gather", 64 * MIB, 18e-3))

    def seconds(size: float) -> float:
        return collective_time_s("all_gather", size, 2, 2, cluster)

    assert seconds(1024) == seconds(4 * MIB) == pytest.approx(2e-3)
    assert seconds(34 * MIB) == pytest.approx(10e-3)
    assert seconds(128 * MIB) == pytest.approx(36e-3)


def test_groups_that_were_not_timed_follow_the_model() -> None:
    cluster = probed(figure("all_gather", 4 * MIB, 2e-3))
    for op, ranks, apart in (("all_gather", 2, 1), ("all_gather", 4, 1), ("all_reduce", 2, 2), ("all_gather", 4, 2)):
        plain = dataclasses.replace(H200, devices_per_node=2)
        assert collective_time_s(op, MIB, ranks, apart, cluster) == collective_time_s(op, MIB, ranks, apart, plain)  # type: ignore[arg-type]
        assert group_of(ranks, apart, cluster) == group_of(ranks, apart, plain)


def test_slow_outliers_do_not_count() -> None:
    """A message takes no longer than a larger one. The largest ones may be slower than a smaller one's rate."""
    times = {1: 9e-3, 4: 2e-3, 16: 5e-3, 64: 80e-3}
    cluster = probed(*(figure("all_gather", size * MIB, seconds) for size, seconds in times.items()))
    assert collective_time_s("all_gather", MIB, 2, 2, cluster) == pytest.approx(2e-3)
    assert collective_time_s("all_gather", 64 * MIB, 2, 2, cluster) == pytest.approx(80e-3)


def test_gradients_use_the_rates_of_their_own_operations() -> None:
    figures = [
        figure(op, size, start + size / rate, 4, "mixed")
        for op, start, rate in (("all_gather", 1e-3, 4e9), ("reduce_scatter", 1e-3, 4e9), ("all_reduce", 2e-3, 3e9))
        for size in (1024, 256 * MIB)
    ]
    group = group_of(4, 1, probed(*figures))
    assert group.scattered_s(256 * MIB) == pytest.approx(256 * MIB / 4e9, rel=0.05)
    assert group.reduced_s(256 * MIB) == pytest.approx(256 * MIB / 3e9, rel=0.05)


def test_several_times_of_one_size_give_their_mean() -> None:
    cluster = probed(*(figure("all_gather", MIB, seconds) for seconds in (1e-3, 2e-3, 6e-3)))
    assert cluster.network.seconds("all_gather", MIB, 2, 1) == pytest.approx(3e-3)


def test_messages_of_one_way_take_their_own_time_where_a_probe_has_it() -> None:
    both_ways = figure("send_recv", MIB, 4e-3)
    assert probed(both_ways).network.seconds("send", MIB, 2, 1) == pytest.approx(4e-3)
    network = probed(both_ways, figure("send", MIB, 2.5e-3)).network
    assert network.seconds("send", MIB, 2, 1) == pytest.approx(2.5e-3)
    assert network.seconds("p2p", MIB, 2, 1) == pytest.approx(4e-3)


def test_all_reduces_of_other_processes_count_as_other_moments_of_the_network() -> None:
    network = probed(figure("all_reduce", 256 * MIB, 0.1), figure("all_gather", MIB, 1e-3)).network
    rate = 256 * MIB / 0.1  # of two nodes: the bus moves every byte once
    slower = network.over_moments([rate / 1.5, rate / 2.0], 256 * MIB)
    assert slower.seconds("all_gather", MIB, 2, 1) == pytest.approx(1.5e-3), "the mean of 1, 1.5 and 2"
    assert network.over_moments([], 256 * MIB) is network
    assert probed(figure("all_gather", MIB, 1e-3)).network.over_moments([rate], 256 * MIB).curves


def test_a_slow_network_slows_compute_little_unless_a_probe_measured_more() -> None:
    gather = figure("all_gather", 256 * MIB, 128 * MIB / 3.6e9)
    cluster = probed(gather)
    derived = contention_of(2, 2, cluster)
    assert derived == Contention(pytest.approx(3.6e9 / cluster.intra_node.bandwidth), 0.0)
    assert contention_of(2, 1, cluster) == contention_of(2, 2, H200) == Contention(1.0, 1.0)

    def beside(name: str, slowdown: float) -> dict[str, object]:
        return {**figure(name, 128 * MIB, slowdown), "kind": "interference"}

    measured = probed(gather, beside("compute", 1.1), beside("all_gather", 1.4), beside("all_reduce", 1.6))
    compute, traffic = contention_of(2, 2, measured)
    assert 1 + compute * (COMPUTE_BESIDE - 1) == pytest.approx(1.1)
    assert 1 + traffic * (TRAFFIC_BESIDE - 1) == pytest.approx(1.5)
    worst = contention_of(2, 2, probed(gather, beside("compute", 2.0), beside("all_gather", 9.0)))
    assert 1 + worst.traffic * (TRAFFIC_BESIDE - 1) == pytest.approx(2.0), "no slower than one after the other"


def test_a_probe_of_one_node_has_no_network() -> None:
    assert network_of([figure("all_gather", MIB, 1e-3, 2, "inside_node")], 2) is None
    assert network_of([{**figure("all_gather", MIB, 1e-3), "backend": "cpu"}], 2) is None


def layout(**fields: Any) -> Experiment:
    return Experiment.canonical(**{"model": LLAMA_1B, "seq_len": 2048, "global_batch_size": 16, **fields})


def test_stages_in_two_nodes_send_one_way() -> None:
    cluster = dataclasses.replace(probed(figure("send_recv", MIB, 4e-3), figure("send", MIB, 3e-3)), devices_per_node=1)
    one, two = layout(pp=2, pp_schedule="1f1b"), layout(pp=2, pp_schedule="1f1b", micro_batch_size=2)
    message = 2 * 2048 * LLAMA_1B.hidden_size
    hops = StepTimes(cluster).parts([one, two]).steps.hop_s
    assert hops.tolist() == pytest.approx([3e-3 * message / MIB, 3e-3 * 2 * message / MIB])


def test_gradients_that_are_reduced_once_a_step_end_it() -> None:
    """Their time on a slow network is all in `ends_s` with ZeRO 0, and one reduction of eight with ZeRO 2."""

    def times(rate: float, zero_stage: int) -> tuple[float, float]:
        ops = ("all_gather", "reduce_scatter", "all_reduce")
        cluster = probed(*(figure(op, size, size / rate) for op in ops for size in (1024, 256 * MIB)))
        steps = StepTimes(dataclasses.replace(cluster, devices_per_node=1))
        e = [layout(dp=2, zero_stage=zero_stage, micro_batch_size=1)]
        return float(steps.seconds(e)[0]), float(steps.ends_s(e)[0])

    (slow, slow_end), (fast, fast_end) = times(1e9, 0), times(2e9, 0)
    assert slow - fast == pytest.approx(slow_end - fast_end) and slow_end - fast_end > 1.0
    (slow, slow_end), (fast, fast_end) = times(1e9, 2), times(2e9, 2)
    assert slow_end - fast_end < (slow - fast) / 8
