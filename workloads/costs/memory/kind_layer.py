"""One layer of a kind with its tensors, and what of them it saves, or holds between the passes of a split backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from workloads.costs.memory.expert_activations import ExpertTensors, expert_tensors
from workloads.costs.memory.kind_tensors import ALWAYS, LATENT_SUM, OUTPUT, KindTensors, Sizes, Tensor, kind_tensors
from workloads.costs.shape import fp8
from workloads.spec.activations.offload import offloaded_words
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.recomputation import operations_of

_MADE_AGAIN = ("residual", "norm of heads: statistics", "rotated", "queries", "whole keys", "rotated key", "product")
"""What compiled blocks with tensor parallelism make again beside normed streams, as measured in a run of
h100x2_validation_gradients."""


class KindLayer(NamedTuple):
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
    def of(cls, e: Experiment, kind: Layer, c: int, w: int, *, recomputed: bool) -> KindLayer:
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


def parts_of(one: KindLayer, away: tuple[str, ...]) -> dict[str, int]:
    """``away``: words of tensors that are not counted."""
    t, x, named = one.t, one.x, one.named
    if one.recompute == "full":
        always = bytes_of(tensor for tensor in t.all() if tensor.dropped_by == ALWAYS)
        stream = one.e.model.streams * one.s.own(one.s.hidden)
        return {"residual stream": (0 if "input" in away else stream) + always}
    # The outputs of two row-parallel layers and their partial sums stay, or two inputs are saved gathered.
    more = one.gathered + one.s.own(one.s.hidden) if one.compiled_again else one.kept
    parts = {"residual stream": 0, "attention": more, "feed-forward": more, "tokens sent to experts": 0}

    def add(part: str, tensors: Iterable[Tensor]) -> None:
        parts[part] += bytes_of(tensor for tensor in tensors if not is_again(one, tensor) and not _is_in(away, tensor))

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


def is_again(one: KindLayer, tensor: Tensor) -> bool:
    """Whether a tensor is recomputed one by one."""
    if one.compiled_again:
        return tensor.name in _MADE_AGAIN or ": norm" in tensor.name
    return tensor.dropped_by in one.named


def freed_before_experts(one: KindLayer) -> int:
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


def deferred_of(one: KindLayer) -> int:
    """Bytes that one layer holds for one micro-batch between the input-gradient and the weight-gradient pass of a split
    backward (zero bubble, arXiv:2401.10241).

    These are the inputs of its matrix products (normed streams and latents, the attention output, the product) and the
    gradients of their outputs (queries, keys and values; gate and up; the row-parallel sums, ``c T h`` each), in fp8 if
    weight gradients are fp8 products. Experts hold the received copies, and the gradients of their outputs instead of
    the second sum (in addition to it with shared experts).
    """
    kind, s, t, x = one.kind, one.s, one.t, one.x
    inputs = bytes_of(tensor for tensor in t.all() if tensor.feeds)
    inputs += _uncast(one, "norm") // one.e.recompute_every + _uncast(one, "swiglu") // one.e.recompute_every
    gradients = bytes_of(tensor for tensor in t.all() if tensor.gradient and not tensor.feeds and tensor.name != OUTPUT)
    beside = isinstance(kind.mlp, DenseMLP) or (isinstance(kind.mlp, RoutedMLP) and kind.mlp.shared is not None)
    gradients += ((kind.mixer is not None) + beside) * s.c * s.tokens * s.hidden
    if isinstance(kind.mlp, RoutedMLP) and kind.mlp.latent:  # of the latents, and of what comes out of them
        gradients += s.own(kind.mlp.latent) + (s.own(s.hidden) if s.tp > 1 or not beside else 0)
    if fp8.keeps_low(one.e):
        wide = t.mixer[0].bytes if isinstance(kind.mixer, LatentAttention) and one.e.precision == "fp8_blockwise" else 0
        gradients = fp8.cast_bytes(one.e, (gradients - wide) // s.c) + wide
    return inputs + gradients + (0 if x is None else 2 * x.rows + x.gate_up + x.product)


def _uncast(one: KindLayer, operation: str) -> int:
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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(one.bytes for one in tensors)
