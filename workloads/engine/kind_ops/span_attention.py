"""Causal attention of layers that differ by kind: to a window, to chunks, with sinks, with a cap of the scores.

Shapes as in `workloads.engine.ops.attention`.

window   a query sees its own position and the ``window - 1`` before it (`workloads.engine.kind_ops.window_attention`)
chunk    a query sees its own position and those before it in its chunk of the sequence: ordinary causal attention over
         the chunks, as if each were a sequence
sinks    one learned score s of each head is a term of the softmax's sum that has no value (gpt-oss, arXiv:2508.10925):
         ``lse' = log(exp(lse) + exp(s))``, ``o' = exp(lse - lse') o``. Because every kernel's backward takes ``o`` and
         ``lse`` of the whole row, the gradients of queries, keys and values need nothing else, and
         ``ds = - sum over rows of exp(s - lse') rowsum(do' * o')``
cap      of the scores: FlexAttention on a GPU, else the plain formulas
scale    a factor of the values (MiMo-V2), applied to the output

Saved for backward: queries, keys, values, output and log-sum-exp, as of attention without these. Values of another
size than keys are saved as they are, even where a kernel gets them padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.kind_ops.window_attention import (
    LARGEST_FLASH_HEAD,
    WindowSaved,
    window_backward,
    window_forward,
)
from workloads.engine.ops.attention import Saved, attention, attention_backward, attention_forward


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a query sees, and what becomes of scores and values."""

    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    """Largest absolute score."""
    value_scale: float = 1.0

    def within(self, length: int) -> Reach:
        """The same for sequences of ``length`` tokens: a window or a chunk that is not shorter limits nothing."""
        window, chunk = (None if size is None or size >= length else size for size in (self.window, self.chunk))
        return Reach(window, chunk, self.cap, self.value_scale)


EVERYTHING = Reach()


def span_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, reach: Reach, sinks_N: Tensor | None = None
) -> Tensor:
    """[B, N, S, V]. ``sinks_N``: one score of each head, or None."""
    reach = reach.within(q_BNSH.shape[2])
    if (
        reach == EVERYTHING
        and sinks_N is None
        and q_BNSH.shape[-1] == v_BKSV.shape[-1]
        and not _is_large(q_BNSH, k_BKSH)
    ):
        return attention(q_BNSH, k_BKSH, v_BKSV, causal=True)
    if reach.cap is not None and q_BNSH.device.type == "cuda" and q_BNSH.dtype != torch.float64:
        return _capped(q_BNSH, k_BKSH, v_BKSV, sinks_N, reach)
    return _apply(q_BNSH, k_BKSH, v_BKSV, sinks_N, reach)


def _is_large(q_BNSH: Tensor, k_BKSH: Tensor) -> bool:
    """Whether torch's one call would compute all scores at once: on CUDA no kernel takes groups of heads of more than
    256. Memory-efficient attention takes such heads with repeated keys and values, which only `attention_forward` and
    its backward make, and nobody saves."""
    return q_BNSH.device.type == "cuda" and q_BNSH.shape[-1] > LARGEST_FLASH_HEAD and q_BNSH.shape[1] != k_BKSH.shape[1]


@torch.compiler.disable  # one graph break, as with ring attention
def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reach: Reach) -> Tensor:
    return _SpanAttention.apply(q, k, v, sinks, reach)


@torch.compiler.disable
def _capped(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, sinks_N: Tensor | None, reach: Reach) -> Tensor:
    """The same by FlexAttention, whose backward takes the gradient of the log-sum-exp, too."""
    from workloads.engine.kind_ops.flex_attention import flexible_attention  # loads torch's compiler

    o, lse_BNS = flexible_attention(q_BNSH, k_BKSH, v_BKSV, reach.window or q_BNSH.shape[2], reach.cap)
    if sinks_N is not None:
        o = o * torch.sigmoid(lse_BNS - sinks_N.to(lse_BNS.dtype).unsqueeze(1)).unsqueeze(-1).to(o.dtype)
    return o if reach.value_scale == 1.0 else o * reach.value_scale


def add_sinks(o_BNSV: Tensor, lse_BNS: Tensor, sinks_N: Tensor) -> Tensor:
    """Make ``o`` the output with sinks, in place, and return the log-sum-exp with them."""
    total = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS.dtype).unsqueeze(1))
    o_BNSV.mul_(torch.exp(lse_BNS - total).unsqueeze(-1))
    return total


