"""Weights of recurrent mixers, as `workloads.spec.kind_weights` has those of attention. No torch here.

Everything that has heads, groups or channels is divided over tensor-parallel ranks by them, the short vectors too.
Convolutions begin with the spread of `torch.nn.Conv1d` (uniform within 1 / sqrt(kernel)), skips and norms with ones,
other vectors as matrices do, so that no gradient is special at the start. Published models begin with other decays
(from 1 to 16), on which no cost depends.
"""

from __future__ import annotations

import math

from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2, Recurrent
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import COLUMNS, INIT_STD, ROWS, WHOLE, WHOLE_BY_HEADS, Weight, norm, residual_std


def recurrent(model: ModelSpec, mixer: Recurrent, prefix: str) -> dict[str, Weight]:
    """Weights of a recurrent mixer that the engine runs by their short names, in the order in which it creates them."""
    if isinstance(mixer, GatedDeltaRule):
        return gated_delta(model, mixer, prefix)
    if isinstance(mixer, KimiDelta):
        return kimi_delta(model, mixer, prefix)
    assert isinstance(mixer, Mamba2), "refused by the rules"
    return mamba(model, mixer, prefix)


MAMBA_PRODUCTS, DELTA_PRODUCTS = ("z", "x", "b", "c", "steps"), ("q", "k", "v", "gate", "decay", "rate")
"""Parts of the projection."""


def columns(model: ModelSpec, mixer: Recurrent, tp: int) -> tuple[int, ...]:
    """Columns that a rank has of the projections of the layer's input, of the input of its output projection, and of
    latents."""
    held = recurrent(model, mixer, "")
    products = MAMBA_PRODUCTS if isinstance(mixer, Mamba2) else DELTA_PRODUCTS
    fused = sum(held[name].shape[0] for name in products if name in held)
    latents = (mixer.head_dim,) if isinstance(mixer, KimiDelta) else ()
    return fused // tp, held["out"].shape[1] // tp, *latents


def mamba(model: ModelSpec, mixer: Mamba2, prefix: str) -> dict[str, Weight]:
    """z, x, b, c and steps have one input and are one parameter, and so are the convolutions of x, b and c, all biases
    of these, and the vectors of heads."""
    h, width, of_groups = model.hidden_size, mixer.heads * mixer.head_dim, mixer.groups * mixer.state
    convolved = {"x": width, "b": of_groups, "c": of_groups}
    columns = {"z": width, **convolved, "steps": mixer.heads}
    held = {name: Weight(f"{prefix}.{name}", (count, h), INIT_STD, ROWS) for name, count in columns.items()}
    if mixer.bias:
        held |= {f"{name}_bias": _vector(f"{prefix}.{name}_bias", count) for name, count in columns.items()}
    held |= {
        f"{name}_kernel": _kernel(f"{prefix}.{name}_kernel", count, mixer.kernel) for name, count in convolved.items()
    }
    if mixer.convolution_bias:
        held |= {
            f"{name}_kernel_bias": _vector(f"{prefix}.{name}_kernel_bias", count) for name, count in convolved.items()
        }
    held |= {name: _vector(f"{prefix}.{name}", mixer.heads) for name in ("decay", "step_bias")}
    held |= {name: norm(f"{prefix}.{name}", size, ROWS) for name, size in (("skip", mixer.heads), ("norm", width))}
    held["out"] = Weight(f"{prefix}.out", (h, width), residual_std(model), COLUMNS)
    if mixer.bias:
        held["out_bias"] = Weight(f"{prefix}.out_bias", (h,), INIT_STD, WHOLE)
    return held


def _kernel(name: str, channels: int, length: int) -> Weight:
    return Weight(name, (channels, length), 1 / math.sqrt(3 * length), ROWS)


def _vector(name: str, size: int) -> Weight:
    return Weight(name, (size,), INIT_STD, ROWS)


def gated_delta(model: ModelSpec, mixer: GatedDeltaRule, prefix: str) -> dict[str, Weight]:
    """Queries, keys, values, gates, decays and rates have one input and are one parameter, and so are the convolutions
    of the first three, and both vectors of heads."""
    h, keys, values = model.hidden_size, mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    convolved = {"q": keys, "k": keys, "v": values}
    columns = {**convolved, "gate": values, "decay": mixer.value_heads, "rate": mixer.value_heads}
    held = {name: Weight(f"{prefix}.{name}", (count, h), INIT_STD, ROWS) for name, count in columns.items()}
    held |= {
        f"{name}_kernel": _kernel(f"{prefix}.{name}_kernel", count, mixer.kernel) for name, count in convolved.items()
    }
    held |= {name: _vector(f"{prefix}.{name}", mixer.value_heads) for name in ("log_rate", "decay_bias")}
    held["norm"] = norm(f"{prefix}.norm", mixer.value_dim, WHOLE_BY_HEADS)
    held["out"] = Weight(f"{prefix}.out", (h, values), residual_std(model), COLUMNS)
    return held


def kimi_delta(model: ModelSpec, mixer: KimiDelta, prefix: str) -> dict[str, Weight]:
    """Queries, keys, values, rates and, in full rank, gates have the layer's input and are one parameter; so are the
    latents of decays and of gates, which every rank has whole, and the vectors of decays."""
    h, size, width = model.hidden_size, mixer.head_dim, mixer.heads * mixer.head_dim
    columns = {"q": width, "k": width, "v": width, "rate": mixer.heads}
    if mixer.full_rank_gate:
        columns["gate"] = width
    latents = ["decay"] if mixer.full_rank_gate else ["decay", "gate"]
    held = {name: Weight(f"{prefix}.{name}", (count, h), INIT_STD, ROWS) for name, count in columns.items()}
    for name in latents:
        held[f"{name}_down"] = Weight(f"{prefix}.{name}_down", (size, h), INIT_STD, WHOLE)
        held[f"{name}_up"] = Weight(f"{prefix}.{name}_up", (width, size), INIT_STD, ROWS)
    held |= {f"{name}_kernel": _kernel(f"{prefix}.{name}_kernel", width, mixer.kernel) for name in "qkv"}
    held["decay_bias"] = _vector(f"{prefix}.decay_bias", width)
    held["log_rate"] = _vector(f"{prefix}.log_rate", mixer.heads)
    held["norm"] = norm(f"{prefix}.norm", size, WHOLE_BY_HEADS)
    held["out"] = Weight(f"{prefix}.out", (h, width), residual_std(model), COLUMNS)
    return held
