"""Bytes that a layer needs while the backward of its mixer runs, in addition to what it saves."""

from __future__ import annotations

from workloads.costs.memory.key_exchanges import exchanging_keys
from workloads.costs.memory.kind_layer import KindLayer, bytes_of, deferred_of
from workloads.costs.memory.recurrent_segments import segments_working
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import Batch, Kernels
from workloads.spec.recurrent_kernels import working as working_of


def mixer_working(one: KindLayer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved`` while a mixer's backward runs: all its tensors, saved or recomputed, exist with
    the gradients of its activations and of the stream, of the output projection and of the MLP before it, other than of
    routed experts. 0 for grouped-query attention before a dense MLP: its gradients are smaller than the tensors that
    the MLP has freed by then."""
    kind, s, t, mixer = one.kind, one.s, one.t, one.kind.mixer
    if mixer is None or (isinstance(mixer, Attention) and mixer.gate == "none" and isinstance(kind.mlp, DenseMLP)):
        return 0
    there = bytes_of(t.entry[:3] if kind.mlp is not None else t.entry) + bytes_of(t.mixer) + stream
    there += sum(tensor.bytes for tensor in t.mixer if tensor.gradient)
    if not isinstance(kind.mlp, DenseMLP) and "norm" in one.named:  # the normed input is made again later
        there -= s.own(s.hidden)
    if isinstance(mixer, Attention):
        there += exchanging_keys(mixer, s)
    if isinstance(mixer, LatentAttention):  # keys are whole then, and latents have no gradients yet
        there += s.split(mixer.heads * mixer.rope_dim) - t.mixer[0].bytes
    weights = [weight for weight in mixer.weights(s.hidden) if weight.name in ("o", "out")]
    there += one.w * sum(weight.parameters for weight in weights) // s.tp
    if isinstance(kind.mlp, RoutedMLP):
        shared = kind.mlp.shared
        of_shared = (3 if shared.gated else 2) * shared.width // s.tp if shared is not None else 0
        there += one.w * (of_shared + kind.mlp.experts) * s.hidden
    if isinstance(kind.mlp, DenseMLP):
        there += (3 if kind.mlp.gated else 2) * (one.w * kind.mlp.width // s.tp * s.hidden)
        if "norm" in one.named:
            norms = [tensor for tensor in t.all() if tensor.dropped_by == "norm"]
            there -= bytes_of(norms) - stream
    return there - saved


def ending_of(one: KindLayer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved``, and to the gradients of all weights, when a mixer's first product gets its
    gradient: the gradients of its outputs and of the stream, its input, and that of the layer. Far below 0 unless a
    micro-batch has few tokens."""
    if one.kind.mixer is None:
        return -saved
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    return gradients + 3 * stream - saved


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
    entry = one.t.entry[:3] if one.kind.mlp is not None else one.t.entry
    there = deferred_of(one) + 2 * gradients + bytes_of(tensor for tensor in entry if not tensor.feeds)
    return max(0, there - saved)


def recurrence_first(one: KindLayer, mixer: Kernels, stream: int, saved: int) -> int:
    """As `recurrence_working`, in the input-gradient pass of a split backward: beside it wait the operands of the MLP's
    weight gradients, and of the output projection's the input, whose gradient exists then."""
    entry = [tensor for tensor in one.t.entry if tensor.name.startswith("mixer: ")]
    inputs = bytes_of(tensor for tensor in (*entry, *one.t.mixer) if tensor.feeds)
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient and not tensor.feeds)
    of_stream = 0 if one.s.tp > 1 else one.s.own(one.s.hidden)  # the gradient of the output projection's output
    of_mlp = deferred_of(one) - inputs - gradients - of_stream
    output = one.t.mixer[-1].bytes
    return recurrence_working(one, mixer, stream, saved) + max(0, of_mlp) + output


def recurrence_working(one: KindLayer, mixer: Kernels, stream: int, saved: int) -> int:
    """As `mixer_working`, while a recurrence runs: in torch operations what a segment needs; in kernels what these need
    in place of the gradients of their inputs, which are made of it at the end."""
    s, ranks, batch = one.s, one.s.tp * one.e.cp, Batch(one.e.micro_batch_size, one.e.seq_len)
    if one.e.recurrence != "fla":
        return mixer_working(one, stream, saved) + segments_working(mixer, batch, ranks, s.c)
    of_kernels = working_of(mixer, batch, ranks)
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    return mixer_working(one, stream, saved) - gradients + of_kernels.backward
