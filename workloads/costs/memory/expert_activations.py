"""Bytes of what a layer's routed experts keep and need, tensor by tensor, as the engine's ops save them.

T_e tokens whose copies a rank sends (its share of the tensor-parallel ranks' with ``etp = 1``, else all of them), k
copies each; M copies that it receives, those of the rank with most tokens; T, T_s, c and h as in
`workloads.costs.memory.activations`; E experts of F columns, of which a rank has E / ep with F / etp columns: X
elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from workloads.costs.shape.expert_loads import imbalance_of, sent_tokens, skewed_loads
from workloads.spec.experiment import Experiment

_STATISTICS_BYTES = 4
_INDEX_BYTES = 8
_COMPUTE_BYTES = 2
"""Of bf16, that products in fp8 put out."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Bytes of one layer and one micro-batch on the rank with most tokens. Shared experts are not in here."""

    router: int
    """Scores, ``4 T_s E``, with normalized weights those before and their sum, ``4 T_s (k + 1)``; with learned routing
    the choice and the order of the copies that follows from it, and the slope of the balance term."""
    weights: int
    """Of the received copies: ``4 M``."""
    rows: int
    """The received copies, input of the experts' first products: ``c M h``."""
    gate_up: int
    """``2 c M F / etp``"""
    product: int
    """``c M F / etp``"""
    sent: int
    """Rows that are sent: ``c T_e k h``. Nothing keeps them."""
    parameters: int
    """The experts' weights in the compute dtype: ``c X``."""


def received_rows(e: Experiment) -> int:
    """M, copies that the rank with most tokens receives for its experts, of one layer and one micro-batch.

    Forced balanced routing gives every rank its mean (but for a few copies, by positions). Skewed loads give the first
    rank most. Learned routing is taken to be as uneven as ``routing_imbalance`` says. A capacity fixes the number.
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


def expert_tensors(e: Experiment, stream_tokens: int, c: int) -> ExpertTensors:
    """What the routed experts of one layer make. ``stream_tokens``: T_s, those that this rank's router scores."""
    model, moe = e.model, e.model.moe
    assert moe is not None
    copies, received = moe.experts_per_token, received_rows(e)
    sent = sent_tokens(e) * copies
    router = _STATISTICS_BYTES * stream_tokens * moe.num_experts
    if moe.normalize_weights:
        router += _STATISTICS_BYTES * stream_tokens * (copies + 1)
    if e.routing == "learned":
        router += _INDEX_BYTES * (stream_tokens * copies + 2 * sent + (2 * received if e.ep > 1 else 0))
        if moe.balance == "aux_loss":
            router += _STATISTICS_BYTES * stream_tokens * moe.num_experts
    columns = moe.expert_hidden_size // e.etp
    return ExpertTensors(
        router=router,
        weights=_STATISTICS_BYTES * received,
        rows=c * received * model.hidden_size,
        gate_up=2 * c * received * columns,
        product=c * received * columns,
        sent=c * sent * model.hidden_size,
        parameters=c * 3 * model.hidden_size * columns * (moe.num_experts // e.ep),
    )


def expert_working(e: Experiment, t: ExpertTensors, gathered: int, again: int = 0) -> int:
    """Needed beside what is saved, the gradient of the stream apart, while backward goes through the experts.
    ``again``: bytes of what the experts themselves make again, so that rows come before it. The largest of

    1. the outputs' gradients by token (``gathered``, with etp > 1) and as they are sent and received;
    2. the received ones in both orders, before anything is made again; then the product's gradient and the down
       weights' beside them;
    3. the gradients of product and gate_up and of the down weights, when the product is free;
    4. the gradients of the received copies and of all weights, and of gate_up, when product and gate_up are free.

    In fp8 (one byte an element) also, while an input's gradient is made,

    5. the received ones twice, the turned down weights, and the product's gradient;
    6. the gradient of gate_up twice, the other turned weights, the gradients of the received copies and of the down
       weights, when product and gate_up are free.
    """
    down = t.parameters // 3
    in_fp8: tuple[int, ...] = ()
    if e.precision.startswith("fp8"):
        turned = t.parameters // (3 * _COMPUTE_BYTES)
        in_fp8 = (
            t.rows + t.rows // _COMPUTE_BYTES + turned + t.product,
            t.gate_up // _COMPUTE_BYTES + 2 * turned + t.rows + down - t.product,
        )
    received = (t.sent + t.rows, 2 * t.rows) if e.ep > 1 else ()
    products = (
        t.rows + t.product + down,
        t.gate_up + down,
        t.rows + t.parameters - t.product,
        *in_fp8,
    )
    return max(gathered + t.sent, *received, again + max(products))
