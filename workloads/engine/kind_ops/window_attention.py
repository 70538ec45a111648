"""Causal attention to a window of keys, forward and backward separately, with the log-sum-exp.

Shapes as in `workloads.engine.ops.attention`. A query sees its own position and the ``window - 1`` before it. Scores of
other keys are never computed, and nothing of the size S x S exists:

flash   FlashAttention 2 of torch, which skips blocks outside the window (CUDA, 16 bits, heads of at most 256)
blocks  the plain formulas, a block of queries after the other with the keys that they see (any device and dtype); with
        a cap of the scores, too: ``cap * tanh(z / cap)`` (Gemma 2, arXiv:2408.00118, section 2). FakeTensors are only
        allocated, as for a kernel
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of

_aten = torch.ops.aten
_SCORES = 2**18
"""Scores of a block of the plain formulas, about: 1 MiB in fp32."""
_QUERIES = (16, 1024)
"""Fewest and most queries of a block."""
LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True, slots=True)
class WindowSaved:
    """What `window_backward` needs beside the tensors that the caller keeps."""

    window: int
    cap: float | None
    random: tuple[Tensor, ...] | None = None
    """Random state for dropout, which the flash kernel requires although there is no dropout; None: plain formulas."""


def window_forward(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, window: int, cap: float | None = None
) -> tuple[Tensor, Tensor, WindowSaved]:
    """(o [B, N, S, V], lse [B, N, S], state for the backward) without autograd; ``lse`` is fp32 (fp64 for fp64)."""
    if cap is None and takes_flash(q_BNSH):
        return _flash_forward(q_BNSH, k_BKSH, v_BKSV, window)
    return *_blocks_forward(q_BNSH, k_BKSH, v_BKSV, window, cap), WindowSaved(window, cap)


def window_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: WindowSaved
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). ``o`` and ``lse`` may include terms of the softmax's sum that no key has, such as sinks."""
    if saved.random is not None:
        return _flash_backward(grad_o, q, k, v, o, lse, saved.window, saved.random)
    return _blocks_backward(grad_o, q, k, v, o, lse, saved)


def takes_flash(q: Tensor) -> bool:
    is_16_bit = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and is_16_bit and q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_FLASH_HEAD


# FlashAttention, whose tensors are [B, S, N, H]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, WindowSaved]:
    size, length = v.shape[-1], q.shape[2]
    arguments = [x.transpose(1, 2) for x in (q, k, _padded(v, q))]
    found = _aten._flash_attention_forward(
        *arguments, None, None, length, length, 0.0, True, False, window_size_left=window - 1, window_size_right=0
    )
    o = found[0].transpose(1, 2)[..., :size]
    return o, found[1], WindowSaved(window, None, (found[2], found[3]))


def _flash_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, random: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    size, length = v.shape[-1], q.shape[2]
    grad_o, v, o = (_padded(x, q) for x in (grad_o, v, o))
    arguments = [x.transpose(1, 2) for x in (grad_o, q, k, v, o)]
    grads = _aten._flash_attention_backward(
        *arguments, lse.contiguous(), None, None, length, length, 0.0, True, *random,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv[..., :size]


def _padded(x: Tensor, q: Tensor) -> Tensor:
    """The kernel has one size of heads: columns of zeros change no other column of the output."""
    return x if x.shape[-1] == q.shape[-1] else F.pad(x, (0, q.shape[-1] - x.shape[-1]))


# Plain formulas


def _blocks(q_BNSH: Tensor, window: int) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys that any of them sees) of every block."""
    batch, heads, length, _ = q_BNSH.shape
    fewest, most = _QUERIES
    seen = min(length, window)
    # size * (seen + size) scores of each head
    size = int((math.sqrt(seen**2 + 4 * _SCORES / (batch * heads)) - seen) / 2)
    size = min(max(size, fewest), most)
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield slice(start, stop), slice(max(0, start - window + 1), stop)


def _blocks_forward(q: Tensor, k: Tensor, v: Tensor, window: int, cap: float | None) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    o = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, length, dtype=accumulation_dtype(q.dtype))
    if backend_of(q) is Backend.SHAPES:
        return o, lse
    for queries, keys in _blocks(q, window):
        z, _ = _scores(q, k, queries, keys, window, cap)
        lse_BKGS = z.logsumexp(-1)
        p = torch.exp(z - lse_BKGS.unsqueeze(-1))
        o[:, :, queries] = (p @ v[:, :, keys].to(z.dtype).unsqueeze(2)).flatten(1, 2).to(o.dtype)
        lse[:, :, queries] = lse_BKGS.flatten(1, 2)
    return o, lse


def _blocks_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: WindowSaved
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, groups = accumulation_dtype(q.dtype), (k.shape[1], -1)
    dq, sums = torch.empty_like(q), [_Sums(x) for x in (k, v)]
    if backend_of(q) is Backend.SHAPES:
        return dq, sums[0].total, sums[1].total
    for queries, keys in _blocks(q, saved.window):
        z, slope = _scores(q, k, queries, keys, saved.window, saved.cap)
        p_BKGST = torch.exp(z - lse[:, :, queries].to(dtype).unflatten(1, groups).unsqueeze(-1))
        wide_grad, wide_o, wide_q = (x[:, :, queries].to(dtype).unflatten(1, groups) for x in (grad_o, o, q))
        wide_k, wide_v = (x[:, :, keys].to(dtype).unsqueeze(2) for x in (k, v))
        row_sums = (wide_grad * wide_o).sum(-1, keepdim=True)
        dz = p_BKGST * (wide_grad @ wide_v.mT - row_sums) / math.sqrt(q.shape[-1])
        dz = dz if slope is None else dz * slope
        dq[:, :, queries] = (dz @ wide_k).flatten(1, 2)
        parts = (dz.mT @ wide_q).sum(2), (p_BKGST.mT @ wide_grad).sum(2)
        for one, part in zip(sums, parts, strict=True):
            one.add(keys, part, max(0, queries.stop - saved.window + 1))
    return dq, sums[0].total, sums[1].total


class _Sums:
    """Gradient of keys or values, summed over blocks of queries in the order of the sequence. Only those keys that the
    next block sees, too, are held in the precision of sums."""

    def __init__(self, x: Tensor) -> None:
        self.total, self.open = torch.empty_like(x), x.new_empty(0)
        """``open``: sums of the last keys so far."""

    def add(self, keys: slice, part: Tensor, next_key: int) -> None:
        """``next_key``: the first that the next block sees; the last block's are all written."""
        if self.open.numel():
            part[:, :, : self.open.shape[2]] += self.open
        done = part.shape[2] if keys.stop == self.total.shape[2] else max(0, next_key - keys.start)
        self.total[:, :, keys.start : keys.start + done] = part[:, :, :done].to(self.total.dtype)
        self.open = part[:, :, done:].clone()


def _scores(
    q: Tensor, k: Tensor, queries: slice, keys: slice, window: int, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """(scores [B, K, N / K, queries, keys], -inf where a key is not seen; the derivative of the cap, or None)."""
    dtype = accumulation_dtype(q.dtype)
    grouped = q[:, :, queries].to(dtype).unflatten(1, (k.shape[1], -1)) / math.sqrt(q.shape[-1])
    z, slope = grouped @ k[:, :, keys].to(dtype).unsqueeze(2).mT, None
    if cap is not None:
        capped = torch.tanh(z / cap)
        z, slope = cap * capped, 1 - capped.square()
    query = torch.arange(queries.start, queries.stop, device=q.device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=q.device)
    return z.masked_fill((key > query) | (key <= query - window), -math.inf), slope
