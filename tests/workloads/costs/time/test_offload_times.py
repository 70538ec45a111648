"""Step times with activations on the host: what the link cannot hide behind a layer's work is added."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.host_activations import link_bytes, offloaded_of_chunks
from workloads.costs.time.layer_times import layer_times, rates_of
from workloads.costs.time.offload_times import (
    COPIES_BESIDE,
    SLOWED,
    SLOWED_IN_GRAPHS,
    LayerSeconds,
    added_by_offload,
    seconds_of_layers,
    waits_of,
    waits_of_chunks,
)
from workloads.costs.time.step_times import StepTimes
from workloads.costs.time.timeline import estimate_time, simulate_experiment
from workloads.spec.cluster import ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of

CLUSTER = ClusterSpec(
    name="here",
    backend="cuda",
    device=DeviceSpec(name="card", memory_bytes=141 * 2**30, memory_bandwidth=4e12, peak_flops={"bf16": 1e15}),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=4e11, latency_s=1e-6),
    inter_node=None,
    matmul_efficiency=0.7,
    host=HostSpec(link_bandwidth=50e9),
)


def linked(rate: float | None) -> ClusterSpec:
    return dataclasses.replace(CLUSTER, host=HostSpec(link_bandwidth=rate))


def case(**fields: Any) -> Experiment:
    usual: dict[str, Any] = {"model": LLAMA_8B, "global_batch_size": 8, "seq_len": 4096, "activation_offload": "all"}
    return Experiment.canonical(**{**usual, **fields})


@pytest.mark.parametrize(("cuda_graph", "slowed"), [("auto", SLOWED_IN_GRAPHS), ("none", SLOWED)])
def test_a_fast_link_adds_only_what_nothing_hides(cuda_graph: str, slowed: float) -> None:
    """The last layer before the head stays, so one rank is only slowed; a stage without the head also waits for the
    copy of its last layer."""
    rate, whole = 1e13, case(cuda_graph=cuda_graph)
    assert added_by_offload(whole, linked(rate)) == pytest.approx(slowed * link_bytes(whole) / rate)
    staged = case(pp=2, cuda_graph=cuda_graph)
    of_layers = offloaded_of_chunks(staged, 0)[0]
    waits = waits_of_chunks(staged, linked(rate))
    assert waits is not None
    down, up = slowed * sum(of_layers) / rate, (of_layers[0] + slowed * sum(of_layers[1:])) / rate
    assert waits[0][0] == (pytest.approx(down), pytest.approx(up))
    assert added_by_offload(staged, linked(rate)) == pytest.approx((8 + 1) * (down + up))


def test_copies_slow_what_is_beside_them() -> None:
    """By hand: 16 layers of 1 GB each at 50 GB/s, 20 ms down and 20 ms up, beside layers that take longer; then beside
    layers that are shorter, of 10 and 15 ms, in which copies take 7 % longer than alone."""
    layers = [LayerSeconds(0.05, 0.1, 0.0, 0.0, 1.0, 1.0)] * 16
    waits = waits_of(layers, [10**9] * 16, 50e9, 0.26)
    assert waits == (pytest.approx(16 * 0.0052), pytest.approx(0.02 + 15 * 0.0052))
    short = [LayerSeconds(0.01, 0.015, 0.0, 0.0, 1.0, 1.0)] * 16
    waits = waits_of(short, [10**9] * 16, 50e9, 0.05)
    assert waits == (pytest.approx(16 * 0.0114), pytest.approx(0.02 + 15 * 0.0064))


def test_copies_in_one_direction_have_its_rate() -> None:
    host = HostSpec(link_bandwidth=1e9, link_one_way_bandwidth=2e9)
    alone = waits_of_chunks(case(), dataclasses.replace(CLUSTER, host=host))
    assert alone == waits_of_chunks(case(), linked(2e9)) != waits_of_chunks(case(), linked(1e9))


def test_copies_hide_behind_gathers_and_reductions_that_take_longer() -> None:
    """By hand: layers of 20 and 40 ms beside 100 ms of gathers, forward, and 300 ms with reductions, backward, that
    slow nothing. Copies of 60 ms delay only compute, which waits anyway; the last layer's copy back has its gather."""
    layers = [LayerSeconds(0.02, 0.04, 0.1, 0.2, 0.0, 0.0)] * 4
    assert waits_of(layers, [3 * 10**9] * 4, 50e9, 0.26) == (0.0, 0.0)
    assert waits_of(layers, [6 * 10**9] * 4, 50e9, 0.26).backward_s == pytest.approx(0.02)


