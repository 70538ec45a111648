"""Bytes that a layer's routed experts save and need, tensor by tensor, as the engine's ops save them.

Symbols: T_e tokens whose copies a rank sends (with ``etp = 1`` its share of the tensor-parallel ranks' tokens, else all
of them); k copies of each; M copies received by the rank with most tokens; E experts of F columns, of which a rank has
E / ep with F / etp columns, in all X elements. T, T_s, c and h are those of `workloads.costs.memory.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from workloads.costs.memory.activations import STATISTICS_BYTES, rank_tokens
from workloads.costs.shape import fp8
from workloads.costs.shape.expert_loads import imbalance_of, sent_tokens, skewed_loads
from workloads.costs.shape.params import COMPUTE_BYTES
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import RoutedMLP

_INDEX_BYTES = 8
_COMPUTE_BYTES = 2
"""Bytes per element of bf16, the output dtype of fp8 products."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Bytes of one layer and one micro-batch on the rank with most tokens, shared experts excluded."""

    router: int
    """Router scores, ``4 T_s E``. With normalized weights also the unnormalized ones and their sum, ``4 T_s (k + 1)``;
    with scales of experts also the weights before them and the scales, ``8 T_s k``.
    With learned routing also the chosen experts, the permutation of the copies, and the gradient of the balance loss.
    """
    weights: int
    """Weights of the received copies: ``4 M``."""
    rows: int
    """Received copies, the input of the experts' first products: ``c M h``."""
    gate_up: int
    """Both SwiGLU inputs: ``2 c M F / etp``."""
    product: int
    """SwiGLU output: ``c M F / etp``."""
    sent: int
    """Rows to send: ``c T_e k h``. They are not saved."""
    parameters: int
    """The experts' weights in the compute dtype, with their biases: ``c X``."""
    down: int
    """Those of the second products, with their biases."""


