"""Bytes that one layer of a kind saves and needs while its backward runs, from its tensors by name."""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.expert_activations import (
    expert_working,
    first_half_working,
    second_forward_working,
)
from workloads.costs.memory.kind_layer import KindLayer, bytes_of, deferred_of, freed_before_experts, parts_of
from workloads.costs.memory.mixer_working import (
    ending_of,
    exchanging_heads,
    mixer_working,
    mixing_first,
    recurrence_working,
)
from workloads.costs.memory.mlp_working import (
    dense_working,
    experts_again,
    first_half_after_experts,
    first_half_of,
    forward_of,
    rest_after_experts,
)
from workloads.costs.shape import fp8
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2


class KindBytes(NamedTuple):
    """Bytes of one layer of a kind, one micro-batch, one rank."""

    saved: int
    """Held from forward to backward, on the device or, of it, ``offloaded`` on the host."""
    working: int
    """Needed in addition while the backward of its MLP runs."""
    rest: int
    """Needed in addition after the backward of routed experts: `rest_after_experts`."""
    mixing: int
    """Needed in addition while the backward of its mixer runs, without the gradients of routed experts."""
    ending: int
    """Needed in addition at its end, beside the gradients of all its weights; negative where less is held than was
    saved."""
    forward: int
    """Needed in addition at the end of its forward."""
    arriving: int
    """Needed in addition when the backward of routed experts begins: the gradients of their outputs and of
    the stream; 0 without experts, or if all is recomputed."""
    again: int
    """Needed in addition when routed experts have their outputs again: `experts_again`."""
    deferred: int
    """Held between the passes of a split backward."""
    reducing: int
    """Needed in addition to ``saved`` while the experts' gradients are reduced."""
    first_half: int
    """As ``working``, in the input-gradient pass of a split backward, with routed experts until theirs is done."""
    rest_first: int
    """As ``rest``, in that pass."""
    mixing_first: int
    """As ``mixing``, in that pass."""
    offloaded: int
    """Held on the host until the layer's backward begins."""
    offloaded_input: int
    """The layer's input, part of ``offloaded``."""


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
    one = KindLayer.of(e, kind, c, c if w is None else w, recomputed=recomputed)
    of_experts = c if w_experts is None else w_experts
    s, t, x = one.s, one.t, one.x
    saved, stream = sum(parts_of(one, ()).values()), e.model.streams * s.own(s.hidden)
    total = bytes_of(t.all()) + (0 if x is None else x.router + x.weights + x.rows + x.gate_up + x.product)
    again, working, in_first_half, rest_first = total + 2 * one.kept - saved, 0, 0, 0
    if isinstance(kind.mlp, RoutedMLP) and x is not None:
        gathered = s.c * s.tokens * (kind.mlp.latent or s.hidden) if e.etp > 1 else 0
        if one.recompute == "full":
            second = 0
            if not one.saves_after_experts:
                shared = s.own(s.hidden) if kind.mlp.shared is not None else 0
                second = second_forward_working(e, kind.mlp, x, gathered + shared)
            working = again + max(second, expert_working(e, kind.mlp, x, gathered, w=of_experts, adds=experts_add))
            in_first_half = again + max(second, first_half_working(e, kind.mlp, x, gathered))
        else:
            again = x.gate_up + x.product if "experts" in one.named else x.product if "swiglu" in one.named else 0
            working = expert_working(e, kind.mlp, x, gathered, again, w=of_experts, adds=experts_add)
            in_first_half = first_half_working(e, kind.mlp, x, gathered, again)
        working += stream - freed_before_experts(one)
        # The projection out of a latent needs its input for the weight-gradient pass.
        left = stream - (0 if kind.mlp.latent else freed_before_experts(one))
        in_first_half += left
        rest_first = left + again + first_half_after_experts(one, kind.mlp, x)
    elif isinstance(kind.mlp, DenseMLP):
        if one.recompute != "full" and not one.compiled_again:
            again = t.mlp[1].bytes if "swiglu" in one.named and not fp8.is_low(e) else 0
        working, in_first_half = again + dense_working(one, kind.mlp, stream), again + first_half_of(one, stream)
        if kind.norms > 2 or kind.outputs_normed:  # the backward of the output's norm is done by then
            working -= s.own(s.hidden) + s.statistics()
    mixing = -saved
    if kind.mixer is not None and not one.compiled_again:
        mixing = mixer_working(one, stream, min(saved, total)) + exchanging_heads(one)
    if isinstance(kind.mixer, GatedDeltaRule | KimiDelta | Mamba2):
        mixing = max(mixing, recurrence_working(one, kind.mixer, stream, min(saved, total)))
    if kind.ahead:  # gradients that the head has made of other hidden states
        working += s.own(s.hidden) * e.model.mtp_modules
        mixing += s.own(s.hidden) * e.model.mtp_modules
        in_first_half += s.own(s.hidden) * e.model.mtp_modules
        rest_first += s.own(s.hidden) * e.model.mtp_modules
    reducing = 0 if x is None else again + stream - freed_before_experts(one) - x.weights - x.gate_up - x.product
    if x is not None and isinstance(kind.mlp, RoutedMLP) and kind.mlp.weights_inputs:
        reducing -= x.rows // 2  # copies before and after they are weighted, of which the gradient of one is left
    offloaded = one.offloaded
    of_host = saved - sum(parts_of(one, offloaded).values())
    of_input = t.entry[0].bytes if "input" in offloaded else 0
    in_first_mixer = -saved if one.compiled_again else mixing_first(one, stream, min(saved, total))
    in_first_mixer += s.own(s.hidden) * e.model.mtp_modules if kind.ahead else 0
    ending = ending_of(one, stream, min(saved, total))
    forward, deferred = forward_of(one), deferred_of(one)
    arriving = 0 if x is None else x.rows + stream - freed_before_experts(one)
    if one.recompute == "full":
        arriving = 0  # all else is made again by then
    return KindBytes(
        saved,
        working,
        rest_after_experts(one, stream, min(saved, total)),
        mixing,
        ending,
        forward,
        arriving,
        experts_again(one, stream),
        deferred,
        reducing,
        in_first_half,
        rest_first,
        in_first_mixer,
        of_host,
        of_input,
    )


def saved_parts(e: Experiment, kind: Layer, c: int, *, recomputed: bool) -> dict[str, int]:
    """The saved bytes of `kind_bytes` that stay on the device, by the part of the layer that saves them."""
    one = KindLayer.of(e, kind, c, c, recomputed=recomputed)
    return parts_of(one, one.offloaded)