def gradient_of_sinks(grad_o: Tensor, o_BNSV: Tensor, lse_BNS: Tensor, sinks_N: Tensor) -> Tensor:
    """[N], from the output and the log-sum-exp with sinks."""
    row_sums_BNS = (grad_o * o_BNSV).sum(-1, dtype=lse_BNS.dtype)
    shares_BNS = torch.exp(sinks_N.to(lse_BNS.dtype).unsqueeze(1) - lse_BNS)
    return -(shares_BNS * row_sums_BNS).sum((0, 2)).to(sinks_N.dtype)


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reach: Reach) -> Tensor:
        o, lse, ctx.kept = _forward(q, k, v, reach)
        if not o.transpose(1, 2).is_contiguous():  # values were padded for the kernel
            o = o.transpose(1, 2).contiguous().transpose(1, 2)
        if sinks is not None:
            lse = add_sinks(o, lse, sinks)
        if reach.value_scale != 1.0:
            o.mul_(reach.value_scale)
        ctx.reach = reach
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        d_sinks = None
        if sinks is not None:
            d_sinks = gradient_of_sinks(grad, o, lse, sinks)
        if ctx.reach.value_scale != 1.0:
            grad, o = grad * ctx.reach.value_scale, o / ctx.reach.value_scale
        return *_backward(grad, q, k, v, o, lse, ctx.kept, ctx.reach), d_sinks, None


_Kept = WindowSaved | list[tuple[slice, Saved]]
"""State for the backward: of a window, or of the parts of a sequence that are computed one after the other."""


def _forward(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> tuple[Tensor, Tensor, _Kept]:
    length = q.shape[2]
    if reach.window is not None or reach.cap is not None:
        assert reach.chunk is None, "no model has chunks with a window or a cap"
        return window_forward(q, k, v, reach.window or length, reach.cap)
    if reach.chunk is None:
        o, lse, saved = attention_forward(q, k, v, causal=True)
        return o, lse, [(slice(0, length), saved)]
    outputs, sums, kept = [], [], []
    for part in _parts(length, reach.chunk):
        of_q, of_k, of_v = _chunks(part, reach.chunk, q, k, v)
        o, lse, saved = attention_forward(of_q, of_k, of_v, causal=True)
        outputs.append(_joined(o, q.shape[0]))
        sums.append(_joined(lse, q.shape[0]))
        kept.append((part, saved))
    return _by_tokens(outputs), torch.cat(sums, 2), kept


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kept: _Kept, reach: Reach
) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(kept, WindowSaved):
        return window_backward(grad, q, k, v, o, lse, kept)
    if reach.chunk is None:
        return attention_backward(grad, q, k, v, o, lse, kept[0][1], causal=True)
    found = []
    for part, saved in kept:
        of_grad, of_q, of_k, of_v, of_o, of_lse = _chunks(part, reach.chunk, grad, q, k, v, o, lse)
        grads = attention_backward(of_grad, of_q, of_k, of_v, of_o, of_lse, saved, causal=True)
        found.append([_joined(one, q.shape[0]) for one in grads])
    dq, dk, dv = (_by_tokens(parts) for parts in zip(*found, strict=True))
    return dq, dk, dv


def _by_tokens(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a sequence [B, N, tokens, H] one after the other, laid out by tokens."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)


def _parts(length: int, chunk: int) -> list[slice]:
    """The whole chunks of a sequence together, and what is left."""
    whole = length // chunk * chunk
    return [slice(0, whole), slice(whole, length)][: 1 if whole == length else 2]


def _chunks(part: slice, chunk: int, *tensors: Tensor) -> list[Tensor]:
    """[B, N, S, ...] of a part as [B * chunks, N, tokens of a chunk, ...], views where memory is laid out by tokens."""
    size = min(chunk, part.stop - part.start)
    return [x[:, :, part].transpose(1, 2).unflatten(1, (-1, size)).flatten(0, 1).transpose(1, 2) for x in tensors]


def _joined(x: Tensor, batch: int) -> Tensor:
    """Inverse of `_chunks` for one part."""
    return x.transpose(1, 2).unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)
