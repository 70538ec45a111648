"""Recurrent mixers written down a second time, one token after the other, in float64.

They follow the recurrences of the papers (Mamba-2: arXiv:2405.21060; gated delta rule: arXiv:2412.06464; KDA:
arXiv:2510.26692) and the published modelling code (transformers: nemotron_h, qwen3_5, kimi_linear), and share no line
with the engine, which works in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2, Recurrent


def mix(h: Tensor, w: dict[str, Tensor], p: str, mixer: Recurrent, eps: float) -> Tensor:
    """Output [B, S, D] of one recurrent layer, with its projections, for the normed stream [B, S, D]."""
    if isinstance(mixer, GatedDeltaRule):
        return _gated_delta(h, w, p, mixer, eps)
    if isinstance(mixer, KimiDelta):
        return _kimi_delta(h, w, p, mixer, eps)
    assert isinstance(mixer, Mamba2)
    return _mamba(h, w, p, mixer, eps)


def _mamba(h: Tensor, w: dict[str, Tensor], p: str, mixer: Mamba2, eps: float) -> Tensor:
    batch, seq, _ = h.shape

    def project(name: str) -> Tensor:
        y = h @ w[f"{p}.{name}"].t()
        return y + w[f"{p}.{name}_bias"] if mixer.bias else y

    def convolve(name: str) -> Tensor:
        bias = w[f"{p}.{name}_kernel_bias"] if mixer.convolution_bias else None
        return _convolved(project(name), w[f"{p}.{name}_kernel"], bias)

    x = convolve("x").view(batch, seq, mixer.heads, mixer.head_dim)
    shared = mixer.heads // mixer.groups
    b, c = (
        convolve(name).view(batch, seq, mixer.groups, mixer.state).repeat_interleave(shared, 2) for name in ("b", "c")
    )
    steps = _softplus(project("steps") + w[f"{p}.step_bias"])
    rate = torch.exp(w[f"{p}.decay"])
    state, outputs = h.new_zeros(batch, mixer.heads, mixer.head_dim, mixer.state), []
    for t in range(seq):
        step = steps[:, t, :, None, None]
        state = state * torch.exp(-rate[:, None, None] * step) + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        outputs.append((state * c[:, t, :, None, :]).sum(-1) + w[f"{p}.skip"][:, None] * x[:, t])
    y = torch.stack(outputs, 1).reshape(batch, seq, -1)
    y = y * _silu(project("z"))
    groups = y.view(batch, seq, mixer.groups, -1)
    y = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(batch, seq, -1) * w[f"{p}.norm"]
    y = y @ w[f"{p}.out"].t()
    return y + w[f"{p}.out_bias"] if mixer.bias else y


def _gated_delta(h: Tensor, w: dict[str, Tensor], p: str, mixer: GatedDeltaRule, eps: float) -> Tensor:
    batch, seq, _ = h.shape

    def project(name: str) -> Tensor:
        return h @ w[f"{p}.{name}"].t()

    q, k, v = (_convolved(project(name), w[f"{p}.{name}_kernel"]) for name in "qkv")
    shared = mixer.value_heads // mixer.key_heads
    q, k = (_unit(x.view(batch, seq, mixer.key_heads, -1)).repeat_interleave(shared, 2) for x in (q, k))
    v = v.view(batch, seq, mixer.value_heads, -1)
    decays = torch.exp(-torch.exp(w[f"{p}.log_rate"]) * _softplus(project("decay") + w[f"{p}.decay_bias"]))
    o = token_by_token(q, k, v, decays.unsqueeze(-1), 1 / (1 + torch.exp(-project("rate"))))
    o = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{p}.norm"]
    return (o.flatten(2) * _silu(project("gate"))) @ w[f"{p}.out"].t()


def _kimi_delta(h: Tensor, w: dict[str, Tensor], p: str, mixer: KimiDelta, eps: float) -> Tensor:
    batch, seq, _ = h.shape

    def low_rank(name: str) -> Tensor:
        return h @ w[f"{p}.{name}_down"].t() @ w[f"{p}.{name}_up"].t()

    def heads(x: Tensor) -> Tensor:
        return x.view(batch, seq, mixer.heads, mixer.head_dim)

    q, k, v = (heads(_convolved(h @ w[f"{p}.{name}"].t(), w[f"{p}.{name}_kernel"])) for name in "qkv")
    rates = torch.exp(w[f"{p}.log_rate"])[:, None]
    decays = torch.exp(-rates * heads(_softplus(low_rank("decay") + w[f"{p}.decay_bias"])))
    o = token_by_token(_unit(q), _unit(k), v, decays, 1 / (1 + torch.exp(-(h @ w[f"{p}.rate"].t()))))
    o = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{p}.norm"]
    gate = h @ w[f"{p}.gate"].t() if mixer.full_rank_gate else low_rank("gate")
    return (o.flatten(2) / (1 + torch.exp(-gate))) @ w[f"{p}.out"].t()


def token_by_token(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
    """Outputs [B, S, H, V]; ``decays`` [B, S, H, 1 or K] of the rows of the state."""
    state, outputs = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * decays[:, t, :, :, None]
        known = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        new = rates[:, t, :, None] * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / q.shape[3] ** 0.5)
    return torch.stack(outputs, 1)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def _convolved(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each channel by itself; a token sees itself, by the kernel's last number, and those before it."""
    channels, length = kernel.shape
    padded = torch.nn.functional.pad(x.transpose(1, 2), (length - 1, 0))
    y = torch.nn.functional.conv1d(padded, kernel[:, None, :], bias, groups=channels)
    return _silu(y.transpose(1, 2))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
