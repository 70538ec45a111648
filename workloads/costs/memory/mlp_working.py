"""Bytes that a layer needs in its dense MLP, or at the end of its forward, in addition to what it saves."""

from __future__ import annotations

from workloads.costs.memory.expert_activations import ExpertTensors
from workloads.costs.memory.kind_layer import KindLayer, bytes_of, freed_before_experts, is_again, parts_of
from workloads.costs.memory.kind_tensors import LATENT_SUM
from workloads.costs.shape import fp8
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP


def dense_working(one: KindLayer, mlp: DenseMLP, stream: int) -> int:
    """Bytes that the backward needs in the feed-forward half, where it peaks, without what is recomputed. It holds the
    gradients of the stream (``c T_s h``) and of the down weight (``w h F / tp``), and in turn

    1. the gathered stream (``c T h``, tp > 1) and the product's gradient;
    2. the gradient of gate_up, while the product's gradient takes the place of the product;
    3. the gradient of gate_up, its gathered input, the sum over ranks of the input's gradient, the normed stream if it
       is recomputed, and first the gradient of the gathered input, then that of the weight, with one rank both;
       product and gate_up are free.

    The largest of the three counts. In fp8 see `fp8.working_bytes`.
    """
    s, up, product, inputs = one.s, one.t.mlp[0].bytes, one.t.mlp[1].bytes, 2 if mlp.gated else 1
    if fp8.is_low(one.e):
        return _fp8_working(one, mlp, stream, first_half=False)
    down_weight = one.w * mlp.width // s.tp * s.hidden
    up_weight = down_weight * inputs
    later = one.gathered + max(one.gathered, up_weight) - product + (s.own(s.hidden) if s.tp == 1 else 0)
    if s.tp > 1 and not one.compiled:  # without sequence parallelism the input is saved, and the sum is as large as it
        later += s.own(s.hidden) * (one.e.sequence_parallel + ("norm" in one.named))
    return stream + down_weight + max(one.gathered + product, up, later)


def _fp8_working(one: KindLayer, mlp: DenseMLP, stream: int, *, first_half: bool) -> int:
    s, again, columns = one.s, "swiglu" in one.named, mlp.width // one.s.tp
    up = (2 if mlp.gated else 1) * columns
    return fp8.working_bytes(
        one.e, stream, s.tokens, columns, up, s.c, recomputes_product=again, w=one.w, first_half=first_half
    )


def first_half_of(one: KindLayer, stream: int) -> int:
    """Bytes that a dense layer needs in the input-gradient pass of a split backward, without its recomputed product:
    the product is kept for the weight-gradient pass, as are the gradients of the output and of gate_up, and no weight
    has a gradient. The larger of two moments: the activation, and with tp > 1 the sum over ranks of the input's
    gradient, beside the gathered input and one that is recomputed. In fp8 see `fp8.working_bytes`."""
    s, mlp = one.s, one.kind.mlp
    if not isinstance(mlp, DenseMLP):
        return 0
    normed_output = one.kind.norms > 2 or one.kind.outputs_normed  # whose backward is done by then
    freed = s.own(s.hidden) + s.statistics() if normed_output else 0
    if fp8.is_low(one.e):
        return _fp8_working(one, mlp, stream, first_half=True) - freed
    normed = s.own(s.hidden) if "norm" in one.named and one.recompute != "full" else 0
    of_input = 2 * one.gathered + s.own(s.hidden) + normed if s.tp > 1 else 0
    freed = freed if s.tp > 1 else 0  # with one rank the gradient of the norm's input takes its place
    return stream + one.gathered + max(one.t.mlp[0].bytes + one.t.mlp[1].bytes, of_input) - freed


