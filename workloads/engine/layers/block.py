"""One layer of a transformer: attention and a feed-forward part, with norms before them.

Shapes: B sequences of a micro-batch, S tokens a sequence, T = B*S tokens (T/tp between tensor-parallel regions with
sequence parallelism), D hidden size, N query heads and K key/value heads of this tensor-parallel rank, H head size, F
feed-forward columns of this rank. ``seen``: which keys each query sees if documents are packed into sequences.
"""

from __future__ import annotations

from torch import Tensor, nn

from workloads.engine.collectives.context_parallel import ContextParallel, context_attention
from workloads.engine.collectives.document_exchange import packed_attention
from workloads.engine.collectives.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.kind_ops.document_attention import Seen
from workloads.engine.layers.experts import ExpertParallel, Experts, RoutedFeedForward
from workloads.engine.layers.kind_attention import KindAttention
from workloads.engine.layers.kind_feed_forward import GatedShared, KindFeedForward
from workloads.engine.layers.latent_attention import LatentAttention
from workloads.engine.layers.latent_experts import LatentExperts
from workloads.engine.layers.norm import RMSNorm
from workloads.engine.layers.normed_experts import NormedExperts
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.layers.recurrent import recurrent
from workloads.engine.layers.routing import Router
from workloads.engine.layers.saved_tensors import named
from workloads.engine.ops.attention import attention
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.engine.ops.swiglu import swiglu
from workloads.spec import weights
from workloads.spec.kind_weights import experts as kind_experts
from workloads.spec.kind_weights import (
    feed_forward,
    kind_of,
    norms_beside,
    norms_of_outputs,
    rotation,
    shared_experts,
)
from workloads.spec.layer_kinds.attention import Attention as GroupedAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight


