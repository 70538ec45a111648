"""Grouped-query attention of layers that differ by kind, with the options of published models.

Shapes as in `workloads.engine.layers.block`; V is the size of values, R the rotated columns of a head.

    qkv, gate   one column-parallel product [T, N H + K H + K V (+ N V or N)]; biases of queries, keys and values.
                Values may be the projection of keys (Gemma 4)
    norms       of every head of queries and keys, with a weight (Qwen3) or without one (Llama 4), or of all heads
                together (MiniMax-M2); of values, too
    scale       of scores other than 1 / sqrt(H): a factor of queries, that of their norm's weight if there is one
    rotation    of the first R columns of queries and keys, or of none
    attention   `workloads.engine.kind_ops.span_attention`: window, chunks, sinks, cap, scaled values
    gate        of the output, from the layer's input, before the output projection
    out         [T_s, D], row-parallel; its bias is added once, to the sum

The rotary tables of a layer are those of its base and number of columns; a layer without positions gets some tables and
reads none.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.engine.collectives.context_parallel import ContextParallel, context_attention
from workloads.engine.collectives.document_exchange import packed_attention
from workloads.engine.collectives.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.collectives.ulysses import ulysses_attention
from workloads.engine.collectives.whole_norm import WholeNorm, normed_again, whole_norm
from workloads.engine.collectives.window_exchange import windowed_attention
from workloads.engine.kind_ops.document_attention import Seen
from workloads.engine.kind_ops.gated_output import gated_output
from workloads.engine.kind_ops.span_attention import Reach, span_attention
from workloads.engine.layers.norm import RMSNorm
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.layers.vector import Vector
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.spec import kind_weights
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_spec import ModelSpec

SCORE_CAP = 50.0
"""Largest score of models with a cap: ``attn_logit_softcapping`` of Gemma 2 (arXiv:2408.00118, section 2), the only
family that has one. Files of models say only that there is a cap."""


class KindAttention(nn.Module):
    recomputes = ("rope", "swiglu")

    def __init__(
        self,
        prefix: str,
        model: ModelSpec,
        mixer: Attention,
        rotated: int,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
    ) -> None:
        """``rotated``: columns of a head that are rotated."""
        super().__init__()
        self.batch, self.cp, self.mixer, self.eps = batch, cp, mixer, model.norm_eps
        self.heads, self.kv_heads = mixer.heads // tp.size, max(1, mixer.kv_heads // tp.size)
        self.rotated = rotated
        self.reach = reach_of(mixer)
        held = kind_weights.attention(model, mixer, prefix)
        products = [held[name] for name in ("q", "k", "v", "gate") if name in held]
        self.columns = [self.heads * mixer.head_dim, self.kv_heads * mixer.head_dim]
        self.columns += [] if mixer.shared_kv else [self.kv_heads * mixer.value_dim]
        self.gates = {"none": 0, "head": 1, "element": mixer.value_dim}[mixer.gate]
        """Gates of each head."""
        self.qkv = ColumnParallelLinear(products, tp)
        biases = [held[f"{name}_bias"] for name in "qkv" if f"{name}_bias" in held]
        self.qkv_bias = Vector(biases, tp) if biases else None
        self.out = RowParallelLinear(held["o"], tp, "attention" if mixer.gate == "none" else "swiglu")
        self.out_bias = Vector([held["o_bias"]], tp) if mixer.output_bias else None
        self.query_factor = mixer.score_scale * math.sqrt(mixer.head_dim) if mixer.score_scale else 1.0
        """Of queries, whose scores the kernels divide by the root of the size of a head."""
        self.q_norm = RMSNorm(held["q_norm"], model.norm_eps, self.query_factor) if mixer.norm == "head" else None
        self.k_norm = RMSNorm(held["k_norm"], model.norm_eps) if mixer.norm == "head" else None
        whole = [held[name] for name in ("q_whole_norm", "k_whole_norm") if name in held]
        """Weights of norms over all heads."""
        self.whole_norm = Vector(whole, tp) if whole else None
        columns = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        self.of_whole = WholeNorm(columns, held["k"].copies(tp.size), model.norm_eps, tp)
        self.sinks = Vector([held["sinks"]], tp) if mixer.sinks else None
        self.recomputations: dict[str, RecomputeRegistry] = {}

    def forward(self, x_TD: Tensor, cos_SR: Tensor, sin_SR: Tensor, seen: Seen | None = None) -> Tensor:
        projected, gate_BSNG, gate_columns = self.qkv(x_TD), None, self.heads * self.gates
        if self.qkv_bias is not None:
            projected = projected + F.pad(self.qkv_bias.weight, (0, gate_columns))
        q_TC, k_TC, *others = projected.split([*self.columns, *([gate_columns] if self.gates else [])], dim=1)
        q_BSNH, k_BSKH = self._heads(q_TC, self.heads), self._heads(k_TC, self.kv_heads)
        v_BSKV = k_BSKH if self.mixer.shared_kv else self._heads(others[0], self.kv_heads)
        if self.gates:
            gate_BSNG = self._heads(others[-1], self.heads)
        plain_q, plain_k, plain_v = q_BSNH.detach(), k_BSKH.detach(), v_BSKV.detach()
        q_BSNH, k_BSKH, roots_T2 = self._normed(q_BSNH, k_BSKH)
        q_BSNH, k_BSKH = self._rotate(q_BSNH, k_BSKH, cos_SR, sin_SR)
        if "rope" in self.recomputations and (self.rotated or self.mixer.norm != "none"):
            self.recomputations["rope"].register(
                (q_BSNH, k_BSKH),
                lambda: self._rotate(*self._normed(plain_q, plain_k, roots_T2)[:2], cos_SR, sin_SR),
            )
        if self.mixer.value_norm:
            v_BSKV = self._plain_norm(v_BSKV)
            if "rope" in self.recomputations:
                self.recomputations["rope"].register((v_BSKV,), lambda: (self._plain_norm(plain_v),))
        q_BNSH, k_BKSH, v_BKSV = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKV))
        o_BSNV = self._attend(q_BNSH, k_BKSH, v_BKSV, seen).transpose(1, 2)
        if gate_BSNG is not None:
            plain_o, plain_gate = o_BSNV.detach(), gate_BSNG.detach()
            o_BSNV = gated_output(o_BSNV, gate_BSNG)
            if "swiglu" in self.recomputations:
                self.recomputations["swiglu"].register((o_BSNV,), lambda: (gated_output(plain_o, plain_gate),))
        y_TD: Tensor = self.out(o_BSNV.reshape(-1, self.heads * self.mixer.value_dim))
        return y_TD if self.out_bias is None else y_TD + self.out_bias.weight

    def _heads(self, x_TC: Tensor, heads: int) -> Tensor:
        return x_TC.unflatten(0, (self.batch, -1)).unflatten(2, (heads, -1))

    def _attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, seen: Seen | None) -> Tensor:
        if seen is not None:
            assert self.reach == Reach() and self.sinks is None, "refused by the rules"
            return packed_attention(q_BNSH, k_BKSH, v_BKSV, self.cp, seen)
        sinks_N = None if self.sinks is None else self.sinks.weight
        if self.cp is None:
            return span_attention(q_BNSH, k_BKSH, v_BKSV, self.reach, sinks_N)
        axis, kind = self.cp
        if kind == "ulysses":
            own = None if sinks_N is None else sinks_N.unflatten(0, (axis.size, -1))[axis.rank]
            return ulysses_attention(q_BNSH, k_BKSH, v_BKSV, axis, partial(self._local, sinks_N=own))
        if self.reach.window is not None:
            reach = self.reach.window - 1
            return windowed_attention(q_BNSH, k_BKSH, v_BKSV, reach, axis, partial(self._local, sinks_N=sinks_N))
        assert self.reach.chunk is None and self.reach.cap is None, "refused by the rules"
        scaled = v_BKSV if self.reach.value_scale == 1.0 else v_BKSV * self.reach.value_scale
        return context_attention(q_BNSH, k_BKSH, scaled, axis, kind, sinks_N)

    def _local(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, sinks_N: Tensor | None) -> Tensor:
        return span_attention(q_BNSH, k_BKSH, v_BKSV, self.reach, sinks_N)

    def _normed(
        self, q_BSNH: Tensor, k_BSKH: Tensor, roots_T2: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Normed or scaled queries and keys, and what `normed_again` needs of a norm that took a message.
        ``roots_T2``: the same of the norm that runs again."""
        if self.whole_norm is not None:
            if roots_T2 is None:
                return whole_norm(q_BSNH, k_BSKH, self.whole_norm.weight, self.of_whole)
            return *normed_again(q_BSNH, k_BSKH, self.whole_norm.weight, roots_T2), None
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNH = rms_norm(q_BSNH, self.q_norm.scaled_weight(), self.eps)
            k_BSKH = rms_norm(k_BSKH, self.k_norm.weight, self.eps)
        elif self.mixer.norm == "without_weight":
            q_BSNH, k_BSKH = self._plain_norm(q_BSNH, self.query_factor), self._plain_norm(k_BSKH)
        elif self.query_factor != 1.0:
            q_BSNH = q_BSNH * self.query_factor
        return q_BSNH, k_BSKH, None

    def _rotate(self, q_BSNH: Tensor, k_BSKH: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor]:
        if not self.rotated:
            return q_BSNH, k_BSKH
        if self.rotated == self.mixer.head_dim:
            return apply_rope(q_BSNH, k_BSKH, cos_SR, sin_SR)
        first_q, first_k = apply_rope(q_BSNH[..., : self.rotated], k_BSKH[..., : self.rotated], cos_SR, sin_SR)
        rest_q, rest_k = q_BSNH[..., self.rotated :], k_BSKH[..., self.rotated :]
        return torch.cat([first_q, rest_q], -1), torch.cat([first_k, rest_k], -1)

    def _plain_norm(self, x_BSNH: Tensor, factor: float = 1.0) -> Tensor:
        """A norm without a weight."""
        weight = torch.full(x_BSNH.shape[-1:], factor, device=x_BSNH.device, dtype=x_BSNH.dtype)
        return rms_norm(x_BSNH, weight, self.eps)


def reach_of(mixer: Attention) -> Reach:
    """Which keys a query of the layer sees."""
    span = mixer.span
    return Reach(
        window=span.size if isinstance(span, Window) else None,
        chunk=span.size if isinstance(span, Chunk) else None,
        cap=SCORE_CAP if mixer.soft_cap else None,
        value_scale=mixer.value_scale,
    )
