"""Logits of a chunk of tokens over this rank's part of the vocabulary: their sums, and their gradients in their place.

Parts of `workloads.engine.ops.linear_cross_entropy`, which has the formulas and the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.engine.ops.backend import ROW_ALIGNMENT, Backend, accumulation_dtype, backend_of, row_blocks


def leave_out(targets: Tensor, lse: Tensor, losses: Tensor) -> None:
    """Take tokens without a target out, in place: with an infinite sum of exponentials every gradient is 0."""
    none = targets < 0
    lse.masked_fill_(none, torch.inf)
    losses.masked_fill_(none, 0.0)


def chunks_of(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Split into as few chunks of at most ``chunk_tokens`` as possible, of nearly equal size: a matmul of a few rows is
    slow."""
    count = -(-tokens // chunk_tokens)
    size = -(-tokens // count)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def logits_buffer(x: Tensor, weight: Tensor, chunks: list[list[slice]]) -> Tensor:
    """One allocation for the logits of every chunk of every input: [longest chunk, V], rows aligned."""
    columns = weight.shape[0]
    padded = -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    longest = max(chunk.stop - chunk.start for of_input in chunks for chunk in of_input)
    return x.new_empty(longest, padded)[:, :columns]


def logits_of(x: Tensor, weight: Tensor, chunk: slice, buffer: Tensor, tokens_held: int | None) -> Tensor:
    """Logits of a chunk. Those of rows after the first ``tokens_held``, which stand for no token, are the lowest
    number, whose exponential beside any other logit is exactly 0. (Differences of infinities would not be numbers.)"""
    logits = torch.mm(x[chunk], weight.t(), out=buffer[: chunk.stop - chunk.start])
    if tokens_held is not None and tokens_held < weight.shape[0]:
        logits[:, tokens_held:] = torch.finfo(logits.dtype).min
    return logits


def log_sum_exp(
    logits: Tensor, targets: Tensor, first_row: int, cap: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, target's logit) of every token over the full vocabulary."""
    statistics = logits.new_empty(3, logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    backend = backend_of(logits)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_cross_entropy

        triton_cross_entropy.statistics(logits, targets, first_row, statistics, cap)
    elif backend is Backend.TORCH:
        _statistics(logits, targets, first_row, cap, statistics)
    largest, total, target_logits = statistics
    if group is not None:
        local = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total.mul_(local.sub_(largest).exp_())
        dist.all_reduce(statistics[1:], group=group)
    return largest + total.log(), target_logits


def _statistics(logits: Tensor, targets: Tensor, first_row: int, cap: float, statistics: Tensor) -> None:
    """Rows of ``statistics`` [3, C]: largest logit, sum of ``exp(z - largest)``, target's logit (0 on other ranks)."""
    largest, total, target_logits = statistics
    for rows in row_blocks(*logits.shape):
        wide = _capped(logits[rows].to(statistics.dtype), logits.dtype, cap)
        largest[rows] = wide.amax(dim=-1)
        total[rows] = (wide - largest[rows, None]).exp_().sum(dim=-1)
        column, mine = _local_targets(targets[rows], first_row, logits.shape[1])
        target_logits[rows] = wide.gather(1, column[:, None]).squeeze(1) * mine


def logits_to_gradient(
    logits: Tensor,
    targets: Tensor,
    first_row: int,
    lse: Tensor,
    cap: float,
    scale: float,
    gradient_scale: Tensor | None,
) -> None:
    """``logits <- scale * gradient_scale * (exp(logits - lse) - onehot(targets))``, in place; with a cap from those
    before it, and times its derivative."""
    backend = backend_of(logits)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_cross_entropy

        triton_cross_entropy.logits_to_gradient(logits, targets, first_row, lse, scale, gradient_scale, cap)
    elif backend is Backend.TORCH:
        for rows in row_blocks(*logits.shape):
            wide = logits[rows].to(lse.dtype)
            gradient = (_capped(wide, logits.dtype, cap) - lse[rows, None]).exp_()
            column, mine = _local_targets(targets[rows], first_row, logits.shape[1])
            gradient.scatter_add_(1, column[:, None], -mine[:, None].to(lse.dtype))
            if cap:
                gradient.mul_(1 - torch.tanh(wide / cap).square())
            logits[rows] = gradient.mul_(scale if gradient_scale is None else gradient_scale * scale)


def _capped(wide: Tensor, dtype: torch.dtype, cap: float) -> Tensor:
    """The cap of logits, but not of those that stand for no token: the lowest number of ``dtype``."""
    if not cap:
        return wide
    lowest = torch.finfo(dtype).min
    return torch.where(wide == lowest, lowest, cap * torch.tanh(wide / cap))


def _local_targets(targets: Tensor, first_row: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column in this rank's vocabulary, clamped into it; whether the target is in it)."""
    column = targets - first_row
    return column.clamp(0, columns - 1), (column >= 0) & (column < columns)


def multiply_(tensor: Tensor, factor: Tensor) -> None:
    """``tensor *= factor`` (0-dim). On CUDA nothing is read or written if the factor is 1, as in training."""
    if backend_of(tensor) is Backend.TRITON:
        from workloads.engine.ops import triton_cross_entropy

        triton_cross_entropy.multiply_(tensor, factor)
    else:
        tensor.mul_(factor)
