"""Seconds of Muon's whole matrices, against sums written out, and the floor of `advise` below what is needed."""

from __future__ import annotations

import math

import pytest

from tests.workloads.costs.shapes import WIDE as MODEL
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.time.matrix_updates import LONE_S, SLOW_PASSES_S, matrix_update_s
from workloads.costs.time.timeline import estimate_time
from workloads.costs.traffic.collectives import collective_time_s
from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.experiment import Experiment

CLUSTER = ClusterSpec(
    name="here",
    backend="cuda",
    device=DeviceSpec(name="card", memory_bytes=80 * 2**30, memory_bandwidth=1e12, peak_flops={"bf16": 1e14}),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=1e11, latency_s=1e-6),
    inter_node=None,
    matmul_efficiency=0.5,
)


def of(**fields: object) -> Experiment:
    return Experiment.canonical(model=MODEL, seq_len=512, global_batch_size=8, optimizer="muon", **fields)


def alone(n: int, m: int) -> float:
    """Seconds of one matrix: five iterations of products, two bytes a number that they read or write, and the passes
    about them."""
    return SLOW_PASSES_S * n * m + 5 * ((4 * n * n * m + 2 * n**3) / 5e13 + 2 * (4 * n * m + 6 * n * n) / 1e12)


WIDE, SQUARE, NARROW = alone(512, 1536), alone(512, 512), alone(256, 512)


def seconds(e: Experiment) -> float:
    return matrix_update_s(e, experiment_stages(e)[0], CLUSTER)


def test_one_rank_orthogonalises_every_matrix() -> None:
    each_layer = 3 * WIDE + 2 * SQUARE + 2 * NARROW
    assert seconds(of()) == pytest.approx(8 * each_layer, rel=1e-12)


@pytest.mark.parametrize(("fields", "copies"), [({"zero_stage": 1}, 1), ({"zero_stage": 0}, 4)])
def test_four_ranks_share_them_and_send_a_matrix_each(fields: dict[str, int], copies: int) -> None:
    """24 of the largest matrices in 6 rounds, 16 square ones in 4, and as many narrow ones."""
    rounds = ((6, WIDE, 512 * 1536), (4, SQUARE, 512 * 512), (4, NARROW, 256 * 512))
    wanted = 0.0
    for number, work, elements in rounds:
        message = collective_time_s("all_to_all", 2 * elements, 4, 1, CLUSTER)
        wanted += number * (work + LONE_S + (1 + copies) * message)
    assert seconds(of(dp=4, **fields)) == pytest.approx(wanted, rel=1e-12)


def test_it_is_part_of_the_optimizers_time() -> None:
    plain, muon = (estimate_time(of(dp=4, zero_stage=1).replace(optimizer=name), CLUSTER) for name in ("sgd", "muon"))
    assert plain is not None and muon is not None
    assert muon.optimizer_s - plain.optimizer_s > seconds(of(dp=4, zero_stage=1))  # and more passes over memory
    assert muon.step_time_s - plain.step_time_s == pytest.approx(muon.optimizer_s - plain.optimizer_s, rel=1e-9)


def test_an_unknown_rate_is_not_guessed() -> None:
    assert math.isnan(seconds(of(precision="fp64")))
