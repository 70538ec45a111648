"""Output projection and cross-entropy over a vocabulary split by rows, a chunk of tokens at a time.

Shapes: T tokens, D features, V vocabulary rows of this rank, C tokens of a chunk. Rank ``r`` of the group holds rows
``[r * V, (r + 1) * V)`` of the full matrix. With ``z = x @ W^T`` over the full vocabulary and target ``t``:

    loss = scale * sum over tokens of (lse(z) - z[t])        dz = scale * (softmax(z) - onehot(t)) * gradient_scale
    dx = dz @ W (each rank has its vocabulary's part of this sum)        dW = dz^T @ x

With several inputs, the targets of each with a scale of its own, the losses are added; a target below 0 is none, and
its token has neither loss nor gradient.

With a cap c the logits are ``z = c tanh(u / c)`` of ``u = x @ W^T`` (Gemma 2, arXiv:2408.00118, section 2), and ``du =
dz (1 - tanh(u / c)^2)`` takes the place of dz.

Only [C, V] logits ever exist, before the cap and in the compute dtype; the gradient overwrites them. Two small
all-reduces a chunk carry the largest logit, then the sum of exponentials and the target's logit (Megatron-LM,
arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import ROW_ALIGNMENT, Backend, accumulation_dtype, backend_of, row_blocks
from workloads.engine.ops.linear import GradientSum, SumOf, accumulate


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    scale: float,
    group: dist.ProcessGroup | None,
    chunk_tokens: int = 4096,
    grads_in_forward: bool = True,
    gradient_scale: Tensor | None = None,
    vocabulary: int | None = None,
    cap: float = 0.0,
    sum_of: SumOf | None = None,
) -> Tensor:
    """``scale * sum_t cross_entropy(x_t @ W^T, target_t)`` as a 0-dim fp32 tensor (fp64 for fp64 inputs).

    Every rank of ``group`` passes the same ``x`` and global ``targets`` (each in the full vocabulary) and gets the same
    loss. The gradient of ``x`` is the PARTIAL sum over this rank's vocabulary: the caller sums it over ``group``
    (reduce-scatter or all-reduce). The gradient of ``weight`` is complete. ``group=None``: ``weight`` is the whole
    vocabulary.

    ``grads_in_forward=True`` computes both gradients while a chunk's logits exist and saves them. ``False`` saves
    ``x``, ``weight`` and one number a token and recomputes the logits in backward: for schedules that hold many
    micro-batches between their forward and backward. Memory besides the saved tensors: one chunk of logits, and with
    several chunks an accumulator of the weight's gradient in fp32.

    ``gradient_scale`` (0-dim, fp32) multiplies both gradients, not the loss. It must act here, where gradients begin:
    they are rounded to the dtype of ``x`` before any caller sees them, and in fp16 small ones would underflow.

    ``vocabulary``: number of rows of the full matrix that stand for tokens, the first ones; None for all. The loss is
    that of these rows, and the other rows get gradients of 0.

    ``cap``: largest absolute logit; 0: none.

    ``sum_of``: the gradient of ``weight`` is added to its sum, as soon as it is computed, instead of being returned to
    autograd. The result must then not be scaled by its user: a gradient of the result other than 1 comes too late.
    """
    total, _ = linear_cross_entropies(
        [x_TD],
        weight_VD,
        [targets_T],
        scales=[scale],
        group=group,
        chunk_tokens=chunk_tokens,
        grads_in_forward=grads_in_forward,
        gradient_scale=gradient_scale,
        vocabulary=vocabulary,
        cap=cap,
        sum_of=sum_of,
    )
    return total


def linear_cross_entropies(
    inputs: Sequence[Tensor],
    weight_VD: Tensor,
    targets: Sequence[Tensor],
    *,
    scales: Sequence[float],
    group: dist.ProcessGroup | None,
    chunk_tokens: int = 4096,
    grads_in_forward: bool = True,
    gradient_scale: Tensor | None = None,
    vocabulary: int | None = None,
    cap: float = 0.0,
    sum_of: SumOf | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """`linear_cross_entropy` of several inputs, each [T, D] with targets [T] and a scale of its own, through one
    ``weight``, whose gradient exists once.

    Returns the sum of all, and what each input has in it, without a gradient; all are 0-dim. Targets after the first
    input's may be below 0: none.
    """
    in_forward = grads_in_forward and torch.is_grad_enabled()
    how = _How(tuple(scales), group, chunk_tokens, in_forward, gradient_scale, vocabulary, cap, sum_of, [])
    total = _LinearCrossEntropy.apply(weight_VD, how, *inputs, *targets)
    return total, how.parts


class _How(NamedTuple):
    """Arguments of `linear_cross_entropies` that are no inputs of autograd."""

    scales: tuple[float, ...]
    group: dist.ProcessGroup | None
    chunk_tokens: int
    grads_in_forward: bool
    gradient_scale: Tensor | None
    vocabulary: int | None
    cap: float
    sum_of: SumOf | None
    parts: list[Tensor]
    """Takes the loss of each input."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, how: _How, *tensors: Tensor) -> Tensor:
        inputs, targets = _halves(tensors)
        first_row = 0 if how.group is None else dist.get_rank(how.group) * weight.shape[0]
        tokens_held = None if how.vocabulary is None else max(0, how.vocabulary - first_row)
        chunks = [list(_chunks(x.shape[0], how.chunk_tokens)) for x in inputs]
        lses = [x.new_empty(x.shape[0], dtype=accumulation_dtype(x.dtype)) for x in inputs]
        ctx.parameter = weight if how.sum_of is not None else None
        ctx.how, ctx.first_row, ctx.chunks, ctx.tokens_held = how, first_row, chunks, tokens_held
        gradients = _Gradients.of(ctx, inputs, weight) if how.grads_in_forward else None
        buffer = _logits_buffer(inputs[0], weight, chunks)
        parts: list[Tensor] = []
        for at, (x, of_x, lse) in enumerate(zip(inputs, targets, lses, strict=True)):
            losses = torch.empty_like(lse)
            for chunk in chunks[at]:
                logits = _logits(x, weight, chunk, buffer, tokens_held)
                lse[chunk], target_logits = _log_sum_exp(logits, of_x[chunk], first_row, how.cap, how.group)
                torch.sub(lse[chunk], target_logits, out=losses[chunk])
                if at:
                    _leave_out(of_x[chunk], lse[chunk], losses[chunk])
                if gradients is not None:
                    _logits_to_gradient(
                        logits, of_x[chunk], first_row, lse[chunk], how.cap, how.scales[at], how.gradient_scale
                    )
                    gradients.add(logits, at, chunk)
            parts.append(losses.sum() * how.scales[at])
        del logits, buffer  # the gradient of the weight is copied next: do not hold all three
        if gradients is not None:
            ctx.save_for_backward(*gradients.finish())
        else:
            ctx.save_for_backward(*inputs, weight, *targets, *lses)
        how.parts.extend(part.detach() for part in parts)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        count = len(how.scales)
        if how.grads_in_forward:
            *dx, dweight = ctx.saved_tensors
        else:
            tensors = ctx.saved_tensors
            inputs, weight, (targets, lses) = tensors[:count], tensors[count], _halves(tensors[count + 1 :])
            gradients = _Gradients.of(ctx, inputs, weight)
            buffer = _logits_buffer(inputs[0], weight, ctx.chunks)
            for at, (x, of_x, lse) in enumerate(zip(inputs, targets, lses, strict=True)):
                for chunk in ctx.chunks[at]:
                    logits = _logits(x, weight, chunk, buffer, ctx.tokens_held)
                    of_chunk = logits, of_x[chunk], ctx.first_row, lse[chunk]
                    _logits_to_gradient(*of_chunk, how.cap, how.scales[at], how.gradient_scale)
                    gradients.add(logits, at, chunk)
            del logits, buffer  # before the gradient of the weight is copied, as in forward
            *dx, dweight = gradients.finish()
        for gradient in (*dx, dweight):
            if gradient is not None:
                _multiply_(gradient, grad)
        return dweight, None, *dx, *[None] * count


