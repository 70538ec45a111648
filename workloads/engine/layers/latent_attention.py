"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on one tensor-parallel rank.

Shapes: B sequences, S tokens of a sequence on this rank, T = B*S tokens (T_s = T/tp of them between tensor-parallel
regions with sequence parallelism, else T), D hidden size, N heads of this rank. A query and a key have Q = P + R
numbers: P without position, and R that are rotated. A value has V. C is the size of a latent, of queries or of keys and
values.

    down        latents and the rotated key       [T_s, C_q + C_kv + R]   whole on every rank, each for its own tokens
    norms       of both latents                   [T_s, C]
    up          queries [T, N, Q]; the part of keys without position, and values, side by side [T, N, P + V]
                                                  column-parallel: each rank makes its own heads
    rotation    of the R numbers of each query, and of the one key that all heads share; none in Kimi Linear
    attention   scores over Q, with 1 / sqrt(Q); values of size V
    out         [T_s, D]                          row-parallel

So the ranks gather the latents and the shared key instead of the hidden states, of which DeepSeek-V3 has 3.4 times as
many numbers. Projecting the rank's tokens by whole matrices is as much work as projecting all tokens by parts of them.
Every rank's heads add to the gradient of the shared key: it is summed like the gradient of a column-parallel layer's
input. Without a latent for queries (DeepSeek-V2-Lite), queries are column-parallel in the hidden states.

The rotation is `workloads.engine.ops.rope`; DeepSeek's weights store their rotated rows in another order.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from workloads.engine.collectives.context_parallel import ContextParallel, context_attention
from workloads.engine.collectives.document_exchange import packed_attention
from workloads.engine.collectives.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
    gather_tokens,
)
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.kind_ops.document_attention import Seen
from workloads.engine.layers.norm import RMSNorm
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.ops.attention import attention
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.spec import weights
from workloads.spec.model_spec import ModelSpec


