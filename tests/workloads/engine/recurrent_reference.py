"""Recurrent mixers written down a second time, one token after the other, in float64.

They follow the recurrences of the papers (Mamba-2: arXiv:2405.21060, section 3 and 7) and the published modelling code
(transformers: nemotron_h), and share no line with the engine, which works in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.spec.layer_kinds.recurrent import Mamba2, Recurrent


def mix(h: Tensor, w: dict[str, Tensor], p: str, mixer: Recurrent, eps: float) -> Tensor:
    """Output [B, S, D] of one recurrent layer, with its projections, for the normed stream [B, S, D]."""
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
    steps = torch.log1p(torch.exp(project("steps") + w[f"{p}.step_bias"]))
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


def _convolved(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each channel by itself; a token sees itself, by the kernel's last number, and those before it."""
    channels, length = kernel.shape
    padded = torch.nn.functional.pad(x.transpose(1, 2), (length - 1, 0))
    y = torch.nn.functional.conv1d(padded, kernel[:, None, :], bias, groups=channels)
    return _silu(y.transpose(1, 2))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