class _Gradients:
    """Gradients of the inputs and of ``weight``, filled chunk by chunk. Products accumulate over tokens in fp32."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        weight: Tensor,
        needed: tuple[bool, ...],
        chunks: int,
        total: GradientSum | None,
    ) -> None:
        """``needed``: of the inputs, then of ``weight``. ``total``: takes the gradient of ``weight``, and `finish`
        returns none."""
        self.inputs, self.weight, self.total = inputs, weight, total
        *of_inputs, of_weight = needed
        self.dx = [x.new_empty(x.shape) if need else None for x, need in zip(inputs, of_inputs, strict=True)]
        if total is not None:
            self.dweight: Tensor | None = total.total_OI
            return
        # One chunk is one matmul, which accumulates in fp32 by itself.
        dtype = weight.dtype if chunks == 1 else accumulation_dtype(weight.dtype)
        self.dweight = weight.new_empty(weight.shape, dtype=dtype) if of_weight else None

    @classmethod
    def of(cls, ctx: Any, inputs: Sequence[Tensor], weight: Tensor) -> _Gradients:
        how: _How = ctx.how
        total = None if how.sum_of is None else how.sum_of(ctx.parameter)
        needed = (*ctx.needs_input_grad[2 : 2 + len(inputs)], ctx.needs_input_grad[0])
        return cls(inputs, weight, needed, sum(map(len, ctx.chunks)), total)

    def add(self, dz: Tensor, at: int, chunk: slice) -> None:
        """Add those of a chunk of input ``at``."""
        if (dx := self.dx[at]) is not None:
            torch.mm(dz, self.weight, out=dx[chunk])
        if self.dweight is not None:
            first = at == 0 and chunk.start == 0 and (self.total is None or self.total.is_empty)
            accumulate(self.dweight, dz, self.inputs[at][chunk], first=first)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Those of the inputs, then that of ``weight``."""
        dweight = self.dweight
        self.dweight = None  # frees the accumulator as soon as it is rounded
        if self.total is not None:
            return *self.dx, None
        return *self.dx, dweight if dweight is None else dweight.to(self.weight.dtype)


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]


