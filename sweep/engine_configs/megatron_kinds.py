"""Flags of Megatron-LM for layers that numbers cannot describe: windows, sinks, gates, biases, other activations, the
gated delta rule, and hybrids of Mamba-2 (`megatron_hybrid`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sweep.engine_configs.draft import Draft
from sweep.engine_configs.megatron_hybrid import is_of_one_part, set_hybrid
from workloads.costs.shape.params import whole_model
from workloads.rules.engine_kinds import MULTI_TOKEN, adapters_lack, refuse_kinds
from workloads.spec.config_json.expressible import model_spec, not_expressible
from workloads.spec.layer_kinds.attention import FULL, Attention, Rope
from workloads.spec.layer_kinds.mlp import MLP, DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, Mixer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, Mamba2
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.model_spec import ModelSpec

KINDS = (
    "sliding ",
    "attention without positions",
    "rotary positions of a part",
    "biases of queries, keys and values",
    "a bias of the attention's output",
    "an output gate of attention (one number for each element)",
    "attention sinks",
    "attention that differs by layer",
    "gated delta rule",
    "Mamba-2",
    "layers of a mixer alone",
    "layers of an MLP alone",
    "gated (clamped_silu)",
    "ungated (relu2)",
    "biases of experts",
    "biases of MLPs",
    "a bias of the router",
    "dense layers after routed ones",
    "shared experts of another width",
    "a dense MLP beside the experts",
    "a gate of the shared expert",
    "latent experts",
    MULTI_TOKEN,
)
"""Beginnings of the names, in `workloads.spec.config_json.expressible`, of what Megatron-Core 0.19.2 has flags for."""
_QUICK_GELU = 1.702
"""Slope of the gate of its ``--quick-geglu``."""


def lacks(model: ModelSpec) -> list[str]:
    """What of the model's layers Megatron has no flags for, by name."""
    return [name for name in adapters_lack(model) if not name.startswith(KINDS)]


def nearest_numbers(model: ModelSpec) -> ModelSpec:
    """The model, without modules of multi-token prediction, with plain layers of the same sizes, which numbers
    describe: what `set_kinds` adds is left out. Raises `UnsupportedByEngine` where layers differ otherwise."""
    whole = whole_model(model)
    layers = [layer for layer in whole.layers if not layer.ahead]
    attention = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    if not attention:
        refuse_kinds(model, "megatron", ["a model without softmax attention"])
    thetas = [mixer.rope.theta for mixer in attention if mixer.rope is not None] or [10_000.0]
    mlps = [layer.mlp for layer in layers if layer.mlp is not None]
    plain = [
        Layer(
            mixer=_plain_mixer(layer.mixer, attention[0], thetas[0]),
            mlp=_plain_mlp(layer.mlp or mlps[0]),
            norms=2 if is_of_one_part(layer) else layer.norms,
            outputs_normed=layer.outputs_normed,
        )
        for layer in layers
    ]
    plain.sort(key=lambda layer: layer.routed)
    simple = dataclasses.replace(whole, layers=tuple(plain))
    refuse_kinds(model, "megatron", not_expressible(simple))
    return model_spec(simple)


def _plain_mixer(mixer: Mixer | None, usual: Attention, theta: float) -> Mixer:
    if mixer is None or isinstance(mixer, GatedDeltaRule | Mamba2):
        mixer = usual
    if not isinstance(mixer, Attention):
        return mixer
    rope = Rope(theta if mixer.rope is None else mixer.rope.theta)
    return dataclasses.replace(mixer, span=FULL, rope=rope, bias=False, output_bias=False, gate="none", sinks=False)


def _plain_mlp(mlp: MLP) -> MLP:
    if isinstance(mlp, DenseMLP):
        return DenseMLP(width=mlp.width, activation="silu")
    width = mlp.shared_experts * mlp.expert.width
    return dataclasses.replace(
        mlp,
        expert=DenseMLP(width=mlp.expert.width, activation="silu"),
        shared=DenseMLP(width=width, activation="silu") if width else None,
        shared_gate=False,
        latent=0,
        router_bias=False,
    )


