"""Bytes that a layer needs while the backward of its mixer runs, in addition to what it saves."""

from __future__ import annotations

from workloads.costs.memory.key_exchanges import exchanging_keys
from workloads.costs.memory.kind_layer import KindLayer, bytes_of, deferred_of
from workloads.costs.memory.kind_tensors import Tensor
from workloads.costs.memory.recurrent_segments import segments_working
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import Batch, Kernels
from workloads.spec.recurrent_kernels import working as working_of

ROW_BLOCK = 1_048_576
"""Elements that torch operations work on at a time (``BLOCK_ELEMENTS`` of `workloads.engine.ops.backend`)."""
_WIDE = 4
"""Bytes of a number in fp32."""


def mixer_working(one: KindLayer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved`` while a mixer's backward runs: all its tensors, saved or recomputed, exist with
    the gradients of its activations and of the stream, of the output projection and of the MLP before it, other than of
    routed experts. 0 for grouped-query attention before a dense MLP: its gradients are smaller than the tensors that
    the MLP has freed by then, other than of a norm over all heads."""
    kind, mixer = one.kind, one.kind.mixer
    if isinstance(mixer, Attention) and mixer.norm == "all_heads" and one.s.tp > 1:
        norm = _norm_of_all_heads(one, mixer, stream) + _of_weights(one)
        return max(_all_of_mixer(one, stream), norm) - saved
    if mixer is None or (isinstance(mixer, Attention) and mixer.gate == "none" and isinstance(kind.mlp, DenseMLP)):
        return 0
    return _all_of_mixer(one, stream) - saved


def _all_of_mixer(one: KindLayer, stream: int) -> int:
    """Bytes of a mixer's tensors and gradients while its backward runs, of the gradient of the stream, and of weights'
    gradients until then."""
    kind, s, t, mixer = one.kind, one.s, one.t, one.kind.mixer
    assert mixer is not None
    there = bytes_of(_before_mixer(one)) + bytes_of(t.mixer) + stream
    there += sum(tensor.bytes for tensor in t.mixer if tensor.gradient)
    if not isinstance(kind.mlp, DenseMLP) and "norm" in one.named:  # the normed input is made again later
        there -= s.own(s.hidden)
    if isinstance(mixer, Attention):
        there += exchanging_keys(mixer, s)
        if mixer.value_scale != 1.0:  # copies of the output and of its gradient, scaled
            there += 2 * s.split(mixer.heads * mixer.value_dim)
    if isinstance(mixer, LatentAttention):  # keys are whole then, and latents have no gradients yet
        there += s.split(mixer.heads * mixer.rope_dim) - t.mixer[0].bytes
    if isinstance(kind.mlp, DenseMLP) and "norm" in one.named:
        norms = [tensor for tensor in t.all() if tensor.dropped_by == "norm"]
        there -= bytes_of(norms) - stream
    return there + _of_weights(one)


def _of_weights(one: KindLayer) -> int:
    """Bytes of the gradients of the output projection and of the MLP, without routed experts, beside sums."""
    s, mixer, mlp = one.s, one.kind.mixer, one.kind.mlp
    assert mixer is not None
    weights = [weight for weight in mixer.weights(s.hidden) if weight.name in ("o", "out")]
    there = one.w * sum(weight.parameters for weight in weights) // s.tp
    if isinstance(mlp, RoutedMLP):
        shared = mlp.shared
        of_shared = (3 if shared.gated else 2) * shared.width // s.tp if shared is not None else 0
        there += one.w * (of_shared + mlp.experts) * s.hidden
    if isinstance(mlp, DenseMLP):
        there += (3 if mlp.gated else 2) * (one.w * mlp.width // s.tp * s.hidden)
    return there


def _before_mixer(one: KindLayer) -> list[Tensor]:
    """Tensors of the layer's entry that exist until the mixer's backward is done."""
    names = [tensor.name for tensor in one.t.entry]
    count = names.index("residual") if "residual" in names else len(names)
    return [tensor for tensor in one.t.entry[:count] if "of outputs" not in tensor.name]


def ending_of(one: KindLayer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved``, and to the gradients of all weights, when a mixer's first product gets its
    gradient: the gradients of its outputs and of the stream, its input, with tp > 1 gathered too, and that of the
    layer. Far below 0 unless a micro-batch has few tokens. Before attention's first weight has its gradient, that of
    the gathered input exists as a partial sum."""
    mixer = one.kind.mixer
    if mixer is None:
        return -saved
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    partial = 0
    if isinstance(mixer, Attention):
        first = sum(weight.parameters for weight in mixer.weights(one.s.hidden) if weight.name != "o") // one.s.tp
        partial = max(0, one.gathered - one.w * first)
    return gradients + 3 * stream + one.gathered + partial - saved


def exchanging_heads(one: KindLayer) -> int:
    """Bytes in addition to `mixer_working` while a recurrent layer's backward exchanges heads for tokens: gradients of
    the output, or of the inputs, exist three times (as they are, sent and received), those of the inputs without what
    the layer saved."""
    mixer = one.kind.mixer
    if one.e.cp == 1 or not isinstance(mixer, GatedDeltaRule | KimiDelta | Mamba2):
        return 0
    along = mixer.context_parallel
    inputs, outputs = one.s.split(along.inputs), one.s.split(along.outputs)
    return max(0, inputs - outputs, 2 * outputs - inputs)


def exchanging_first(one: KindLayer, saved: int) -> int:
    """Bytes in addition to ``saved`` in the input-gradient pass of a split backward while a recurrent layer exchanges
    heads for tokens: all that waits for the weight-gradient pass (the gradient of the stream is part of it), two more
    copies of the gradients of the inputs, and the layer's input. 0 for other layers."""
    if exchanging_heads(one) == 0:
        return 0
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    there = deferred_of(one) + 2 * gradients + bytes_of(tensor for tensor in _before_mixer(one) if not tensor.feeds)
    return max(0, there - saved)


def mixing_first(one: KindLayer, stream: int, saved: int) -> int:
    """As `mixer_working`, in the input-gradient pass of a split backward, in which no weight has a gradient: beside the
    mixer waits what the weight-gradient pass needs of the MLP and, with tp > 1, of the output projection. With tp > 1
    it may be highest at its end: all that waits, the gradient of the gathered input as a partial sum and as its sum,
    that of the stream, and the layer's input. ``saved`` as there."""
    one, mixer = one._replace(w=0), one.kind.mixer
    if mixer is None:
        return -saved
    inputs = bytes_of(tensor for tensor in (*_before_mixer(one), *one.t.mixer) if tensor.feeds)
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient and not tensor.feeds)
    of_stream = 0 if one.s.tp > 1 else one.s.own(one.s.hidden)  # the gradient of the output projection's output
    deferred = deferred_of(one)
    waits = max(0, deferred - inputs - gradients - of_stream)
    end = deferred + one.gathered + 2 * one.s.own(one.s.hidden) + stream - saved if one.s.tp > 1 else -saved
    if isinstance(mixer, GatedDeltaRule | KimiDelta | Mamba2):
        of_output = one.t.mixer[-1].bytes
        there = waits + of_output + recurrence_working(one, mixer, stream, saved)
        return max(there, end, exchanging_first(one, saved))
    there = waits + _all_of_mixer(one, stream) - saved
    if isinstance(mixer, Attention) and mixer.norm == "all_heads" and one.s.tp > 1:
        output = one.t.mixer[-1].bytes  # waits for the output projection's weight gradient
        there = max(there, waits + output + _norm_of_all_heads(one, mixer, stream) - saved)
    return max(there, end)


