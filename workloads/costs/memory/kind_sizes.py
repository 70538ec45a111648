"""Bytes that one layer of a kind saves and needs while its backward runs, from its tensors by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from workloads.costs.memory.expert_activations import (
    ExpertTensors,
    expert_tensors,
    expert_working,
    first_half_working,
    second_forward_working,
)
from workloads.costs.memory.key_exchanges import exchanging_keys
from workloads.costs.memory.kind_tensors import ALWAYS, LATENT_SUM, KindTensors, Sizes, Tensor, kind_tensors
from workloads.costs.shape import fp8
from workloads.spec.activations.offload import offloaded_words
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recomputation import operations_of
from workloads.spec.recurrent_kernels import Batch, Kernels
from workloads.spec.recurrent_kernels import working as working_of

_MADE_AGAIN = ("residual", "norm of heads: statistics", "rotated", "queries", "whole keys", "rotated key", "product")
"""What compiled blocks with tensor parallelism make again beside normed streams, as measured in a run of
h100x2_validation_gradients."""


class KindBytes(NamedTuple):
    """Bytes of one layer of a kind, one micro-batch, one rank."""

    saved: int
    """Held from forward to backward, on the device or, of it, ``offloaded`` on the host."""
    working: int
    """Needed in addition while its backward runs."""
    ending: int
    """Needed in addition at its end, beside the gradients of all its weights; negative where less is held than was
    saved."""
    forward: int
    """Needed in addition at the end of its forward."""
    arriving: int
    """Needed in addition when the backward of routed experts begins: the gradients of their outputs and of
    the stream; 0 without experts, or if all is recomputed."""
    deferred: int
    """Held between the passes of a split backward."""
    reducing: int
    """Needed in addition to ``saved`` while the experts' gradients are reduced."""
    first_half: int
    """Extra working bytes in the input-gradient pass of a split backward."""
    exchanging: int
    """Working bytes in that pass while a recurrent layer exchanges heads for tokens; 0 for other layers."""
    offloaded: int
    """Held on the host until the layer's backward begins."""
    offloaded_input: int
    """The layer's input, part of ``offloaded``."""


