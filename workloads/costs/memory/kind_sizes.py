"""Bytes that one layer of a kind saves and needs while its backward runs, from its tensors by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from workloads.costs.memory.expert_activations import ExpertTensors
from workloads.costs.memory.kind_tensors import (
    ALWAYS,
    KindTensors,
    Sizes,
    Tensor,
    expert_tensors_of,
    kind_tensors,
)
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.recomputation import operations_of


class KindBytes(NamedTuple):
    """Bytes of one layer of a kind, one micro-batch, one rank."""

    saved: int
    """Held from forward to backward."""
    working: int
    """Needed in addition while its backward runs."""
    deferred: int
    """Held between the passes of a split backward."""
    reducing: int
    """Needed in addition to ``saved`` while the experts' gradients are reduced."""
    first_half: int
    """Extra working bytes in the input-gradient pass of a split backward."""


def kind_bytes(e: Experiment, kind: Layer, c: int, *, recomputed: bool) -> KindBytes:
    """``recomputed``: whether the policy of ``e`` applies to this layer."""
    s, streams = Sizes.of(e, c), e.model.streams
    experts = expert_tensors_of(e, kind.mlp, s.stream, c) if isinstance(kind.mlp, RoutedMLP) else None
    return _bytes(kind, s, streams, experts, e.recompute if recomputed else "none", e.ep > 1, e.etp)


@lru_cache(maxsize=65536)
def _bytes(
    kind: Layer, s: Sizes, streams: int, x: ExpertTensors | None, recompute: str, exchanged: bool, etp: int
) -> KindBytes:
    t, named = kind_tensors(kind, s, streams), operations_of(recompute)
    of_experts = 0 if x is None else x.router + x.weights + x.rows + x.gate_up + x.product
    total = _sum(t.all()) + of_experts
    again_in_experts = 0
    if recompute == "full":
        saved = t.entry[0].bytes + _sum(one for one in t.all() if one.dropped_by == ALWAYS)
        again, again_in_experts = total - saved, total - saved
    else:
        again = _sum(one for one in t.all() if one.dropped_by in named)
        saved = total - again
        if x is not None and "experts" in named:
            again_in_experts = x.gate_up + x.product
            saved -= again_in_experts
        elif x is not None and "swiglu" in named:
            again_in_experts, saved = x.product, saved - x.product
    stream = streams * s.own(s.hidden)
    gathered = s.c * s.tokens * s.hidden if s.tp > 1 else 0
    moments = [0]
    if x is not None:
        moments += [
            stream + _expert_working(kind, x, gathered if etp > 1 else 0, again_in_experts, exchanged=exchanged)
        ]
    elif isinstance(kind.mlp, DenseMLP):
        moments += [stream + _dense_working(kind.mlp, t, s, gathered, recompute, total - saved)]
    if kind.mixer is not None:
        moments += [_mixer_working(kind, t, s, stream, saved)]
    sums = (kind.mixer is not None) + (isinstance(kind.mlp, DenseMLP) or any("shared" in one.name for one in t.mlp))
    deferred = _sum(one for one in t.all() if one.feeds or one.gradient) + sums * s.c * s.tokens * s.hidden
    if x is not None:
        deferred += 2 * x.rows + x.gate_up + x.product
    reducing = 0 if x is None else again_in_experts + stream - x.weights - x.gate_up - x.product
    first_half = 0
    if isinstance(kind.mlp, DenseMLP):  # its product is kept, and the down weight has no gradient yet
        first_half = max(0, t.mlp[1].bytes - s.c * kind.mlp.width // s.tp * s.hidden)
    return KindBytes(saved, max(moments), deferred, reducing, first_half)


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(one.bytes for one in tensors)


def _dense_working(mlp: DenseMLP, t: KindTensors, s: Sizes, gathered: int, recompute: str, again: int) -> int:
    """Bytes that the backward of a dense MLP needs beside the stream's gradient: the largest of the three moments of
    `workloads.costs.memory.activations.layer_bytes`, and what is recomputed."""
    up, product = t.mlp[0].bytes, t.mlp[1].bytes
    down_weight = s.c * mlp.width // s.tp * s.hidden
    up_weight = down_weight * (2 if mlp.gated else 1)
    steps = max(gathered + product, up, 2 * gathered + up_weight - product)
    if recompute != "full":
        again = product if "swiglu" in operations_of(recompute) else 0
    return down_weight + steps + again


def _expert_working(kind: Layer, x: ExpertTensors, gathered: int, again: int, *, exchanged: bool) -> int:
    """`workloads.costs.memory.expert_activations.expert_working`, with or without a gate."""
    assert isinstance(kind.mlp, RoutedMLP)
    down = x.parameters // (3 if kind.mlp.expert.gated else 2)
    received = (x.sent + x.rows, 2 * x.rows) if exchanged else ()
    products = (x.rows + x.product + down, x.gate_up + down, x.rows + x.parameters - x.product)
    return max(gathered + x.sent, *received, again + max(products))


def _mixer_working(kind: Layer, t: KindTensors, s: Sizes, stream: int, saved: int) -> int:
    """Bytes in addition to ``saved`` while a mixer's backward runs: all its tensors, saved or recomputed, exist with
    the gradients of its activations and of the stream, of the output projection and of the MLP before it."""
    own = t.entry[:3] if kind.mlp is not None else t.entry
    there = _sum(own) + _sum(t.mixer)
    gradients = sum(one.bytes for one in t.mixer if one.gradient)
    weights = [weight for weight in kind.mixer.weights(s.hidden) if weight.name in ("o", "out")] if kind.mixer else []
    done = s.c * sum(weight.parameters for weight in weights) // s.tp
    if isinstance(kind.mlp, DenseMLP):
        done += s.c * (3 if kind.mlp.gated else 2) * (kind.mlp.width // s.tp) * s.hidden
    return there + gradients + stream + done - saved
