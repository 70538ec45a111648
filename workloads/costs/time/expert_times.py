"""Seconds that the routed experts of one layer take on the rank with most tokens, as a part of the step time.

Symbols are those of `workloads.costs.memory.expert_activations`. Products of rows with expert weights run at the rate
of other matrix products, as if each expert had one more tile of rows (`TILE`), but no faster than their weights are
read; in fp8 this holds for the forward and for input gradients (`workloads.costs.shape.fp8`). Moving rows is
memory-bound: expanding tokens to copies (read and write), sorting them by expert and back (ep > 1), and summing the
copies on the tokens' rank. The dispatch all-to-all (GShard,
arXiv:2006.16668) overlaps with the shared experts; the combine all-to-all and the exchange of routing weights do not
overlap.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import STATISTICS_BYTES, rank_tokens
from workloads.costs.memory.expert_activations import expert_tensors
from workloads.costs.shape import fp8
from workloads.costs.shape.expert_loads import sent_tokens
from workloads.costs.shape.params import COMPUTE_BYTES
from workloads.costs.time.rank_times import Rates
from workloads.costs.traffic.collectives import collective_time_s
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP

TILE = 128
"""Rows of a tile of grouped products. An expert's last tile is half empty on average, and its first one waits for its
operands while no other computes: together about one tile, which is seconds only where experts have few rows. 262
recorded device-bound rows of seven mixtures on H200, with 64 to 8,192 rows an expert, are so predicted 1 % too short in
the mean, without it 4 %."""


def passed_bytes(expert: DenseMLP, columns: int, outputs: int) -> tuple[int, int, int, int]:
    """Bytes for one row of an expert in 16 bits: of its activation, forward and backward, and of its biases, forward
    and backward.

    The activation is one kernel a pass: each of an expert's matrices has columns that it reads or writes. The first
    bias is added in place, and its gradient sums what it reads; the second does the same, and its backward reads the
    gradient once more for that of the row's weight. The rows of biases stay in caches. ``columns``: of an expert's
    product on one rank, ``outputs``: of its second product.
    """
    matrices = 3 if expert.gated else 2
    activation = 2 * matrices * columns, 4 * matrices * columns
    if not expert.bias:
        return *activation, 0, 0
    first = columns * (matrices - 1)
    return *activation, 4 * (first + outputs), 2 * first + 4 * outputs


def in_fp32(e: Experiment, mlp: RoutedMLP) -> bool:
    """Whether experts are computed in fp32 although the precision has 16 bits.

    transformers casts the rows to what the weights are in, which autocast leaves in fp32 and FSDP does not
    (`workloads.adapters.transformers_accelerate`; findings/transformers_experts_in_fp32_under_autocast.sh). Its
    Llama 4, whose router weights the inputs of experts, multiplies in batches, which autocast knows.
    """
    return e.engine == "transformers" and e.zero_stage == 0 and e.precision == "bf16" and not mlp.weights_inputs


def _slower_in_fp32(e: Experiment, cluster: ClusterSpec) -> float:
    """Seconds of a product in fp32 over those in the precision; 1 if the device's rate in fp32 is not known."""
    low, high = cluster.device.peak_of(e.precision), cluster.device.peak_of("fp32")
    return low / high if low is not None and high is not None else 1.0


class ExpertTimes(NamedTuple):
    """Seconds of one layer and one micro-batch. Backward moves as many rows as forward."""

    forward_s: float
    """Matrix products of the forward; in fp8 with the casts before them."""
    inputs_s: float
    """Matrix products of the input gradients; in fp8 with the casts before them."""
    weights_s: float
    """Matrix products of the weight gradients, always in bf16."""
    permute_s: float
    """Permuting rows inside the rank."""
    activation_s: float
    """Activation of the experts, forward."""
    activation_back_s: float
    biases_s: float
    """Biases of the experts, forward."""
    biases_back_s: float
    dispatch_s: float
    """Exposed dispatch of copies and their weights to the experts."""
    combine_s: float
    """Exposed combine: outputs sent back."""

    @classmethod
    def of(cls, e: Experiment, cluster: ClusterSpec, rates: Rates, mlp: RoutedMLP) -> ExpertTimes:
        """Times of the routed experts of a layer of ``e``."""
        c, width, matrices = COMPUTE_BYTES[e.precision], mlp.latent or e.model.hidden_size, 3 if mlp.expert.gated else 2
        x, shared = expert_tensors(e, mlp, c), 0
        if mlp.shared is not None:  # elements of its weights
            shared = (3 if mlp.shared.gated else 2) * e.model.hidden_size * mlp.shared.width
        tiles = 1 + TILE * (mlp.experts // e.ep) / max(1, x.rows // (c * width))
        products = 2.0 * (x.product // c) * matrices * width * tiles / rates.head
        if in_fp32(e, mlp):
            products *= _slower_in_fp32(e, cluster)
        share, casts = 1.0, (0.0, 0.0)
        if fp8.is_low(e):
            share = rates.head / rates.matmul / fp8.grouped_rate(mlp.expert.width // e.etp)
            casts = fp8.grouped_cast_traffic(x.parameters // c, (x.rows + x.product) // c, (x.rows + x.gate_up) // c)
        read = fp8.gathered_bytes(e, c, of_experts=True) * (x.parameters // c) / rates.memory
        summed = c * sent_tokens(e) * width
        rows = 3.0 * x.sent + summed + (4.0 * x.rows if e.ep > 1 else 0.0)
        shared_flops = 2.0 * rank_tokens(e)[0] * shared
        # The busiest rank receives more than it sends in the dispatch, and sends more in the combine.
        rows_s = collective_time_s("all_to_all", float(max(x.sent, x.rows)), e.ep, e.etp, cluster)
        weights_s = collective_time_s("all_to_all", float(x.weights), e.ep, e.etp, cluster)
        received = x.weights // STATISTICS_BYTES * c / 2
        passes = passed_bytes(mlp.expert, mlp.expert.width // e.etp, width)
        times = [received * one / rates.memory for one in passes]
        return cls(
            forward_s=max(products * share, read) + casts[0] / rates.memory,
            inputs_s=max(products * share, read) + casts[1] / rates.memory,
            weights_s=max(products, x.parameters / rates.memory),
            permute_s=rows / rates.memory,
            activation_s=times[0],
            activation_back_s=times[1],
            biases_s=times[2],
            biases_back_s=times[3],
            dispatch_s=max(0.0, rows_s - shared_flops / e.tp / rates.matmul) + weights_s,
            combine_s=rows_s,
        )


NO_EXPERTS = ExpertTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