def received_rows(e: Experiment) -> int:
    """M: copies that the rank with most tokens receives for its experts, in one layer and one micro-batch.

    Forced balanced routing gives every rank the mean (up to a few copies, by position). Skewed loads give the first
    rank most. Learned routing is assumed to be as uneven as ``routing_imbalance``. A capacity factor fixes the number.
    """
    moe = e.model.moe
    assert moe is not None
    sent = sent_tokens(e) * moe.experts_per_token
    if e.capacity_factor is not None:
        return moe.num_experts * ceil(e.capacity_factor * sent / moe.num_experts)
    imbalance = imbalance_of(e)
    if e.ep == 1 or imbalance is None:
        return sent
    share = sum(skewed_loads(moe.num_experts, imbalance)[: moe.num_experts // e.ep])
    return min(e.ep * sent, round(sent * e.ep * share))


def expert_tensors(e: Experiment, mlp: RoutedMLP, c: int) -> ExpertTensors:
    """Bytes of the tensors of one layer's routed experts. A gated expert has three matrices, an ungated one two."""
    stream, copies, received = rank_tokens(e)[1], mlp.chosen, received_rows(e)
    sent = sent_tokens(e) * copies
    router = STATISTICS_BYTES * stream * mlp.experts
    if mlp.normalize or mlp.score == "softmax_of_chosen":
        router += STATISTICS_BYTES * stream * (copies + 1)
    if mlp.router_scales:
        router += 2 * STATISTICS_BYTES * stream * copies
    if e.routing == "learned":
        router += _INDEX_BYTES * (stream * copies + 2 * sent + (2 * received if e.ep > 1 else 0))
        router += STATISTICS_BYTES * stream * mlp.experts if mlp.balance_loss else 0
    width, columns, inputs = mlp.latent or e.model.hidden_size, mlp.expert.width // e.etp, 2 if mlp.expert.gated else 1
    rows, held = c * received * width, c * (mlp.experts // e.ep)
    biased = 1 if mlp.expert.bias else 0
    down = held * (width * columns + biased * width // e.etp)
    return ExpertTensors(
        router=router,
        weights=STATISTICS_BYTES * received,
        rows=2 * rows if mlp.weights_inputs else rows,
        gate_up=inputs * c * received * columns,
        product=c * received * columns,
        sent=c * sent * width,
        parameters=held * inputs * columns * (width + biased) + down,
        down=down,
    )


def expert_working(
    e: Experiment, mlp: RoutedMLP, t: ExpertTensors, gathered: int, recomputed: int = 0, *, w: int, adds: bool = False
) -> int:
    """Bytes needed in addition to saved tensors and the stream's gradient while backward goes through the experts.
    ``recomputed``: bytes that the experts recompute, after the received gradients are sorted. ``w``: bytes that an
    element of a weight's gradient takes (`workloads.costs.memory.sizes.Shared.w_experts`). ``adds``: each weight's
    gradient is added to an earlier one of the same dtype as soon as it exists, and freed. The largest of

    1. the outputs' gradients by token (``gathered``, with etp > 1) and as they are sent and received;
    2. the received gradients in both orders, before anything is recomputed; then also the gradients of the product and
       of the down weights;
    3. the gradients of product and gate_up and of the down weights, when the product is free;
    4. the gradients of the received copies and of all weights, and of gate_up, when product and gate_up are free.

    In fp8 (one byte an element) also, while an input's gradient is computed,

    5. the received gradients twice, the transposed down weights, and the product's gradient;
    6. the gradient of gate_up twice, the other transposed weights, the gradients of the received copies and of the down
       weights, when product and gate_up are free.
    """
    matrices = 3 if mlp.expert.gated else 2
    c = COMPUTE_BYTES[e.precision]
    down, gradients = w * (t.down // c), w * (t.parameters // c)
    held = 0 if adds else down
    in_fp8: tuple[int, ...] = ()
    if fp8.is_low(e):
        transposed = t.down // _COMPUTE_BYTES
        in_fp8 = (
            t.rows + t.rows // _COMPUTE_BYTES + transposed + t.product,
            t.gate_up // _COMPUTE_BYTES + (matrices - 1) * transposed + t.rows + held - t.product,
        )
    received = (t.sent + t.rows, 2 * t.rows) if e.ep > 1 else ()
    products = (
        t.rows + t.product + down,
        t.gate_up + held,
        t.rows + gradients - down + held - t.product,
        *in_fp8,
    )
    return max(gathered + t.sent, *received, recomputed + max(products))


def first_half_working(e: Experiment, mlp: RoutedMLP, t: ExpertTensors, gathered: int, recomputed: int = 0) -> int:
    """As `expert_working`, in the input-gradient pass of a split backward: no weight has its gradient, and the
    gradients of the outputs and of gate_up, and the product, stay for the weight-gradient pass. The largest of 1 and 2
    there, and of

    3. the gradients of the outputs, of product and of gate_up;
    4. the gradients of the outputs and of the received copies, these then also as they are sent, when gate_up is free.

    In fp8 also the transposed weights while an input's gradient is computed.
    """
    received = max(t.sent + t.rows, 2 * t.rows) if e.ep > 1 else t.rows
    products = max(t.rows + t.product + t.gate_up, t.rows + received)
    if fp8.is_low(e):
        matrices, transposed = 3 if mlp.expert.gated else 2, t.down // _COMPUTE_BYTES
        of_outputs = t.rows + t.rows // _COMPUTE_BYTES + transposed + t.product
        of_inputs = 2 * t.rows + t.gate_up // _COMPUTE_BYTES + (matrices - 1) * transposed
        products = max(products, of_outputs, of_inputs)
    return max(gathered + t.sent, received, recomputed + products)


def second_forward_working(e: Experiment, mlp: RoutedMLP, t: ExpertTensors, beside: int) -> int:
    """As `expert_working`, at the end of the second forward of a layer that computes everything again, if nothing
    after its experts saves a tensor. The backward of their second products starts it, which holds the received
    gradients, and it stops when the outputs of the same products exist, which no backward needs: ``c M h`` each.
    In fp8 also their input in one byte an element. ``beside``: other tensors of the forward that no backward needs."""
    outputs = t.rows // 2 if mlp.weights_inputs else t.rows
    return beside + 2 * outputs + (t.product // _COMPUTE_BYTES if fp8.is_low(e) else 0)