def set_kinds(draft: Draft) -> None:
    """Writes what the model's layers have beside those of `nearest_numbers`, and refuses what Megatron has for all
    layers or none."""
    layers = [layer for layer in whole_model(draft.experiment.model).layers if not layer.ahead]
    attention = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    _windows(draft, layers)
    _positions(draft, layers, attention)
    _gates(draft, attention)
    _delta_rules(draft, layers)
    mlps = [layer.mlp for layer in layers if layer.mlp is not None]
    _activations(draft, mlps)
    _biases(draft, attention, mlps)
    _experts(draft, layers, mlps)
    if any(is_of_one_part(layer) or isinstance(layer.mixer, Mamba2) for layer in layers):
        set_hybrid(draft, layers)
    if draft.experiment.model.mtp_modules and {"window-attn-skip-freq", "no-rope-freq"} & draft.options.keys():
        draft.refuse(
            "model.mtp_modules", "its modules take the windows and positions of the first layers; 0 would work"
        )


def _windows(draft: Draft, layers: Sequence[Layer]) -> None:
    spans = [layer.mixer.span if isinstance(layer.mixer, Attention) else FULL for layer in layers]
    windows = [isinstance(span, Window) for span in spans]
    sizes = {span.size for span in spans if isinstance(span, Window)}
    if not sizes:
        return
    if len(sizes) > 1:
        draft.refuse("model.layers", f"its windows have one size, not {' and '.join(map(str, sorted(sizes)))}")
    draft.set({"window-size": f"{min(sizes) - 1},0"})  # earlier tokens, and later ones
    if not all(windows):
        draft.set({"window-attn-skip-freq": pattern(windows)})
    if draft.experiment.cp > 1 and draft.experiment.cp_kind == "ring":
        draft.refuse("cp_kind", "Transformer Engine has no ring for windows; allgather or ulysses would work")


def _positions(draft: Draft, layers: Sequence[Layer], attention: Sequence[Attention]) -> None:
    ropes = [mixer.rope for mixer in attention]
    if all(rope is None for rope in ropes):
        draft.options.pop("rotary-base")
        draft.set({"position-embedding-type": "none"})
        return
    if None in ropes:
        without = [isinstance(layer.mixer, Attention) and layer.mixer.rope is None for layer in layers]
        draft.set({"no-rope-freq": pattern(without)})
    shares = {rope.rotated for rope in ropes if rope is not None}
    if len(shares) > 1 or any(rope is not None and rope.proportional for rope in ropes):
        draft.refuse("model.layers", "its rotary positions cover the first columns of every head, alike in all layers")
    elif shares != {1.0}:
        draft.set({"rotary-percent": min(shares)})
    if any(rope is not None and rope.scaling for rope in ropes):
        draft.notes.append("rotary positions are written without the scaling of the model's file")


def _gates(draft: Draft, attention: Sequence[Attention]) -> None:
    if _all_or_none(draft, "output gates", [mixer.gate == "element" for mixer in attention]):
        draft.set({"attention-output-gate": True})
    if not _all_or_none(draft, "sinks", [mixer.sinks for mixer in attention]):
        return
    draft.set({"softmax-type": "learnable"})
    e = draft.experiment
    if e.attention in ("flash", "flash4"):
        draft.refuse("attention", "FlashAttention has no sinks there; auto, cudnn or math would work")
    if e.cp > 1 and e.cp_kind != "ulysses":
        draft.refuse("cp_kind", "Transformer Engine divides sequences with sinks by heads alone; ulysses would work")


def _delta_rules(draft: Draft, layers: Sequence[Layer]) -> None:
    rules = {layer.mixer for layer in layers if isinstance(layer.mixer, GatedDeltaRule)}
    if not rules:
        return
    if len(rules) > 1:
        draft.refuse("model.layers", "its gated delta rules are alike in all layers")
    rule = next(iter(rules))
    draft.set(
        {
            "experimental-attention-variant": "gated_delta_net",
            "linear-attention-freq": pattern([isinstance(layer.mixer, GatedDeltaRule) for layer in layers]),
            "linear-conv-kernel-dim": rule.kernel,
            "linear-key-head-dim": rule.key_dim,
            "linear-value-head-dim": rule.value_dim,
            "linear-num-key-heads": rule.key_heads,
            "linear-num-value-heads": rule.value_heads,
        }
    )
    draft.notes.append("its gated delta rule needs flash-linear-attention")


