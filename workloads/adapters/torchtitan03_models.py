"""torchtitan 0.3's model of our shape, with our initial values in its parameters.

Its Llama is used for dense models; its Qwen3 for those that need what Llama lacks (tied embeddings, norms of queries
and keys, a head size that is not hidden size over heads). Queries, keys and values are one matrix, as in its flavors.
Experts and latent attention are in `workloads.adapters.mixtures.torchtitan03_experts`; of layers that numbers do not
describe it has gpt-oss (`workloads.adapters.mixtures.torchtitan03_gpt_oss`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec as TheirSpec

from workloads.adapters.mixtures.torchtitan_weights import value_of
from workloads.adapters.sharded_copy import copy_whole
from workloads.engine.collectives.parameters import initial_part
from workloads.rules.torchtitan_support import torchtitan_model
from workloads.spec import weights
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight

_BLOCK = {
    "attention.wo": "attention.o",
    "feed_forward.w1": "ffn.gate",
    "feed_forward.w2": "ffn.down",
    "feed_forward.w3": "ffn.up",
}
"""torchtitan's names of a layer's matrices, and ours (`workloads.spec.weights`). Norms have the same names."""
_FUSED = "attention.qkv_linear.wqkv"
"""torchtitan's matrix of queries, keys and values."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that compilation and recomputation insert into names."""
_INIT: Mapping[str, Any] = {"weight": skip_param_init}


def model_spec(e: Experiment) -> TheirSpec:
    """Model specification for torchtitan's trainer: the shape, and how it is parallelised and split into stages."""
    m, is_llama = e.model, torchtitan_model(e.model) == "llama3"
    model: Any
    model, block = (Llama3Model, Llama3TransformerBlock) if is_llama else (Qwen3Model, Qwen3TransformerBlock)
    rotary = ComplexRoPE if is_llama else CosSinRoPE

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=m.norm_eps, param_init=_INIT)

    def layer() -> Any:
        return block.Config(
            attention_norm=norm(m.hidden_size),
            ffn_norm=norm(m.hidden_size),
            attention=make_gqa_config(
                dim=m.hidden_size,
                n_heads=m.num_heads,
                n_kv_heads=m.num_kv_heads,
                head_dim=None if is_llama else m.head_dim,
                wqkv_param_init=_INIT,
                wo_param_init=_INIT,
                inner_attention=get_attention_config("flex"),
                fuse_qkv=True,
                qk_norm=norm(m.head_dim) if m.qk_norm else None,
                rope=rotary.Config(dim=m.head_dim, max_seq_len=e.seq_len, theta=m.rope_theta),
            ),
            feed_forward=make_ffn_config(
                dim=m.hidden_size, hidden_dim=m.ffn_hidden_size, w1_param_init=_INIT, w2w3_param_init=_INIT
            ),
        )

    made = [layer() for _ in range(m.num_layers)] if is_dense(m) else []
    parallelize = parallelize_llama if is_llama else parallelize_qwen3
    if m.layers is None and not is_dense(m):
        from workloads.adapters.mixtures.torchtitan03_experts import parts

        model, made, parallelize = parts(e)
    elif m.layers is not None:
        from workloads.adapters.mixtures import torchtitan03_gpt_oss as gpt_oss

        model, made, parallelize = gpt_oss.MODEL, gpt_oss.layers(e), gpt_oss.PARALLELIZE
    return TheirSpec(
        name="ultrasweep",
        flavor=m.name,
        model=model.Config(
            dim=m.hidden_size,
            vocab_size=m.vocab_size,
            enable_weight_tying=m.tie_embeddings,
            tok_embeddings=Embedding.Config(num_embeddings=m.vocab_size, embedding_dim=m.hidden_size, param_init=_INIT),
            norm=norm(m.hidden_size),
            lm_head=Linear.Config(in_features=m.hidden_size, out_features=m.vocab_size, param_init=_INIT),
            layers=made,
        ),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def is_dense(m: ModelSpec) -> bool:
    """Whether its Llama or its dense Qwen3 has the shape."""
    return m.layers is None and m.moe is None and m.mla is None


@torch.no_grad()
def fill(parts: Iterable[nn.Module], e: Experiment) -> None:
    """Set every parameter to our seed's values."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if not is_dense(e.model):
                initial = partial(initial_part, seed=e.seed, device=parameter.device, axes={})
                copy_whole(value_of(e.model, _plain(name), initial), parameter)
                continue
            own = [initial_part(weight, e.seed, parameter.device, {}) for weight in weights_of(e.model, name)]
            copy_whole(to_theirs(e.model, name, own), parameter)


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def weights_of(m: ModelSpec, name: str) -> list[Weight]:
    """Our weights in one of torchtitan's parameters. A tied embedding is one parameter in torchtitan too."""
    ends = {
        "tok_embeddings.weight": weights.embedding,
        "norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    name = _plain(name)
    if name in ends:
        return [ends[name](m)]
    _, layer, short = name.removesuffix(".weight").split(".", 2)
    ours = ["attention.q", "attention.k", "attention.v"] if short == _FUSED else [_BLOCK.get(short, short)]
    block = {weight.name: weight for weight in weights.block(m, f"layers.{layer}", routed=False)}
    return [block[f"layers.{layer}.{own}"] for own in ours]


def to_theirs(m: ModelSpec, name: str, own: list[Tensor]) -> Tensor:
    """torchtitan's parameter ``name`` from our whole weights in it.

    Rows of the queries, key and value of one group of heads are next to each other there. Its Llama rotates
    neighbouring elements of a head; we and its Qwen3 rotate the halves, so the rows of queries and keys are reordered
    for Llama.
    """
    if len(own) == 1:
        return own[0]
    if torchtitan_model(m) == "llama3":
        pairs = [x.unflatten(0, (-1, 2, m.head_dim // 2)).transpose(1, 2).flatten(0, 2) for x in own[:2]]
        own = [*pairs, own[2]]
    return torch.cat([x.unflatten(0, (m.num_kv_heads, -1)) for x in own], dim=1).flatten(0, 1)


def to_ours(m: ModelSpec, name: str, value: Tensor) -> list[Tensor]:
    """Inverse of `to_theirs`."""
    if len(weights_of(m, name)) == 1:
        return [value]
    groups = value.unflatten(0, (m.num_kv_heads, -1))
    sizes = [m.num_heads // m.num_kv_heads * m.head_dim, m.head_dim, m.head_dim]
    own = [x.flatten(0, 1) for x in groups.split(sizes, dim=1)]
    if torchtitan_model(m) == "llama3":
        halves = [x.unflatten(0, (-1, m.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) for x in own[:2]]
        own = [*halves, own[2]]
    return own