class Attention(nn.Module):
    """Grouped-query attention. With ``qk_norm`` every head of the queries and keys is normed before rotation, with one
    weight of size H for all query heads and one for all key heads (Qwen3, arXiv:2505.09388)."""

    recomputes = "rope"

    def __init__(
        self, prefix: str, model: ModelSpec, batch: int, tp: TensorParallel, cp: ContextParallel | None = None
    ) -> None:
        super().__init__()
        self.batch, self.cp = batch, cp
        self.heads, self.kv_heads = model.num_heads // tp.size, max(1, model.num_kv_heads // tp.size)
        self.head_dim = model.head_dim
        attention_weights = weights.attention(model, prefix)
        self.qkv = ColumnParallelLinear([attention_weights["q"], attention_weights["k"], attention_weights["v"]], tp)
        self.out = RowParallelLinear(attention_weights["o"], tp, "attention")
        self.q_norm = RMSNorm(attention_weights["q_norm"], model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(attention_weights["k_norm"], model.norm_eps) if model.qk_norm else None
        self.recomputations: RecomputeRegistry | None = None

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, seen: Seen | None = None) -> Tensor:
        qkv = self.qkv(x_TD).view(self.batch, -1, self.heads + 2 * self.kv_heads, self.head_dim)
        named("qkv", qkv)
        q_BSNH, k_BSKH, v_BSKH = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.recomputations is None:
            q_BSNH, k_BSKH = self._norm_and_rotate(q_BSNH, k_BSKH, cos_SH, sin_SH)
        else:
            # Recomputation needs the plain queries and keys. They take no extra memory: backward keeps the values,
            # which are a view of the whole projection.
            plain = q_BSNH, k_BSKH
            q_BSNH, k_BSKH = self._norm_and_rotate(q_BSNH, k_BSKH, cos_SH, sin_SH)
            self.recomputations.register(
                (q_BSNH, k_BSKH), lambda q, k: self._norm_and_rotate(q, k, cos_SH, sin_SH), *plain
            )
        named("rope", q_BSNH, k_BSKH)
        q_BNSH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
        if seen is not None:
            o_BNSH = packed_attention(q_BNSH, k_BKSH, v_BKSH, self.cp, seen)
        elif self.cp is None:
            o_BNSH = attention(q_BNSH, k_BKSH, v_BKSH, causal=True)
        else:
            o_BNSH = context_attention(q_BNSH, k_BKSH, v_BKSH, *self.cp)
        named("attention", o_BNSH)
        return self.out(o_BNSH.transpose(1, 2).reshape(-1, self.heads * self.head_dim))

    def _norm_and_rotate(self, q_BSNH: Tensor, k_BSKH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            # Not called as modules: their outputs need no recomputation, since rotation does not save its input.
            q_BSNH = rms_norm(q_BSNH, self.q_norm.weight, self.q_norm.eps)
            k_BSKH = rms_norm(k_BSKH, self.k_norm.weight, self.k_norm.eps)
        return apply_rope(q_BSNH, k_BSKH, cos_SH, sin_SH)


class FeedForward(nn.Module):
    recomputes = "swiglu"

    def __init__(self, parts: dict[str, Weight], tp: TensorParallel, *, shares_input: bool = False) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear([parts["gate"], parts["up"]], tp, shares_input=shares_input)
        self.down = RowParallelLinear(parts["down"], tp, "swiglu")
        self.recomputations: RecomputeRegistry | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up(x_TD)
        product_TF = swiglu(gate_up, for_fp8=self.down.has_one_scale)
        named("gate_up", gate_up)
        named("swiglu", product_TF)
        if self.recomputations is not None:
            self.recomputations.register((product_TF,), lambda gate_up: (swiglu(gate_up),), gate_up)
        return self.down(product_TF)


class Block(nn.Module):
    """Attention and feed-forward part of one layer. ``experts``: how ranks share the experts; None for a dense
    layer."""

    def __init__(
        self,
        layer: int,
        model: ModelSpec,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
        experts: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        self.kind = kind_of(model, layer)
        self.attention_norm, self.ffn_norm = (
            RMSNorm(weights.norm(f"{prefix}.{name}", model.hidden_size), model.norm_eps)
            if self.kind is None or not self.kind.outputs_normed
            else None
            for name in ("attention_norm", "ffn_norm")
        )
        self.attention = _attention(f"{prefix}.attention", model, self.kind, batch, tp, cp)
        self.ffn: nn.Module
        if experts is not None and self.kind is not None:
            self.ffn = _routed(prefix, model, self.kind, experts)
        elif experts is not None:
            shared = weights.shared_experts(model, prefix)
            shared_experts = FeedForward(shared, tp, shares_input=True) if shared else None  # the router saves it too
            parts = weights.experts(model, f"{prefix}.experts")
            router = Router(parts, experts.routing)
            self.ffn = RoutedFeedForward(experts, router, Experts(parts, experts.sizes), shared_experts)
        elif self.kind is None:
            self.ffn = FeedForward(weights.feed_forward(model, f"{prefix}.ffn", model.ffn_hidden_size), tp)
        else:
            self.ffn = _feed_forward(f"{prefix}.ffn", model, self.kind, tp)
        outputs = {} if self.kind is None else norms_of_outputs(model, self.kind, prefix)
        """Norms of the outputs of both parts, with four norms a layer, or in place of the others."""
        self.attention_out_norm, self.ffn_out_norm = (
            RMSNorm(outputs[name], model.norm_eps) if outputs else None
            for name in ("attention_out_norm", "ffn_out_norm")
        )

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        """The norms of the inputs of both parts."""
        return tuple(norm for norm in (self.attention_norm, self.ffn_norm) if norm is not None)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, seen: Seen | None = None) -> Tensor:
        if self.attention_norm is None or self.ffn_norm is None:
            assert self.attention_out_norm is not None and self.ffn_out_norm is not None
            x_TD = x_TD + self.attention_out_norm(self.attention(x_TD, cos_SH, sin_SH, seen))
            return x_TD + self.ffn_out_norm(self.ffn(x_TD))
        if self.attention_out_norm is not None and self.ffn_out_norm is not None:
            x_TD = x_TD + self.attention_out_norm(self.attention(self.attention_norm(x_TD), cos_SH, sin_SH, seen))
            if isinstance(self.ffn, NormedExperts):
                return x_TD + self.ffn_out_norm(self.ffn(self.ffn_norm(x_TD), x_TD))
            return x_TD + self.ffn_out_norm(self.ffn(self.ffn_norm(x_TD)))
        named("input", x_TD)
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), cos_SH, sin_SH, seen)
        named("input", x_TD)
        return x_TD + self.ffn(self.ffn_norm(x_TD))


class MixerBlock(nn.Module):
    """A layer of a mixer alone (Nemotron-H)."""

    def __init__(
        self, layer: int, model: ModelSpec, batch: int, tp: TensorParallel, cp: ContextParallel | None = None
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        self.attention_norm = RMSNorm(weights.norm(f"{prefix}.attention_norm", model.hidden_size), model.norm_eps)
        self.attention = _attention(f"{prefix}.attention", model, kind_of(model, layer), batch, tp, cp)

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return (self.attention_norm,)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, seen: Seen | None = None) -> Tensor:
        return x_TD + self.attention(self.attention_norm(x_TD), cos_SH, sin_SH, seen)


