"""torchtitan 0.2.2's model of our shape, with our initial values in its parameters.

torchtitan's Llama is used for dense models; its Qwen3 for those that need what Llama lacks (tied embeddings, norms of
queries and keys, a head size that is not hidden size over heads). Of layers that numbers do not describe it has gpt-oss
and Llama 4 (`workloads.adapters.mixtures.torchtitan_args`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import ParallelizeFunction, TrainSpec

from workloads.adapters.mixtures.torchtitan_args import kinds_spec
from workloads.adapters.mixtures.torchtitan_weights import value_of
from workloads.adapters.sharded_copy import copy_whole
from workloads.engine.collectives.parameters import initial_part
from workloads.rules.torchtitan_kinds import kinds_family
from workloads.rules.torchtitan_support import torchtitan_model
from workloads.spec import weights
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight

FLAVOR = "own"
_BLOCK = {
    "attention.wq": "attention.q",
    "attention.wk": "attention.k",
    "attention.wv": "attention.v",
    "attention.wo": "attention.o",
    "feed_forward.w1": "ffn.gate",
    "feed_forward.w2": "ffn.down",
    "feed_forward.w3": "ffn.up",
}
"""torchtitan's names of a layer's matrices, and ours (`workloads.spec.weights`). Norms have the same names."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
"""Prefixes that compilation, recomputation and DDP insert into names."""


def train_spec(e: Experiment) -> TrainSpec:
    """Model specification for torchtitan's trainer: the class, how it is parallelised, and ``FLAVOR``, our shape."""
    if (kinds := kinds_family(e.model)) is not None:
        return kinds_spec(e, kinds, FLAVOR)
    family = torchtitan_model(e.model)
    spec: TrainSpec = importlib.import_module(f"torchtitan.models.{family}").get_train_spec()
    spec.model_args = {FLAVOR: _llama(e.model) if family == "llama3" else _qwen(e)}
    if e.model.tie_embeddings:
        spec.parallelize_fn = partial(_parallelize_tied, spec.parallelize_fn)
    return spec


def _parallelize_tied(parallelize: ParallelizeFunction, model: Any, *rest: Any) -> nn.Module:
    """Separate the tied weights before they are sharded.

    torchtitan shards embedding and head separately and ties them when they are initialised. From torch 2.12 on, FSDP
    refuses groups that share a weight which was one parameter when it was sharded.
    """
    model.output.weight = nn.Parameter(torch.empty_like(model.output.weight))
    return parallelize(model, *rest)


def _llama(m: ModelSpec) -> TransformerModelArgs:
    return TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=m.num_heads,
        n_kv_heads=m.num_kv_heads,
        vocab_size=m.vocab_size,
        # torchtitan rounds 2/3 of 4 h up to a multiple of this; with the multiplier below, the result is one multiple
        multiple_of=m.ffn_hidden_size,
        ffn_dim_multiplier=m.ffn_hidden_size / (8 * m.hidden_size),
        norm_eps=m.norm_eps,
        rope_theta=m.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )


def _qwen(e: Experiment) -> Qwen3ModelArgs:
    m = e.model
    return Qwen3ModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=m.num_heads,
        n_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        hidden_dim=m.ffn_hidden_size,
        vocab_size=m.vocab_size,
        norm_eps=m.norm_eps,
        rope_theta=m.rope_theta,
        max_seq_len=e.seq_len,
        qk_norm=m.qk_norm,
        enable_weight_tying=m.tie_embeddings,
    )


@torch.no_grad()
def fill(parts: Iterable[nn.Module], e: Experiment) -> None:
    """Set every parameter to our seed's values."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if e.model.layers is not None:
                whole = value_of(e.model, _plain(name), partial(_initial, e, parameter.device))
                copy_whole(whole, parameter)
                continue
            copy_whole(to_theirs(e.model, name, _initial(e, parameter.device, weight_of(e.model, name))), parameter)


def _initial(e: Experiment, device: torch.device, weight: Weight) -> Tensor:
    return initial_part(weight, e.seed, device, {})


def weight_of(m: ModelSpec, name: str) -> Weight:
    """Our weight for one of torchtitan's parameters. A tied embedding is one parameter in torchtitan too."""
    ends = {
        "tok_embeddings.weight": weights.embedding,
        "norm.weight": weights.final_norm,
        "output.weight": weights.head,
    }
    name = _plain(name)
    if name in ends:
        return ends[name](m)
    _, layer, short = name.removesuffix(".weight").split(".", 2)
    prefix = f"layers.{layer}"
    block_weights = {weight.name: weight for weight in weights.block(m, prefix, routed=False)}
    return block_weights[f"{prefix}.{_BLOCK.get(short, short)}"]


def to_theirs(m: ModelSpec, name: str, value: Tensor) -> Tensor:
    """Convert one of our whole weights to torchtitan's parameter ``name``. Its Llama rotates neighbouring elements of a
    head; we and its Qwen3 rotate the halves, so the rows of queries and keys are reordered for Llama."""
    return value.unflatten(0, (-1, 2, m.head_dim // 2)).transpose(1, 2).flatten(0, 2) if _pairs(m, name) else value


def to_ours(m: ModelSpec, name: str, value: Tensor) -> Tensor:
    """Inverse of `to_theirs`."""
    return value.unflatten(0, (-1, m.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) if _pairs(m, name) else value


def _pairs(m: ModelSpec, name: str) -> bool:
    return torchtitan_model(m) == "llama3" and _plain(name).endswith(("attention.wq.weight", "attention.wk.weight"))


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