def _leave_out(targets: Tensor, lse: Tensor, losses: Tensor) -> None:
    """Take tokens without a target out, in place: with an infinite sum of exponentials every gradient is 0."""
    none = targets < 0
    lse.masked_fill_(none, torch.inf)
    losses.masked_fill_(none, 0.0)


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Split into as few chunks of at most ``chunk_tokens`` as possible, of nearly equal size: a matmul of a few rows is
    slow."""
    count = -(-tokens // chunk_tokens)
    size = -(-tokens // count)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _logits_buffer(x: Tensor, weight: Tensor, chunks: list[list[slice]]) -> Tensor:
    """One allocation for the logits of every chunk of every input: [longest chunk, V], rows aligned."""
    columns = weight.shape[0]
    padded = -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    longest = max(chunk.stop - chunk.start for of_input in chunks for chunk in of_input)
    return x.new_empty(longest, padded)[:, :columns]


def _logits(x: Tensor, weight: Tensor, chunk: slice, buffer: Tensor, tokens_held: int | None) -> Tensor:
    """Logits of a chunk. Those of rows after the first ``tokens_held``, which stand for no token, are the lowest
    number, whose exponential beside any other logit is exactly 0. (Differences of infinities would not be numbers.)"""
    logits = torch.mm(x[chunk], weight.t(), out=buffer[: chunk.stop - chunk.start])
    if tokens_held is not None and tokens_held < weight.shape[0]:
        logits[:, tokens_held:] = torch.finfo(logits.dtype).min
    return logits


def _log_sum_exp(
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


def _logits_to_gradient(
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


def _multiply_(tensor: Tensor, factor: Tensor) -> None:
    """``tensor *= factor`` (0-dim). On CUDA nothing is read or written if the factor is 1, as in training."""
    if backend_of(tensor) is Backend.TRITON:
        from workloads.engine.ops import triton_cross_entropy

        triton_cross_entropy.multiply_(tensor, factor)
    else:
        tensor.mul_(factor)