class _Layer(NamedTuple):
    """A layer of a kind with its tensors."""

    e: Experiment
    kind: Layer
    w: int
    """Bytes that an element of a dense weight's gradient takes while the backward runs."""
    recompute: str
    """The word of ``recompute`` that counts for this layer."""
    s: Sizes
    t: KindTensors
    x: ExpertTensors | None

    @classmethod
    def of(cls, e: Experiment, kind: Layer, c: int, w: int, *, recomputed: bool) -> _Layer:
        s = Sizes.of(e, c)
        x = expert_tensors(e, kind.mlp, c) if isinstance(kind.mlp, RoutedMLP) else None
        recompute = e.recompute if recomputed else "none"
        return cls(e, kind, w, recompute, s, kind_tensors(kind, s, e.model.streams), x)

    @property
    def named(self) -> tuple[str, ...]:
        return operations_of(self.recompute)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Words of what waits on the host."""
        return offloaded_words(self.e.activation_offload, self.recompute)

    @property
    def gathered(self) -> int:
        """Bytes of the stream of all tensor-parallel ranks; 0 with one."""
        return self.s.c * self.s.tokens * self.s.hidden if self.s.tp > 1 else 0

    @property
    def kept(self) -> int:
        """Extra bytes of one of two inputs of column-parallel layers, which a compiled block saves gathered."""
        wider = self.s.tp > 1 and self.e.sequence_parallel and self.compiled and not self.named
        return self.gathered - self.s.own(self.s.hidden) if wider else 0

    @property
    def compiled(self) -> bool:
        """Whether it is compiled as one block. Compilation is assumed to change nothing in layers with experts; modules
        of multi-token prediction are not compiled."""
        alike = not self.kind.routed and not self.kind.ahead
        return alike and self.e.compiles(routed=False, recomputed=self.recompute != "none")

    @property
    def saves_after_experts(self) -> bool:
        """Whether norms of outputs or the projection of latents save what routed experts return."""
        of_outputs = self.kind.outputs_normed or self.kind.norms > (1 if self.kind.mixer is None else 2)
        return of_outputs or (isinstance(self.kind.mlp, RoutedMLP) and self.kind.mlp.latent > 0)

    @property
    def compiled_again(self) -> bool:
        """Whether a compiled block chooses what it makes again."""
        return len(self.named) > 0 and self.compiled and self.s.tp > 1


def kind_bytes(
    e: Experiment,
    kind: Layer,
    c: int,
    *,
    recomputed: bool,
    w: int | None = None,
    w_experts: int | None = None,
    experts_add: bool = False,
) -> KindBytes:
    """``recomputed``: whether the policy of ``e`` applies to this layer. ``w``: bytes that an element of a dense
    weight's gradient takes while the layer's backward runs, in place of c where products add to sums (`Shared.w`).
    ``w_experts``: the same of routed experts. ``experts_add``: ``adds`` of `expert_working`.

    Saved bytes by ``recompute`` (arXiv:2205.05198, section 5, for selective recomputation):

    none       all of `kind_tensors`, as in every layer that is not recomputed. A compiled block saves the inputs of its
               two column-parallel layers gathered; an eager block saves this rank's part.
    selective  all but the recomputed tensors: normed inputs (norm statistics stay), rotated queries and keys, and the
               product. If operations are named (norm, rope, swiglu), only those are recomputed; ``experts`` also
               recomputes gate_up and product of routed experts. In a compiled block with tp > 1 the residual after
               attention is recomputed too, and the outputs of the two row-parallel layers and their partial sums (full
               T) stay until they are used.
    full       the block input.
    """
    one = _Layer.of(e, kind, c, c if w is None else w, recomputed=recomputed)
    of_experts = c if w_experts is None else w_experts
    s, t, x = one.s, one.t, one.x
    saved, stream = sum(_parts(one, ()).values()), e.model.streams * s.own(s.hidden)
    total = _sum(t.all()) + (0 if x is None else x.router + x.weights + x.rows + x.gate_up + x.product)
    again, working, in_first_half = total + 2 * one.kept - saved, 0, 0
    if isinstance(kind.mlp, RoutedMLP) and x is not None:
        gathered = s.c * s.tokens * (kind.mlp.latent or s.hidden) if e.etp > 1 else 0
        if one.recompute == "full":
            working = expert_working(e, kind.mlp, x, gathered, w=of_experts, adds=experts_add)
            if not one.saves_after_experts:
                shared = s.own(s.hidden) if kind.mlp.shared is not None else 0
                working = max(working, second_forward_working(e, kind.mlp, x, gathered + shared))
            working += again
            in_first_half = again + first_half_working(e, kind.mlp, x, gathered)
        else:
            again = x.gate_up + x.product if "experts" in one.named else x.product if "swiglu" in one.named else 0
            working = expert_working(e, kind.mlp, x, gathered, again, w=of_experts, adds=experts_add)
            in_first_half = first_half_working(e, kind.mlp, x, gathered, again)
        working += stream - _freed_before_experts(one)
        in_first_half += stream - _freed_before_experts(one)
    elif isinstance(kind.mlp, DenseMLP):
        if one.recompute != "full" and not one.compiled_again:
            again = t.mlp[1].bytes if "swiglu" in one.named and not fp8.is_low(e) else 0
        working = again + _dense_working(one, kind.mlp, stream)
        if kind.norms > 2 or kind.outputs_normed:  # the backward of the output's norm is done by then
            working -= s.own(s.hidden) + s.statistics()
    if kind.mixer is not None and not one.compiled_again:
        working = max(working, _mixer_working(one, stream, min(saved, total)) + _exchanging(one))
    if isinstance(kind.mixer, GatedDeltaRule | KimiDelta | Mamba2) and e.recurrence == "fla":
        working = max(working, _kernels_working(one, kind.mixer, stream, min(saved, total)))
    if kind.ahead:
        working += s.own(s.hidden) * e.model.mtp_modules  # gradients that the head has made of other hidden states
    reducing = 0 if x is None else again + stream - _freed_before_experts(one) - x.weights - x.gate_up - x.product
    offloaded = one.offloaded
    of_host = saved - sum(_parts(one, offloaded).values())
    of_input = t.entry[0].bytes if "input" in offloaded else 0
    exchanging = _exchanging_first(one, min(saved, total))
    first_half, ending = max(_first_half(one), in_first_half - working), _ending(one, stream, min(saved, total))
    forward, deferred = _forward(one), _deferred(one)
    arriving = 0 if x is None else x.rows + stream - _freed_before_experts(one)
    if one.recompute == "full":
        arriving = 0  # all else is made again by then
    return KindBytes(
        saved, working, ending, forward, arriving, deferred, reducing, first_half, exchanging, of_host, of_input
    )


def saved_parts(e: Experiment, kind: Layer, c: int, *, recomputed: bool) -> dict[str, int]:
    """The saved bytes of `kind_bytes` that stay on the device, by the part of the layer that saves them."""
    one = _Layer.of(e, kind, c, c, recomputed=recomputed)
    return _parts(one, one.offloaded)


def _parts(one: _Layer, away: tuple[str, ...]) -> dict[str, int]:
    """``away``: words of tensors that are not counted."""
    t, x, named = one.t, one.x, one.named
    if one.recompute == "full":
        always = _sum(tensor for tensor in t.all() if tensor.dropped_by == ALWAYS)
        stream = one.e.model.streams * one.s.own(one.s.hidden)
        return {"residual stream": (0 if "input" in away else stream) + always}
    # The outputs of two row-parallel layers and their partial sums stay, or two inputs are saved gathered.
    more = one.gathered + one.s.own(one.s.hidden) if one.compiled_again else one.kept
    parts = {"residual stream": 0, "attention": more, "feed-forward": more, "tokens sent to experts": 0}

    def add(part: str, tensors: Iterable[Tensor]) -> None:
        parts[part] += _sum(tensor for tensor in tensors if not _is_again(one, tensor) and not _is_in(away, tensor))

    add("attention", t.mixer)
    add("feed-forward", t.mlp)
    for tensor in t.entry:
        owner = "attention" if tensor.name.startswith("mixer: ") else "feed-forward"
        add(owner if ": " in tensor.name else "residual stream", [tensor])
    if x is not None:
        parts["tokens sent to experts"] = x.router + x.weights + x.rows
        kept = 0 if "experts" in named else x.gate_up
        parts["feed-forward"] += kept + (0 if "experts" in named or "swiglu" in named else x.product)
    return parts


def _is_again(one: _Layer, tensor: Tensor) -> bool:
    """Whether a tensor is recomputed one by one."""
    if one.compiled_again:
        return tensor.name in _MADE_AGAIN or ": norm" in tensor.name
    return tensor.dropped_by in one.named


def _freed_before_experts(one: _Layer) -> int:
    """Bytes that backwards of what follows routed experts have freed when that of the experts begins: of norms of
    outputs the inputs of three and their statistics, less the gradient of the dense MLP's output, which waits; of the
    projection out of a latent its input, less the gradient of its weight."""
    mlp = one.kind.mlp
    if isinstance(mlp, RoutedMLP) and mlp.latent:
        (latent,) = (tensor for tensor in one.t.mlp if tensor.name == LATENT_SUM)
        return latent.bytes - one.w * mlp.latent * one.s.hidden
    return 2 * one.s.own(one.s.hidden) + 3 * one.s.statistics() if one.kind.normed_beside else 0


def _is_in(words: tuple[str, ...], tensor: Tensor) -> bool:
    """Whether a tensor has one of these words of ``activation_offload``."""
    return (tensor.offloaded_by or tensor.dropped_by) in words


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(one.bytes for one in tensors)


def _dense_working(one: _Layer, mlp: DenseMLP, stream: int) -> int:
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


def _fp8_working(one: _Layer, mlp: DenseMLP, stream: int, *, first_half: bool) -> int:
    s, again, columns = one.s, "swiglu" in one.named, mlp.width // one.s.tp
    up = (2 if mlp.gated else 1) * columns
    return fp8.working_bytes(
        one.e, stream, s.tokens, columns, up, s.c, recomputes_product=again, w=one.w, first_half=first_half
    )


def _forward(one: _Layer) -> int:
    """Bytes in addition to saved ones at the end of a layer's forward, while the last product of the MLP runs: its
    outputs, with tp > 1 as partial sums and as their sum, those of shared experts, and what the backward recomputes of
    the MLP. With full recomputation the tensors of the mixer are free by then, but for the residual stream. When the
    MLP's output is added to the stream, both exist, and nothing of the MLP but what is saved."""
    s, x, mlp, named = one.s, one.x, one.kind.mlp, one.named
    if one.kind.mixer is None or mlp is None:
        return 0
    full, own = one.recompute == "full", s.own(s.hidden)
    beside = 2 * own if full else own if "norm" in named else 0
    if isinstance(mlp, RoutedMLP) and x is not None:
        outputs = x.rows // 2 if mlp.weights_inputs else x.rows
        again = x.product if full or "swiglu" in named or "experts" in named else 0
        again += x.gate_up if full or "experts" in named else 0
        again += x.router + x.weights + x.rows if full else 0
        return beside + outputs + again + (own if mlp.shared is not None else 0)
    again = s.split(mlp.width) if isinstance(mlp, DenseMLP) and (full or "swiglu" in named) else 0
    again += one.t.mlp[0].bytes if full else 0
    return max(beside + again + one.gathered + own, 2 * own)