def test_copies_delay_compute_that_is_slower_than_its_traffic() -> None:
    """What a layer of 50 ms waits for copies of 20 ms is the same with gathers of 10 ms beside it and without; where
    gathers end 3 ms after compute, it is 3 ms less."""
    alone = waits_of([LayerSeconds(0.05, 0.1, 0.0, 0.0, 1.0, 1.0)] * 16, [10**9] * 16, 50e9, 0.26)
    beside = waits_of([LayerSeconds(0.05, 0.1, 0.01, 0.01, 1.0, 1.0)] * 16, [10**9] * 16, 50e9, 0.26)
    assert beside.forward_s == pytest.approx(alone.forward_s)
    assert beside.backward_s == pytest.approx(alone.backward_s - 0.01)  # the first gather
    later = waits_of([LayerSeconds(0.05, 0.1, 0.053, 0.0, 0.0, 0.0)] * 16, [10**9] * 16, 50e9, 0.26)
    assert later.forward_s == pytest.approx(alone.forward_s - 16 * 0.003)


def test_layers_have_the_traffic_of_every_micro_batch() -> None:
    """ZeRO 1 gathers and reduces once a step, ZeRO 2 reduces in every micro-batch, ZeRO 3 gathers too."""
    seconds = [seconds_of_layers(case(dp=8, zero_stage=zero), CLUSTER) for zero in (1, 2, 3)]
    of_layer = [found[0][0][0] for found in seconds if found is not None]
    assert [(one.gather_s > 0, one.reduce_s > 0) for one in of_layer] == [(False, False), (False, True), (True, True)]
    chunk = StepTimes(CLUSTER).parts([case(dp=8, zero_stage=3)]).times
    assert of_layer[2].gather_s == pytest.approx(float(chunk.gather_s[0]) / 32)


def test_a_slow_link_paces_the_step() -> None:
    e, slow = case(), 1e9
    added = added_by_offload(e, linked(slow))
    rates = rates_of(e, CLUSTER)
    assert rates is not None and added is not None
    one = layer_times(e, CLUSTER, rates, layers_of(e.model).kinds[0])
    beside = 8 * 31 * (one.forward_s + one.backward_s)  # 31 of 32 layers, 8 micro-batches
    assert added == pytest.approx(COPIES_BESIDE * link_bytes(e) / slow - beside)
    whole, plain = estimate_time(e, linked(slow)), estimate_time(e.replace(activation_offload="none"), CLUSTER)
    assert whole is not None and plain is not None
    assert whole.step_time_s == pytest.approx(plain.step_time_s + added)
    parts = whole.compute_s + whole.communication_s + whole.bubble_s + whole.optimizer_s
    assert parts == pytest.approx(whole.step_time_s)
    simulated = simulate_experiment(e, linked(slow))
    assert simulated is not None and simulated.step_s == pytest.approx(whole.step_time_s, rel=0.01)


def test_fewer_bytes_wait_less() -> None:
    slow = linked(5e9)
    each = [
        added_by_offload(case(activation_offload=words), slow) for words in ("attention", "attention+gate_up", "all")
    ]
    assert each == sorted(each, key=float) and len(set(each)) == 3


def test_an_unknown_rate_gives_no_time() -> None:
    assert added_by_offload(case(), linked(None)) is None
    assert estimate_time(case(), linked(None)) is None
    assert simulate_experiment(case(), linked(None)) is None
    assert added_by_offload(case(activation_offload="none"), linked(None)) == 0.0
