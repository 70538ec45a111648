"""Bytes that a pipeline rank saves for backward, by the part of the layer that saves them: for people who read a peak.

The sums are those of `workloads.costs.memory.activations`, which explains them.
"""

from __future__ import annotations

from workloads.costs.memory.activations import (
    STATISTICS_BYTES,
    LayerTensors,
    rank_tokens,
    recomputable_bytes,
    tensors_of,
)
from workloads.costs.memory.expert_activations import expert_tensors
from workloads.costs.memory.sizes import Part, Shared
from workloads.spec.experiment import Experiment


def saved_by_part(e: Experiment, x: Shared, rank: Part) -> dict[str, int]:
    """Bytes that a rank saves for one micro-batch; they add up to `Part.saved`."""
    found = {"stage output": 0 if rank.has_head else x.stream}
    for one in rank.classes:
        routed = one.size.experts > 0
        for recomputed, count in ((True, one.recomputed), (False, one.layers - one.recomputed)):
            for name, size in _of_layer(e, routed, x.c, recomputed).items():
                found[name] = found.get(name, 0) + count * size
    return found


def _of_layer(e: Experiment, routed: bool, c: int, recomputed: bool) -> dict[str, int]:
    """Bytes that one layer saves. ``recomputed``: whether the recompute policy covers it."""
    t, (tokens, stream_tokens) = tensors_of(e, routed, c), rank_tokens(e)
    stream, gathered = c * stream_tokens * e.model.hidden_size, c * tokens * e.model.hidden_size if e.tp > 1 else 0
    compiled = not routed and e.compiles(routed=False, recomputed=recomputed)
    if e.recompute == "none" or not recomputed:  # a compiled block saves two inputs gathered
        more = gathered - stream if compiled and e.tp > 1 and e.sequence_parallel else 0
        return _parts(t, -more, -more, 0)
    if e.recompute == "full":
        return {"residual stream": t.input}
    if compiled and e.tp > 1:  # the outputs of two row-parallel layers and their partial sums stay
        each = stream + gathered
        in_attention = t.attention_norm + t.qk_statistics + t.rotated - each
        return _parts(t, in_attention, t.ffn_norm + t.product - each, t.residual)
    named = e.recomputed_operations
    dropped = {name: size for name, size in recomputable_bytes(e, t, c).items() if name in named}
    in_mlp = dropped.get("swiglu", 0) + (t.ffn_norm - STATISTICS_BYTES * stream_tokens if "norm" in named else 0)
    in_attention, of_experts = sum(dropped.values()) - in_mlp, 0
    if routed and "experts" in named:
        x = expert_tensors(e, stream_tokens, c)
        of_experts = x.gate_up if "swiglu" in named else x.gate_up + x.product
    return _parts(t, in_attention, in_mlp + of_experts, 0)


def _parts(t: LayerTensors, attention_less: int, mlp_less: int, residual_less: int) -> dict[str, int]:
    """A layer's tensors by part, less what is not saved."""
    attention = (t.attention_norm, t.latents, t.latent_norms, t.projected, t.qk_statistics, t.rotated, t.softmax)
    return {
        "residual stream": t.input + t.residual - residual_less,
        "attention": sum(attention) + t.attention_output - attention_less,
        "feed-forward": t.ffn_norm + t.gate_up + t.product - mlp_less,
        "tokens sent to experts": t.dispatched,
    }
