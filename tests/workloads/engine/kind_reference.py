"""Layers that differ by kind, written down a second time in the plainest way: all scores at once, in float64.

It follows the published modelling code of each family (transformers: gpt_oss, llama4_text, gemma2, gemma3_text,
gemma4_text, mimo_v2_flash, qwen3_5, step3p7, nemotron_h) and shares no line with the engine: masks are S x S, a sink is
one more column of the softmax, positions rotate as complex numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.spans import Chunk, Window

CAP = 50.0
"""``attn_logit_softcapping`` of google/gemma-2-9b."""


def attend(h: Tensor, w: dict[str, Tensor], p: str, mixer: Attention, eps: float) -> Tensor:
    """Output [B, S, D] of one attention layer, with its projections, for the normed stream [B, S, D]."""
    batch, seq, _ = h.shape

    def project(name: str, heads: int) -> Tensor:
        y = h @ w[f"{p}.{name}"].t()
        if mixer.bias:
            y = y + w[f"{p}.{name}_bias"]
        return y.view(batch, seq, heads, -1)

    q, k = project("q", mixer.heads), project("k", mixer.kv_heads)
    v = k if mixer.shared_kv else project("v", mixer.kv_heads)
    if mixer.value_norm:
        v = _normed(v, eps)
    if mixer.norm == "all_heads":  # MiniMaxM2Attention
        q, k = (
            (_normed(x.flatten(2), eps) * w[f"{p}.{name}_whole_norm"]).view(x.shape) for name, x in (("q", q), ("k", k))
        )
    elif mixer.norm != "none":
        weights = [w[f"{p}.{name}_norm"] if mixer.norm == "head" else 1.0 for name in "qk"]
        q, k = (_normed(x, eps) * weight for x, weight in zip((q, k), weights, strict=True))
    if mixer.rope is not None:
        q, k = (_rotated(x, mixer.rope.theta, mixer.rope.rotated, mixer.rope.proportional) for x in (q, k))
    k, v = (x.repeat_interleave(mixer.heads // mixer.kv_heads, 2) for x in (k, v * mixer.value_scale))
    scores = torch.einsum("bsnh,btnh->bnst", q, k) * (mixer.score_scale or mixer.head_dim**-0.5)
    if mixer.soft_cap:
        scores = CAP * torch.tanh(scores / CAP)
    scores = scores.masked_fill(~_seen(seq, mixer), -torch.inf)
    if mixer.sinks:
        sinks = w[f"{p}.sinks"].view(1, -1, 1, 1).expand(batch, -1, seq, 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    o = torch.einsum("bnst,btnv->bsnv", shares, v)
    if mixer.gate != "none":
        gate = (h @ w[f"{p}.gate"].t()).view(batch, seq, mixer.heads, -1)
        o = o / (1 + torch.exp(-gate))
    y = o.reshape(batch, seq, -1) @ w[f"{p}.o"].t()
    return y + w[f"{p}.o_bias"] if mixer.output_bias else y


def feed(h: Tensor, w: dict[str, Tensor], p: str, mlp: DenseMLP) -> Tensor:
    """Output [B, S, D] of one dense MLP."""
    up = h @ w[f"{p}.up"].t()
    if not mlp.gated:
        assert mlp.activation == "relu2"
        return (up * (up > 0) * up) @ w[f"{p}.down"].t()
    gate = h @ w[f"{p}.gate"].t()
    if mlp.activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return (0.5 * gate * (1 + torch.tanh(inner)) * up) @ w[f"{p}.down"].t()
    return (gate / (1 + torch.exp(-gate)) * up) @ w[f"{p}.down"].t()


def one_expert(h: Tensor, w: dict[str, Tensor], mlp: DenseMLP) -> Tensor:
    """Output [B, S, D] of one expert for every token. ``w``: its weights and biases by their short names."""

    def project(x: Tensor, name: str) -> Tensor:
        y = x @ w[name].t()
        return y + w[f"{name}_bias"].squeeze(-1) if mlp.bias else y

    up = project(h, "up")
    if mlp.activation == "relu2":  # NemotronH
        return project(up * (up > 0) * up, "down")
    gate = project(h, "gate")
    if mlp.activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return project(0.5 * gate * (1 + torch.tanh(inner)) * up, "down")
    assert mlp.activation == "clamped_silu"  # GptOssExperts._apply_gate
    gate = gate.clamp(min=None, max=mlp.limit)
    up = up.clamp(min=-mlp.limit, max=mlp.limit)
    return project((up + mlp.offset) * (gate * torch.sigmoid(gate * mlp.slope)), "down")


def _seen(seq: int, mixer: Attention) -> Tensor:
    """Whether a query (row) sees a key (column)."""
    query, key = torch.meshgrid(torch.arange(seq), torch.arange(seq), indexing="ij")
    seen = key <= query
    if isinstance(mixer.span, Window):
        seen &= query - key < mixer.span.size
    if isinstance(mixer.span, Chunk):
        seen &= query // mixer.span.size == key // mixer.span.size
    return seen


def _normed(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rotated(x_BSNH: Tensor, theta: float, share: float, proportional: bool) -> Tensor:
    """The first columns of every head, of which element i and i + R / 2 are one complex number. ``proportional``: of
    all columns the first pairs, with the frequencies that they have in a whole head."""
    size = x_BSNH.shape[-1]
    if proportional:
        pairs = int(share * size // 2)
        moved = _rotated(x_BSNH, theta, 1.0, False)
        turned = torch.arange(size) % (size // 2) < pairs
        return torch.where(turned, moved, x_BSNH)
    columns = int(size * share) // 2 * 2
    half = columns // 2
    number = torch.complex(x_BSNH[..., :half], x_BSNH[..., half:columns])
    angle = torch.arange(x_BSNH.shape[1]).double()[:, None] / theta ** (torch.arange(half).double() / half)
    turned = number * torch.polar(torch.ones_like(angle), angle)[:, None, :]
    return torch.cat([turned.real, turned.imag, x_BSNH[..., columns:]], -1)