class FeedForwardBlock(nn.Module):
    """A layer of an MLP alone (Nemotron-H)."""

    def __init__(self, layer: int, model: ModelSpec, tp: TensorParallel, experts: ExpertParallel | None) -> None:
        super().__init__()
        prefix, kind = f"layers.{layer}", kind_of(model, layer)
        assert kind is not None
        self.ffn_norm = RMSNorm(weights.norm(f"{prefix}.ffn_norm", model.hidden_size), model.norm_eps)
        self.ffn = (
            _feed_forward(f"{prefix}.ffn", model, kind, tp)
            if experts is None
            else _routed(prefix, model, kind, experts)
        )

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return (self.ffn_norm,)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, seen: Seen | None = None) -> Tensor:
        return x_TD + self.ffn(self.ffn_norm(x_TD))


AnyBlock = Block | MixerBlock | FeedForwardBlock


def block_of(
    layer: int,
    model: ModelSpec,
    batch: int,
    tp: TensorParallel,
    cp: ContextParallel | None = None,
    experts: ExpertParallel | None = None,
) -> AnyBlock:
    """The module of a layer of any kind, from the arguments of `Block`."""
    kind = kind_of(model, layer)
    if kind is not None and kind.mlp is None:
        return MixerBlock(layer, model, batch, tp, cp)
    if kind is not None and kind.mixer is None:
        return FeedForwardBlock(layer, model, tp, experts)
    return Block(layer, model, batch, tp, cp, experts)


def _attention(
    prefix: str,
    model: ModelSpec,
    kind: Layer | None,
    batch: int,
    tp: TensorParallel,
    cp: ContextParallel | None,
) -> nn.Module:
    if kind is not None and isinstance(kind.mixer, GroupedAttention):
        found = rotation(kind)
        return KindAttention(prefix, model, kind.mixer, 0 if found is None else found[1], batch, tp, cp)
    if kind is not None and isinstance(kind.mixer, Recurrent):
        return recurrent(prefix, model, kind.mixer, batch, tp, cp)
    if model.mla is None:
        return Attention(prefix, model, batch, tp, cp)
    return LatentAttention(prefix, model, batch, tp, cp, rotated=kind is None or rotation(kind) is not None)


def _routed(prefix: str, model: ModelSpec, kind: Layer, experts: ExpertParallel) -> nn.Module:
    mlp = kind.mlp
    assert isinstance(mlp, RoutedMLP)
    held = shared_experts(model, mlp, prefix)
    shared: nn.Module | None = None
    if mlp.shared is not None:
        shared = _dense(held, mlp.shared, experts.tp, shares_input=not kind.normed_beside)
    if shared is not None and mlp.shared_gate:
        shared = GatedShared(shared, held["scale"])
    parts = kind_experts(model, mlp, f"{prefix}.experts")
    routed = Experts(parts, experts.sizes, mlp.expert, weights_inputs=mlp.weights_inputs, etp_rank=experts.etp_rank)
    if mlp.latent:
        return LatentExperts(experts, Router(parts, experts.routing), routed, shared, parts)
    if not kind.normed_beside:
        return RoutedFeedForward(experts, Router(parts, experts.routing), routed, shared)
    assert shared is not None, "refused by the rules"
    # The root of the hidden size divides what the router scores.
    router_norm = RMSNorm(parts["router_norm"], model.norm_eps, model.hidden_size**-0.5)
    router = Router(parts, experts.routing, router_norm)
    return NormedExperts(experts, router, routed, shared, norms_beside(model, kind, prefix), model.norm_eps)


def _feed_forward(prefix: str, model: ModelSpec, kind: Layer, tp: TensorParallel) -> nn.Module:
    assert isinstance(kind.mlp, DenseMLP), "layers with experts have a feed-forward part of their own"
    return _dense(feed_forward(model, kind.mlp, prefix), kind.mlp, tp)


def _dense(parts: dict[str, Weight], mlp: DenseMLP, tp: TensorParallel, *, shares_input: bool = False) -> nn.Module:
    if mlp.activation == "silu":
        return FeedForward(parts, tp, shares_input=shares_input)
    return KindFeedForward(parts, mlp, tp, shares_input=shares_input)
