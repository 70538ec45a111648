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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops import chunked_logits
from workloads.engine.ops.backend import accumulation_dtype
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
        chunks = [list(chunked_logits.chunks_of(x.shape[0], how.chunk_tokens)) for x in inputs]
        lses = [x.new_empty(x.shape[0], dtype=accumulation_dtype(x.dtype)) for x in inputs]
        ctx.parameter = weight if how.sum_of is not None else None
        ctx.how, ctx.first_row, ctx.chunks, ctx.tokens_held = how, first_row, chunks, tokens_held
        gradients = _Gradients.of(ctx, inputs, weight) if how.grads_in_forward else None
        buffer = chunked_logits.logits_buffer(inputs[0], weight, chunks)
        parts: list[Tensor] = []
        for at, (x, of_x, lse) in enumerate(zip(inputs, targets, lses, strict=True)):
            losses = torch.empty_like(lse)
            for chunk in chunks[at]:
                logits = chunked_logits.logits_of(x, weight, chunk, buffer, tokens_held)
                lse[chunk], target_logits = chunked_logits.log_sum_exp(
                    logits, of_x[chunk], first_row, how.cap, how.group
                )
                torch.sub(lse[chunk], target_logits, out=losses[chunk])
                if at:
                    chunked_logits.leave_out(of_x[chunk], lse[chunk], losses[chunk])
                if gradients is not None:
                    chunked_logits.logits_to_gradient(
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
            buffer = chunked_logits.logits_buffer(inputs[0], weight, ctx.chunks)
            for at, (x, of_x, lse) in enumerate(zip(inputs, targets, lses, strict=True)):
                for chunk in ctx.chunks[at]:
                    logits = chunked_logits.logits_of(x, weight, chunk, buffer, ctx.tokens_held)
                    chunked_logits.logits_to_gradient(
                        logits, of_x[chunk], ctx.first_row, lse[chunk], how.cap, how.scales[at], how.gradient_scale
                    )
                    gradients.add(logits, at, chunk)
            del logits, buffer  # before the gradient of the weight is copied, as in forward
            *dx, dweight = gradients.finish()
        for gradient in (*dx, dweight):
            if gradient is not None:
                chunked_logits.multiply_(gradient, grad)
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