def _activations(draft: Draft, mlps: Sequence[MLP]) -> None:
    parts = [part for mlp in mlps for part in _parts(mlp)]
    forms = {(part.gated, part.activation, part.limit, part.slope, part.offset) for part in parts}
    if len(forms) > 1:
        draft.refuse("model.layers", "its MLPs have one activation in all layers, shared experts included")
    part = parts[0]
    if part.activation == "silu":
        return
    draft.options.pop("swiglu")
    if part.activation == "relu2":
        draft.set({"squared-relu": True})
        return
    draft.set({"quick-geglu": True, "glu-linear-offset": part.offset, "activation-func-clamp-value": part.limit})
    draft.set({"no-bias-gelu-fusion": True})  # its fused kernel clamps before it adds the bias
    if part.slope != _QUICK_GELU:
        draft.refuse("model.layers", f"its clamped gates have the slope {_QUICK_GELU}, not {part.slope:g}")


def _parts(mlp: MLP) -> list[DenseMLP]:
    """The dense MLP, or the expert and what is shared beside it."""
    if isinstance(mlp, DenseMLP):
        return [mlp]
    return [mlp.expert, *([mlp.shared] if mlp.shared is not None else [])]


def _biases(draft: Draft, attention: Sequence[Attention], mlps: Sequence[MLP]) -> None:
    """One flag gives biases to all projections, experts and the router; another one to queries, keys and values."""
    queries = {mixer.bias for mixer in attention}
    others = {mixer.output_bias for mixer in attention} | {part.bias for mlp in mlps for part in _parts(mlp)}
    others |= {mlp.router_bias for mlp in mlps if isinstance(mlp, RoutedMLP)}
    if queries == {True} and others == {False}:
        draft.set({"add-qkv-bias": True})
    elif queries == others == {True} and "linear-attention-freq" not in draft.options:
        draft.options.pop("disable-bias-linear")
        if any(isinstance(mlp, RoutedMLP) for mlp in mlps):
            draft.set({"no-bias-dropout-fusion": True})  # its grouped experts refuse biases with it
            if draft.experiment.etp > 1:
                draft.refuse("etp", "it does not divide experts with biases; 1 would work")
    elif True in queries | others:
        draft.refuse(
            "model.layers", "it has biases of all projections and the router, or of queries, keys and values alone"
        )


def _experts(draft: Draft, layers: Sequence[Layer], mlps: Sequence[MLP]) -> None:
    routed = [mlp for mlp in mlps if isinstance(mlp, RoutedMLP)]
    if not routed:
        return
    mlp = routed[0]
    if len(set(routed)) > 1:
        draft.refuse("model.layers", "its experts are alike in all layers")
    if mlp.shared is not None:
        draft.set({"moe-shared-expert-intermediate-size": mlp.shared.width})
    if mlp.shared_gate:
        draft.set({"moe-shared-expert-gate": True})
    if mlp.latent:
        draft.set({"moe-latent-size": mlp.latent})
    if len(routed) < len(mlps) and not any(map(is_of_one_part, layers)):
        draft.set({"moe-layer-freq": pattern([isinstance(mlp, RoutedMLP) for mlp in mlps])})


def _all_or_none(draft: Draft, what: str, found: Sequence[bool]) -> bool:
    if any(found) and not all(found):
        draft.refuse("model.layers", f"its {what} are in all layers of attention or in none")
    return any(found)


def pattern(found: Sequence[bool]) -> str:
    """Which layers have something, as the Python expression that Megatron evaluates, such as ``([1]*3+[0]*1)*6``."""
    period = next(
        n for n in range(1, len(found) + 1) if not len(found) % n and [*found[:n]] * (len(found) // n) == [*found]
    )
    runs: list[list[int]] = []
    for value in found[:period]:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([int(value), 1])
    text = "+".join(f"[{value}]*{count}" for value, count in runs)
    return f"({text})" + (f"*{len(found) // period}" if period < len(found) else "")
