"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on one tensor-parallel rank.

Shapes: B sequences, S tokens of a sequence on this rank, T = B*S tokens (T_s = T/tp of them between tensor-parallel
regions with sequence parallelism, else T), D hidden size, N heads of this rank. A query and a key have Q = P + R
numbers: P without position, and R that are rotated. A value has V. C is a latent's size, of queries or of keys and
values.

    down        latents and the rotated key       [T_s, C_q + C_kv + R]   whole on every rank, each for its own tokens
    norms       of both latents                   [T_s, C]
    up          queries [T, N, Q], and of keys and values side by side what has no position and the values
                [T, N, P + V]                     column-parallel: each rank makes its own heads
    rotation    of the R numbers of each query, and of the one key that all heads share
    attention   scores over Q, with 1 / sqrt(Q); values of size V
    out         [T_s, D]                          row-parallel

So what the ranks gather is the latents and the shared key, not the hidden states, of which DeepSeek-V3 has 3.4 times as
many numbers. Projecting the rank's tokens by whole matrices is as much work as projecting all tokens by their parts.
Every rank's heads add to the gradient of the shared key: it is summed like the gradient of a column-parallel layer's
input. Without a latent for queries (DeepSeek-V2-Lite) they are column-parallel in the hidden states.

The rotation is that of `workloads.engine.ops.rope`; DeepSeek's weights have their rotated rows in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads import weights
from workloads.engine.context_parallel import ContextParallel, context_attention
from workloads.engine.norm import RMSNorm
from workloads.engine.ops.attention import attention
from workloads.engine.ops.rope import apply_rope
from workloads.engine.recompute import Recipes
from workloads.engine.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    WholeLinear,
    gather_tokens,
)
from workloads.experiment import ModelSpec


class LatentAttention(nn.Module):
    recomputes = "rope"

    def __init__(
        self, prefix: str, model: ModelSpec, batch: int, tp: TensorParallel, cp: ContextParallel | None = None
    ) -> None:
        super().__init__()
        assert model.mla is not None
        self.batch, self.tp, self.cp, self.shape = batch, tp, cp, model.mla
        self.heads = model.num_heads // tp.size
        own = weights.attention(model, prefix)
        with_latent = model.mla.q_lora_rank > 0
        self.down = WholeLinear([own["q_down"], own["kv_down"]] if with_latent else [own["kv_down"]])
        self.q_norm = RMSNorm(own["q_norm"], model.norm_eps) if with_latent else None
        self.kv_norm = RMSNorm(own["kv_norm"], model.norm_eps)
        self.q_up = ColumnParallelLinear([own["q_up" if with_latent else "q"]], tp)
        self.kv_up = ColumnParallelLinear([own["kv_up"]], tp)
        self.out = RowParallelLinear(own["o"], tp)
        self.recipes: Recipes | None = None

    def forward(self, x_TD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        shape = self.shape
        latents = [shape.q_lora_rank] * (self.q_norm is not None) + [shape.kv_lora_rank]
        *q_latent, kv_latent, key_TR = self.down(x_TD).split([*latents, shape.qk_rope_head_dim], dim=1)
        q_input = x_TD if self.q_norm is None else _normed(q_latent[0], self.q_norm)
        q_BSNQ = self._heads(self.q_up(q_input))
        kv_BSNX = self._heads(self.kv_up(_normed(kv_latent, self.kv_norm)))
        key_BS1R = gather_tokens(key_TR, self.tp).view(self.batch, -1, 1, shape.qk_rope_head_dim)
        q_BSNP, q_BSNR = q_BSNQ.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=3)
        k_BSNP, v_BSNV = kv_BSNX.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=3)
        q_BSNR, key_BS1R = apply_rope(q_BSNR, key_BS1R, cos_SR, sin_SR)
        q_BSNQ = torch.cat([q_BSNP, q_BSNR], dim=3)
        k_BSNQ = _with_shared(k_BSNP, key_BS1R)
        if self.recipes is not None:
            # Backward keeps the values, which are a view of what the keys are made of. Queries are not made again: what
            # they are made of is as large as they are.
            plain, shared = k_BSNP.detach(), key_BS1R.detach()
            self.recipes.note((k_BSNQ,), lambda: (_with_shared(plain, shared),))
        q_BNSQ, k_BNSQ, v_BNSV = (x.transpose(1, 2) for x in (q_BSNQ, k_BSNQ, v_BSNV))
        if self.cp is None:
            o_BNSV = attention(q_BNSQ, k_BNSQ, v_BNSV, causal=True)
        else:
            o_BNSV = context_attention(q_BNSQ, k_BNSQ, v_BNSV, *self.cp)
        return self.out(o_BNSV.transpose(1, 2).reshape(-1, self.heads * shape.v_head_dim))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(self.batch, -1, self.heads, x.shape[1] // self.heads)


def _normed(latent_TC: Tensor, norm: RMSNorm) -> Tensor:
    """Some columns of the down projection, normed where they lie: as one head of one sequence, which is not copied."""
    return norm(latent_TC.unsqueeze(1).unsqueeze(0)).view(latent_TC.shape)


def _with_shared(k_BSNP: Tensor, key_BS1R: Tensor) -> Tensor:
    """Keys of every head: their own part and the one that all share."""
    return torch.cat([k_BSNP, key_BS1R.expand(-1, -1, k_BSNP.shape[2], -1)], dim=3)
