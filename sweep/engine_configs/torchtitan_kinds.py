"""Models with layers that numbers do not describe as torchtitan's flavors: gpt-oss in 0.3, and why no other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from workloads.rules.engine_kinds import adapters_lack
from workloads.rules.torchtitan_kinds import FAMILIES, kinds_family, kinds_lacking
from workloads.spec.engine_versions import ENGINES
from workloads.spec.layer_kinds.attention import FULL, Attention, Rope
from workloads.spec.layer_kinds.layer_list import LayerList
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.spans import Span, Window
from workloads.spec.model_spec import ModelSpec

GPT_OSS: Mapping[str, tuple[int, int]] = {"20b": (24, 32), "120b": (36, 128)}
"""Layers and experts of torchtitan 0.3's flavors of gpt-oss, which are alike in all else."""
_ENDS: Mapping[str, Any] = {"hidden_size": 2880, "vocab_size": 201_088, "tie_embeddings": False, "norm_eps": 1e-5}


def gpt_oss_flavor(model: ModelSpec) -> str | None:
    """torchtitan 0.3's flavor of gpt-oss with exactly this shape; None if there is none. The scaling of positions has
    no effect on cost, and how experts are balanced counts only where the router chooses them."""
    if model.layers is None or any(getattr(model, name) != value for name, value in _ENDS.items()):
        return None
    listed = dataclasses.replace(model.layers, kinds=tuple(_plain(kind) for kind in model.layers.kinds))
    return next((name for name, (count, experts) in GPT_OSS.items() if listed == _gpt_oss(count, experts)), None)


def _plain(kind: Layer) -> Layer:
    mixer, mlp = kind.mixer, kind.mlp
    if isinstance(mixer, Attention) and mixer.rope is not None:
        mixer = dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, scaling=""))
    if isinstance(mlp, RoutedMLP):
        mlp = dataclasses.replace(mlp, balance_loss=0.0, correction=False)
    return dataclasses.replace(kind, mixer=mixer, mlp=mlp)


def _gpt_oss(layers: int, experts: int) -> LayerList:
    routed = RoutedMLP(
        experts=experts,
        chosen=4,
        expert=DenseMLP(width=2880, activation="clamped_silu", bias=True, limit=7.0, slope=1.702, offset=1.0),
        score="softmax_of_chosen",
        router_bias=True,
    )

    def layer(span: Span) -> Layer:
        mixer = Attention(
            heads=64,
            kv_heads=8,
            head_dim=64,
            value_dim=64,
            span=span,
            rope=Rope(150_000.0),
            bias=True,
            output_bias=True,
            sinks=True,
        )
        return Layer(mixer=mixer, mlp=routed)

    return LayerList((layer(Window(128)), layer(FULL)), tuple(at % 2 for at in range(layers)))


def lacks(model: ModelSpec) -> list[str]:
    """What torchtitan 0.3 has no counterpart of, by name; empty if the model has a flavor or is described by
    numbers."""
    if (family := kinds_family(model)) is None:
        return list(adapters_lack(model))
    if family == "llama4":
        return [f"{FAMILIES[family]}, which it has no longer"]
    if gpt_oss_flavor(model) is not None:
        return []
    return [f"a {FAMILIES[family]} that is none of its flavors ({', '.join(GPT_OSS)})"]


def lacks_in_02(model: ModelSpec) -> list[str]:
    """What torchtitan 0.2.2 has no counterpart of, by name; empty if numbers describe the model."""
    if (family := kinds_family(model)) is None:
        return list(adapters_lack(model))
    if family == "gpt_oss":
        return [f"{FAMILIES[family]} with weights in 32 bits, which its own has in 16 (torchtitan 0.3 has 32)"]
    lacking = kinds_lacking(model, math.inf, ENGINES["torchtitan"])
    return lacking or [f"a {FAMILIES[family]} that is none of its flavors"]