class LatentAttention(nn.Module):
    recomputes = ("rope", "mla_up")

    def __init__(
        self,
        prefix: str,
        model: ModelSpec,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
        *,
        rotated: bool = True,
    ) -> None:
        """``rotated``: whether queries and the shared key are rotated."""
        super().__init__()
        assert model.mla is not None
        self.batch, self.tp, self.cp, self.shape, self.rotated = batch, tp, cp, model.mla, rotated
        self.heads = model.num_heads // tp.size
        attention_weights = weights.attention(model, prefix)
        with_latent = model.mla.q_lora_rank > 0
        downs = (
            [attention_weights["q_down"], attention_weights["kv_down"]]
            if with_latent
            else [attention_weights["kv_down"]]
        )
        self.down = WholeLinear(downs, shares_input=not with_latent)
        self.q_norm = RMSNorm(attention_weights["q_norm"], model.norm_eps) if with_latent else None
        self.kv_norm = RMSNorm(attention_weights["kv_norm"], model.norm_eps)
        self.q_up = ColumnParallelLinear(
            [attention_weights["q_up" if with_latent else "q"]], tp, shares_input=not with_latent
        )
        self.kv_up = ColumnParallelLinear([attention_weights["kv_up"]], tp)
        self.out = RowParallelLinear(attention_weights["o"], tp, "attention")
        self.recomputations: dict[str, RecomputeRegistry] = {}

    def forward(self, x_TD: Tensor, cos_SR: Tensor, sin_SR: Tensor, seen: Seen | None = None) -> Tensor:
        shape = self.shape
        latents = [shape.q_lora_rank] * (self.q_norm is not None) + [shape.kv_lora_rank]
        *q_latent_TC, kv_latent_TC, key_TR = self.down(x_TD).split([*latents, shape.qk_rope_head_dim], dim=1)
        q_input = x_TD if self.q_norm is None else self.q_norm(_one_head(*q_latent_TC)).view_as(*q_latent_TC)
        kv_input = self.kv_norm(_one_head(kv_latent_TC)).view_as(kv_latent_TC)
        q_BSNQ, kv_BSNX = self._heads(self.q_up(q_input)), self._heads(self.kv_up(kv_input))
        key_BS1R = gather_tokens(key_TR, self.tp).view(self.batch, -1, 1, shape.qk_rope_head_dim)
        q_BSNQ, key_BS1R = self._rotate(q_BSNQ, key_BS1R, cos_SR, sin_SR)
        k_BSNP, v_BSNV = kv_BSNX.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=3)
        k_BSNQ = _with_shared(k_BSNP, key_BS1R)
        # ``mla_up`` recomputes queries and the fused KV up-projection from the latents, which the norms save. ``rope``
        # recomputes keys from the KV up-projection, which the values keep alive. Queries are excluded from ``rope``
        # because their input is as large as they are.
        up, rope = self.recomputations.get("mla_up"), self.recomputations.get("rope")
        kv_latent_TC, k_BSNP, shared = kv_latent_TC.detach(), k_BSNP.detach(), key_BS1R.detach()
        if up is not None and q_latent_TC:
            up.register((q_BSNQ,), partial(self._recompute_queries, q_latent_TC[0].detach(), cos_SR, sin_SR))
        if up is not None and rope is not None:
            up.register((kv_BSNX, k_BSNQ), partial(self._recompute_up_and_keys, kv_latent_TC, shared))
        elif up is not None:
            up.register((kv_BSNX,), partial(self._recompute_up, kv_latent_TC))
        elif rope is not None:
            rope.register((k_BSNQ,), lambda: (_with_shared(k_BSNP, shared),))
        q_BNSQ, k_BNSQ, v_BNSV = (x.transpose(1, 2) for x in (q_BSNQ, k_BSNQ, v_BSNV))
        if seen is not None:
            o_BNSV = packed_attention(q_BNSQ, k_BNSQ, v_BNSV, self.cp, seen)
        elif self.cp is None:
            o_BNSV = attention(q_BNSQ, k_BNSQ, v_BNSV, causal=True)
        else:
            o_BNSV = context_attention(q_BNSQ, k_BNSQ, v_BNSV, *self.cp)
        return self.out(o_BNSV.transpose(1, 2).reshape(-1, self.heads * shape.v_head_dim))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(self.batch, -1, self.heads, x.shape[1] // self.heads)

    def _rotate(self, q_BSNQ: Tensor, key_BS1R: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor]:
        """Queries with their last R numbers rotated, and the rotated key; both as they are in layers without
        positions."""
        if not self.rotated:
            return q_BSNQ, key_BS1R
        q_BSNP, q_BSNR = q_BSNQ.split([self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim], dim=3)
        q_BSNR, key_BS1R = apply_rope(q_BSNR, key_BS1R, cos_SR, sin_SR)
        return torch.cat([q_BSNP, q_BSNR], dim=3), key_BS1R

    def _recompute_queries(self, latent_TC: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor]:
        q_BSNQ = self._heads(self.q_up(_normed(latent_TC, self.q_norm)))
        a_key_BS1R = q_BSNQ[:, :, :1, : self.shape.qk_rope_head_dim]  # a placeholder for the key
        return (self._rotate(q_BSNQ, a_key_BS1R, cos_SR, sin_SR)[0],)

    def _recompute_up(self, latent_TC: Tensor) -> tuple[Tensor]:
        return (self._heads(self.kv_up(_normed(latent_TC, self.kv_norm))),)

    def _recompute_up_and_keys(self, latent_TC: Tensor, key_BS1R: Tensor) -> tuple[Tensor, Tensor]:
        (kv_BSNX,) = self._recompute_up(latent_TC)
        return kv_BSNX, _with_shared(kv_BSNX[..., : self.shape.qk_nope_head_dim], key_BS1R)


def _one_head(latent_TC: Tensor) -> Tensor:
    """Some columns of the down projection as one head of one sequence, a view that norms read in place: [1, T, 1,
    C]."""
    return latent_TC.unsqueeze(1).unsqueeze(0)


def _normed(latent_TC: Tensor, norm: RMSNorm | None) -> Tensor:
    """Output of the norm's module, without registering a recomputation."""
    assert norm is not None
    return rms_norm(_one_head(latent_TC), norm.weight, norm.eps).view_as(latent_TC)


def _with_shared(k_BSNP: Tensor, key_BS1R: Tensor) -> Tensor:
    """Keys of every head: each head's part without position, and the rotated part that all heads share."""
    return torch.cat([k_BSNP, key_BS1R.expand(-1, -1, k_BSNP.shape[2], -1)], dim=3)
