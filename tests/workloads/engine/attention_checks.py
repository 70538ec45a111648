"""What the tests of attention share: the textbook in fp64, inputs as the model makes them, and relative errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SEED = 11


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu", keys: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, gradient of the output) for (B, N, K, S, H), laid out as the model has them: heads inside tokens.

    A sixth number is the size of a value; without it that is H. ``keys``: how many there are, S if 0. Scores differ by
    some units, so that a wrong log-sum-exp shows.
    """
    batch, heads, kv_heads, tokens, size = shape[:5]
    of_value = shape[5] if len(shape) > 5 else size
    generator = torch.Generator().manual_seed(SEED)

    def make(count: int, length: int, size: int) -> Tensor:
        x_BSNH = torch.randn(batch, length, count, size, generator=generator, dtype=torch.float64)
        return (2 * x_BSNH).to(dtype).to(device).transpose(1, 2)

    keys = keys or tokens
    q, k = make(heads, tokens, size), make(kv_heads, keys, size)
    return q, k, make(kv_heads, keys, of_value), make(heads, tokens, of_value)


def textbook(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(o, lse) in fp64, with every score and every repeated key and value."""
    repeats = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(repeats, 1), v.double().repeat_interleave(repeats, 1)
    scores = torch.einsum("bnsh,bnth->bnst", q, k) / math.sqrt(q.shape[-1])
    if causal:
        after = torch.arange(k.shape[2], device=q.device) > torch.arange(q.shape[2], device=q.device)[:, None]
        scores = torch.where(after, -math.inf, scores)
    return torch.einsum("bnst,bnth->bnsh", scores.softmax(-1), v), scores.logsumexp(-1)


def textbook_gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv) in fp64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = textbook(*wide, causal=causal)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, wide, grad.double())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()