def first_half_after_experts(one: KindLayer, mlp: RoutedMLP, x: ExpertTensors) -> int:
    """Bytes of the input-gradient pass of a split backward after that of the routed experts, where their gradients of
    outputs and of gate_up stay, and so do a product and a normed stream that are recomputed. The larger of two moments:

    1. the activation of shared experts, beside the gradients of the rows to send, which are summed by token later: the
       gradients of their product and of gate_up;
    2. the sum of two gradients of the MLP's input.
    """
    s, shared, selective = one.s, mlp.shared, one.recompute != "full"
    product = 0 if shared is None else s.split(shared.width)
    stays = one.gathered + (x.rows // 2 if mlp.weights_inputs else x.rows)
    stays += product if "swiglu" in one.named and selective else 0
    normed = s.own(s.hidden) if "norm" in one.named and selective else 0
    beside = 0 if shared is None else x.sent + (3 if shared.gated else 2) * product
    return stays + max(beside, normed + s.own(mlp.latent) + 3 * s.own(s.hidden))


def forward_of(one: KindLayer) -> int:
    """Bytes in addition to saved ones at the end of a layer's forward, while the last product of the MLP runs: its
    outputs, with tp > 1 as partial sums and as their sum, those of shared experts, and what the backward recomputes of
    the MLP. With full recomputation the tensors of the mixer are free by then, but for the residual stream. When the
    MLP's output is added to the stream, both exist, and nothing of the MLP but what is saved. A norm of the output has
    saved it. In a layer without an MLP the same of the mixer."""
    s, x, mlp, named = one.s, one.x, one.kind.mlp, one.named
    full, own = one.recompute == "full", s.own(s.hidden)
    beside = own if full or ("norm" in named and not one.kind.outputs_normed) else 0
    normed = not full and one.kind.norms_outputs
    if mlp is None:
        again = bytes_of(tensor for tensor in one.t.mixer if full or tensor.dropped_by in named)
        return max(beside + again + one.gathered + (0 if normed else own), 2 * own)
    if full and one.kind.mixer is not None:
        beside += own
    if isinstance(mlp, RoutedMLP) and x is not None:
        outputs = x.rows // 2 if mlp.weights_inputs else x.rows
        again = x.product if full or "swiglu" in named or "experts" in named else 0
        again += x.gate_up if full or "experts" in named else 0
        again += x.router + x.weights + x.rows if full else 0
        if one.kind.normed_beside:  # norms save both outputs, and later their sum; what was sent is there
            return beside + outputs + again - (0 if full else 3 * s.statistics())
        return beside + outputs + again + (own if mlp.shared is not None else 0)
    again = s.split(mlp.width) if isinstance(mlp, DenseMLP) and (full or "swiglu" in named) else 0
    again += one.t.mlp[0].bytes if full else 0
    return max(beside + again + one.gathered + (0 if normed else own), 2 * own)


def experts_again(one: KindLayer, stream: int) -> int:
    """Bytes in addition to saved ones when routed experts that are recomputed with the whole layer have their outputs
    again, which a norm or the projection out of a latent reads: all tensors of the layer before them, the outputs, the
    normed stream that was sent, if that is another one than the shared experts', and the stream's gradient. 0 for other
    layers, whose second forward ends before it has the outputs."""
    s, x, mlp = one.s, one.x, one.kind.mlp
    if x is None or not isinstance(mlp, RoutedMLP) or one.recompute != "full" or not one.saves_after_experts:
        return 0
    later = sum(tensor.bytes for tensor in one.t.mlp if tensor.name == LATENT_SUM)
    beside = 0
    if one.kind.normed_beside:  # what was sent, less inputs and statistics of later norms
        beside = -s.own(s.hidden) - 3 * s.statistics()
    total = bytes_of(one.t.all()) + x.router + x.weights + x.rows + x.gate_up + x.product
    outputs = x.rows // 2 if mlp.weights_inputs else x.rows
    return stream + total - sum(parts_of(one, ()).values()) - later + beside + outputs


def rest_after_experts(one: KindLayer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved`` in the backward of a layer's MLP after that of its routed experts and beside their
    gradients; 0 without routed experts. The tensors of the layer before its MLP exist and the gradient of the stream.
    The largest of four moments, the first three beside the gradient of what was sent:

    1. the second product of shared experts: the gathered gradient of its output, the product and its gradient, and
       gate_up;
    2. their activation: gate_up, its gradient, and that of the product;
    3. with tp > 1 their first product: its input, which is made again, gathered, the gradient of that as a partial sum
       and as its sum, and the gradient of gate_up;
    4. the end: two gradients of the input and their sum, and the gradients of all weights but of the last product's,
       into a latent.
    """
    s, x, mlp, full = one.s, one.x, one.kind.mlp, one.recompute == "full"
    if x is None or not isinstance(mlp, RoutedMLP):
        return 0
    there = bytes_of(tensor for tensor in (*one.t.entry, *one.t.mixer) if full or not is_again(one, tensor))
    there += stream
    normed = s.own(s.hidden) if "norm" in one.named and not full else 0
    width = 0 if mlp.shared is None else mlp.shared.width
    inputs = 2 if mlp.shared is not None and mlp.shared.gated else 1
    before = one.w * (mlp.latent + width // s.tp) * s.hidden  # of the projection out of a latent, of shared down
    first = one.w * (mlp.experts + inputs * width // s.tp) * s.hidden
    # The gradient of shared experts' output; without norms between it is the stream's.
    waits = s.own(s.hidden) if one.kind.normed_beside else 0
    of_shared, end = 0, normed + 3 * s.own(s.hidden) + s.own(mlp.latent) + first
    if width:
        of_shared = max(waits + one.gathered + (inputs + 2) * s.split(width), (2 * inputs + 1) * s.split(width))
        if s.tp > 1:
            of_shared = max(of_shared, normed + 2 * one.gathered + s.own(s.hidden) + inputs * s.split(width))
        of_shared += x.sent
    return there + before + max(of_shared, end) - waits - freed_before_experts(one) - saved