def _mixer_working(one: _Layer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved`` while a mixer's backward runs: all its tensors, saved or recomputed, exist with
    the gradients of its activations and of the stream, of the output projection and of the MLP before it. 0 for
    grouped-query attention, whose gradients are smaller than the tensors that the MLP has freed by then."""
    kind, s, t, mixer = one.kind, one.s, one.t, one.kind.mixer
    if mixer is None or (isinstance(mixer, Attention) and mixer.gate == "none" and kind.mlp is not None):
        return 0
    there = _sum(t.entry[:3] if kind.mlp is not None else t.entry) + _sum(t.mixer) + stream
    there += sum(tensor.bytes for tensor in t.mixer if tensor.gradient)
    if kind.mlp is None and "norm" in one.named:  # the normed input is made again later
        there -= s.own(s.hidden)
    if isinstance(mixer, Attention):
        there += exchanging_keys(mixer, s)
    if isinstance(mixer, LatentAttention):  # keys are whole then, and latents have no gradients yet
        there += s.split(mixer.heads * mixer.rope_dim) - t.mixer[0].bytes
    weights = [weight for weight in mixer.weights(s.hidden) if weight.name in ("o", "out")]
    there += one.w * sum(weight.parameters for weight in weights) // s.tp
    if isinstance(kind.mlp, DenseMLP):
        there += (3 if kind.mlp.gated else 2) * (one.w * kind.mlp.width // s.tp * s.hidden)
        if "norm" in one.named:
            norms = [tensor for tensor in t.all() if tensor.dropped_by == "norm"]
            there -= _sum(norms) - stream
    return there - saved


def _ending(one: _Layer, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved``, and to the gradients of all weights, when a mixer's first product gets its
    gradient: the gradients of its outputs and of the stream, its input, and that of the layer. Far below 0 unless a
    micro-batch has few tokens."""
    if one.kind.mixer is None:
        return -saved
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    return gradients + 3 * stream - saved


def _exchanging(one: _Layer) -> int:
    """Bytes in addition to `_mixer_working` while a recurrent layer's backward exchanges heads for tokens: gradients of
    the output, or of the inputs, exist three times (as they are, sent and received), those of the inputs without what
    the layer saved."""
    mixer = one.kind.mixer
    if one.e.cp == 1 or not isinstance(mixer, GatedDeltaRule | KimiDelta | Mamba2):
        return 0
    along = mixer.context_parallel
    inputs, outputs = one.s.split(along.inputs), one.s.split(along.outputs)
    return max(0, inputs - outputs, 2 * outputs - inputs)


def _exchanging_first(one: _Layer, saved: int) -> int:
    """Bytes in addition to ``saved`` in the input-gradient pass of a split backward while a recurrent layer exchanges
    heads for tokens: all that waits for the weight-gradient pass (the gradient of the stream is part of it), two more
    copies of the gradients of the inputs, and the layer's input. 0 for other layers."""
    if _exchanging(one) == 0:
        return 0
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    entry = one.t.entry[:3] if one.kind.mlp is not None else one.t.entry
    there = _deferred(one) + 2 * gradients + _sum(tensor for tensor in entry if not tensor.feeds)
    return max(0, there - saved)


def _kernels_working(one: _Layer, mixer: Kernels, stream: int, saved: int) -> int:
    """As `_mixer_working`, while the kernels of a recurrence run: what these need in place of the gradients of their
    inputs, which are made of it at the end."""
    s = one.s
    of_kernels = working_of(mixer, Batch(one.e.micro_batch_size, one.e.seq_len), s.tp * one.e.cp)
    gradients = sum(tensor.bytes for tensor in one.t.mixer if tensor.gradient)
    return _mixer_working(one, stream, saved) - gradients + of_kernels.backward


def _uncast(one: _Layer, operation: str) -> int:
    """Extra bytes of a recomputed operation's outputs between the two passes of a split backward: they stay in 16 bits
    until the weight-gradient pass casts them, where saved ones would be in fp8."""
    s, mlp = one.s, one.kind.mlp
    if not fp8.keeps_low(one.e) or operation not in one.e.recomputed_operations:
        return 0
    if operation == "swiglu":  # routed experts save theirs in 16 bits anyway; shared experts are not counted here
        return s.split(mlp.width) - one.t.mlp[1].bytes if isinstance(mlp, DenseMLP) else 0
    if s.tp > 1:  # products save their gathered inputs, in 16 bits
        return 0
    return sum(s.own(s.hidden) - tensor.bytes for tensor in one.t.entry if tensor.dropped_by == "norm")


def _first_half(one: _Layer) -> int:
    """Extra working bytes of a dense layer in the input-gradient pass of a split backward, compared with a whole
    backward: the product is kept for the weight-gradient pass, and the down weight has no gradient yet. In fp8 see
    `fp8.working_bytes`."""
    s, mlp = one.s, one.kind.mlp
    if not isinstance(mlp, DenseMLP):
        return 0
    if fp8.is_low(one.e):
        of_pass, whole = (_fp8_working(one, mlp, 0, first_half=half) for half in (True, False))
        return max(0, of_pass - whole)
    return max(0, one.t.mlp[1].bytes - one.w * mlp.width // s.tp * s.hidden)


def _deferred(one: _Layer) -> int:
    """Bytes that one layer holds for one micro-batch between the input-gradient and the weight-gradient pass of a split
    backward (zero bubble, arXiv:2401.10241).

    These are the inputs of its matrix products (normed streams and latents, the attention output, the product) and the
    gradients of their outputs (queries, keys and values; gate and up; the row-parallel sums, ``c T h`` each), in fp8 if
    weight gradients are fp8 products. Experts hold the received copies, and the gradients of their outputs instead of
    the second sum (in addition to it with shared experts).
    """
    kind, s, t, x = one.kind, one.s, one.t, one.x
    inputs = _sum(tensor for tensor in t.all() if tensor.feeds)
    inputs += _uncast(one, "norm") // one.e.recompute_every + _uncast(one, "swiglu") // one.e.recompute_every
    gradients = _sum(tensor for tensor in t.all() if tensor.gradient and not tensor.feeds)
    beside = isinstance(kind.mlp, DenseMLP) or (isinstance(kind.mlp, RoutedMLP) and kind.mlp.shared is not None)
    gradients += ((kind.mixer is not None) + beside) * s.c * s.tokens * s.hidden
    if isinstance(kind.mlp, RoutedMLP) and kind.mlp.latent:  # of the latents, and of what comes out of them
        gradients += s.own(kind.mlp.latent) + (s.own(s.hidden) if s.tp > 1 or not beside else 0)
    if fp8.keeps_low(one.e):
        wide = t.mixer[0].bytes if isinstance(kind.mixer, LatentAttention) and one.e.precision == "fp8_blockwise" else 0
        gradients = fp8.cast_bytes(one.e, (gradients - wide) // s.c) + wide
    return inputs + gradients + (0 if x is None else 2 * x.rows + x.gate_up + x.product)
