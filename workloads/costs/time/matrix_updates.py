"""Seconds that whole matrices add to an update: Newton-Schulz on their owners, and the messages to and from them.

The matrices of a stage are dealt to its ranks by rounds, those that take longest first
(`workloads.costs.shape.matrix_parts.rounds_of`). A round lasts as long as its first matrix: products at the rate of
large ones in the dtype of the directions, what they read and write at the rate of the device's memory, one exchange of
a matrix's size for every rank, and one more for each copy of it; experts that a shard holds whole are sent to other
copies alone. Rounds follow one another.

Products of these matrices have few FLOPs a byte (768 x 2,048: about 370), so that a kernel does not hide its memory
behind its FLOPs, and both are added. Four kernels about the products, whose operands are broadcast, transposed or
reduced, take longer than their bytes: `SLOW_PASSES_S`.

The only rank of a stage orthogonalises small matrices together (`workloads.costs.shape.matrix_parts.batches_of`), so
its kernels are few and large. On stages of several ranks each matrix is orthogonalised by itself, with about twenty
operations beside its messages, which are too small to use the whole device: `LONE_S`. Where such matrices are
thousands of experts and the step is not captured, the host may take longer to launch them than the device to compute
them. Files of clusters have no time of a launch, so this is left out, and the result may be too short.
"""

from __future__ import annotations

import math

from workloads.costs.shape.matrix_parts import newton_schulz_flops, newton_schulz_traffic
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.updates import RankMatrix, rank_matrices, shards_of, stage_ranks
from workloads.costs.traffic.collectives import collective_time_s
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.updates.optimizer import optimizer_of

SLOW_PASSES_S = 6.8e-12
"""Seconds of a matrix's element by which norms, divisions by them, additions to weights and copies of transposed
matrices take longer than their bytes: 6 layers of Qwen3-30B-A3B on one H200, 3.74 billion elements, 0.2410 s where the
sum of products and bytes is 0.2157 (results/recorded/h200x2_causes)."""
LONE_S = 70e-6
"""Seconds by which a matrix of its own takes longer than its products and bytes: 72 to 74 us for those of 64 experts of
768 x 2,048 on each of two H200, 60 us for 32 of 1,408 x 2,048 (results/recorded/h200_updates_captured_third)."""


def matrix_update_s(e: Experiment, held: StageParams, cluster: ClusterSpec) -> float:
    """Seconds of a rank that holds ``held``; 0 for an optimizer without whole matrices, NaN if the device has no known
    rate for its products."""
    kind = optimizer_of(e)
    if not kind.whole_matrices:
        return 0.0
    peak, memory = cluster.device.peak_of("fp64" if e.precision == "fp64" else "bf16"), cluster.device.memory_bandwidth
    if peak is None or memory is None or cluster.matmul_efficiency is None:
        return math.nan
    rate, ranks = peak * cluster.matmul_efficiency, stage_ranks(e)
    seconds = 0.0
    for one, rounds in rounds_by_shape(e, held):
        moved = kind.product_bytes * newton_schulz_traffic(one.whole_rows, one.whole_columns)
        seconds += rounds * (_flops(one) / rate + moved / memory + SLOW_PASSES_S * one.numel)
        if ranks > 1:
            seconds += rounds * LONE_S
            sizes = kind.product_bytes * one.numel, 0
            messages = (copies_of(e, one) - 1, 2) if _stays(e, one) else (1 + copies_of(e, one), 0)
            for size, number in zip(sizes, messages, strict=True):
                seconds += rounds * number * collective_time_s("all_to_all", size, ranks, 1, cluster)
    return seconds


def rounds_by_shape(e: Experiment, held: StageParams) -> list[tuple[RankMatrix, int]]:
    """Number of rounds that begin with a matrix of each shape."""
    found: list[tuple[RankMatrix, int]] = []
    for of_experts in (False, True):
        members = stage_ranks(e) // (e.ep if of_experts else 1)
        mine = [one for one in rank_matrices(e, held) if one.is_hidden and one.is_expert == of_experts]
        before = 0
        for one in sorted(mine, key=_flops, reverse=True):
            after = before + one.number
            found.append((one, math.ceil(after / members) - math.ceil(before / members)))
            before = after
    return found


def _stays(e: Experiment, one: RankMatrix) -> bool:
    """Whether owners hold their matrices whole, so that only other copies are sent any: experts, if shards hold some
    whole."""
    return one.is_expert and e.etp == 1 and one.together >= shards_of(e, one)


def copies_of(e: Experiment, one: RankMatrix) -> int:
    """Number of copies of a matrix on the ranks of a stage."""
    if one.is_expert:
        return expert_degrees(e)[0]
    return data_degrees(e)[0] * one.copies


def _flops(one: RankMatrix) -> int:
    return newton_schulz_flops(one.whole_rows, one.whole_columns)
