"""Megatron-Core's layers: on Transformer Engine, or its own ones for machines without it.

On Transformer Engine (fused norm and product, fused attention, fp8, grouped products) one thing differs from what its
options alone give: the products accumulate weight gradients in fp32 themselves (`accumulate_in_products`).
Megatron-Core's option for that asks for apex, which only its output layer needs. Of its own layers two parts are
replaced and one added:

- Its attention writes every score: torch's fused attention is used instead (`_Attention`), except in models with
  windows or sinks, which torch's has not.
- Its RMSNorm refuses sequence parallelism: torch's is used, marked so that its gradient is summed over tp (`_Norm`).
- Its router asks whether a product of Transformer Engine exists by a name that is only defined if it does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_size
from torch import Tensor
from torch.nn import functional

from workloads.adapters.mixtures.megatron_kinds import set_norms, stores_scores
from workloads.spec.engine_versions import runs_with
from workloads.spec.experiment import Experiment


def layers(e: Experiment, config: TransformerConfig, virtual: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk, dense and routed ones."""
    if runs_with(e.engine_version) is not None:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual)
    else:
        block = _own_layers(e, config, virtual)
    set_norms(block, e.model, get_transformer_layer_offset(config, vp_stage=virtual))
    return block


def _own_layers(e: Experiment, config: TransformerConfig, virtual: int | None) -> TransformerBlockSubmodules:
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual)
    block.layer_norm = _Norm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = _Norm
        attention = parts.self_attention.submodules
        if not stores_scores(e.model):
            attention.core_attention = ModuleSpec(_Attention)
        if e.model.qk_norm:
            attention.q_layernorm = attention.k_layernorm = _Norm
    return block


def accumulate_in_products(model: torch.nn.Module) -> None:
    """Let every product of Transformer Engine add its weight gradient to the fp32 gradient buffer."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def let_experts_have_biases(model: torch.nn.Module) -> None:
    """Take the sum over one rank out of the products of experts, through which they pass without expert parallelism: a
    bias cannot be added to its result in place."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = module.explicit_expert_comm or get_pg_size(module.tp_group) == 1


def use_fused_adamw(optimizer: Any) -> None:
    """Take torch's fused AdamW: the optimizer takes 54 ms a step instead of 119."""
    for each in optimizer.chained_optimizers:
        for group in each.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


class _Norm(torch.nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Attention(torch.nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Causal attention of queries [S, B, N, H] and possibly fewer keys and values [S, B, K, H]: [S, B, N * H]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)