def _norm_of_all_heads(one: KindLayer, mixer: Attention, stream: int) -> int:
    """Bytes while the backward of a norm over all heads runs, which tensor-parallel ranks compute in torch operations:
    its inputs, gradients of its outputs and of its inputs, and of a block of rows five numbers in fp32 for each
    query."""
    s, columns = one.s, mixer.heads * mixer.head_dim
    there = bytes_of(_before_mixer(one)) + stream + s.split(columns)
    there += sum(2 * tensor.bytes for tensor in one.t.mixer if tensor.name == "projected")
    if "norm" in one.named and one.recompute != "full" and not one.kind.outputs_normed:
        there -= s.own(s.hidden)  # the normed input is made again later
    rows = min(s.tokens, max(1, ROW_BLOCK // (columns // s.tp)))
    return there + 5 * max(s.c, _WIDE) * rows * columns // s.tp


def recurrence_working(one: KindLayer, mixer: Kernels, stream: int, saved: int) -> int:
    """As `mixer_working`, while a recurrence runs: in torch operations what a segment needs; in kernels what these need
    in place of the gradients of their inputs, which are made of it at the end."""
    s, ranks, batch = one.s, one.s.tp * one.e.cp, Batch(one.e.micro_batch_size, one.e.seq_len)
    if one.e.recurrence != "fla":
        return mixer_working(one, stream, saved) + segments_working(mixer, batch, ranks, s.c)
    of_kernels = working_of(mixer, batch, ranks)
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    return mixer_working(one, stream, saved) - gradients + of_kernels.backward
