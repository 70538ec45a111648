"""A recurrence over a sequence, computed segment by segment, that saves nothing but its inputs.

A segment is some chunks of tokens. A `Step` computes the outputs of one segment and the state after it, from the
segment's inputs and the state before it, in plain torch operations and in fp32 (fp64 for fp64 inputs).

    forward     one segment after the other; the state is passed on
    backward    the states before all segments are computed again; then, from the last segment to the first, a segment
                runs once more with autograd, and the gradient of its state is passed to the segment before it

Outputs between the operations of a step exist for one segment at a time: `SEGMENT_TOKENS` bounds them. They, and the
states between segments, are working memory of this op, as a kernel's own memory is: on shapes alone (FakeTensors)
nothing is computed, and the backward takes as much in one tensor (`workloads.costs.memory.recurrent_segments`). Nothing
waits for the device, so a CUDA graph can contain it.

Shapes: B sequences, S tokens, L tokens of a segment, C columns of an input, O columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of
from workloads.spec.recurrent_kernels import SEGMENT_TOKENS


class Step(Protocol):
    """What happens in one segment."""

    chunk: int
    """Tokens of a chunk."""
    outputs: int
    """Columns of the output."""

    def start(self, like: Tensor) -> tuple[Tensor, ...]:
        """The state before the first token, of as many sequences as ``like`` [B, ...] has, on its device and in its
        dtype."""

    def __call__(
        self, sequences: Sequence[Tensor], parameters: Sequence[Tensor], state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(outputs [B, L, O], state after the segment) of inputs [B, L, C]; everything in fp32 or fp64."""


@torch.compiler.disable  # one graph break, as with attention to windows
def scanned(step: Step, sequences: Sequence[Tensor], parameters: Sequence[Tensor], taken: int = 0) -> Tensor:
    """Outputs [B, S, O] of a recurrence over ``sequences`` [B, S, C], in their dtype. The inputs are saved. ``taken``:
    bytes that a backward on shapes alone takes."""
    return _Scanned.apply(step, taken, len(sequences), *sequences, *parameters)


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, taken: int, count: int, *tensors: Tensor) -> Tensor:
        ctx.step, ctx.taken, ctx.count = step, taken, count
        ctx.save_for_backward(*tensors)
        first = tensors[0]
        y = first.new_empty(*first.shape[:2], step.outputs)
        if backend_of(*tensors) is not Backend.SHAPES:
            parameters = _wide(tensors[count:])
            state = step.start(_wide(tensors[:1])[0][:, :1])
            for part in _parts(step, first):
                y[:, part], state = step(_wide([x[:, part] for x in tensors[:count]]), parameters, state)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        step, count, tensors = ctx.step, ctx.count, ctx.saved_tensors
        found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        if backend_of(*tensors) is Backend.SHAPES:
            tensors[0].new_empty(ctx.taken, dtype=torch.uint8)
        else:
            _backward(step, tensors[:count], _wide(tensors[count:]), dy, found)
        return None, None, None, *found


def _backward(
    step: Step, sequences: Sequence[Tensor], parameters: Sequence[Tensor], dy: Tensor, found: Sequence[Tensor]
) -> None:
    """Write the gradients of the sequences and of the parameters to ``found``."""
    parts = _parts(step, sequences[0])
    states = [step.start(_wide(sequences[:1])[0][:, :1])]
    for part in parts[:-1]:
        states.append(step(_wide([x[:, part] for x in sequences]), parameters, states[-1])[1])
    sums = [torch.zeros_like(one) for one in parameters]
    d_state: tuple[Tensor, ...] = ()
    for part in reversed(parts):
        inputs = [x.detach().requires_grad_() for x in (*_wide([x[:, part] for x in sequences]), *parameters)]
        before = tuple(one.detach().requires_grad_() for one in states.pop())
        with torch.enable_grad():
            y, after = step(inputs[: len(sequences)], inputs[len(sequences) :], before)
        outputs, grads = (y, *after[: len(d_state)]), (dy[:, part].to(y.dtype), *d_state)
        gradients = torch.autograd.grad(outputs, (*inputs, *before), grads, materialize_grads=True)
        for total, one in zip(found, gradients[: len(sequences)], strict=False):
            total[:, part] = one
        for total, one in zip(sums, gradients[len(sequences) :], strict=False):
            total += one
        d_state = gradients[len(inputs) :]
    for total, one in zip(found[len(sequences) :], sums, strict=True):
        total.copy_(one)


def _parts(step: Step, like: Tensor) -> list[slice]:
    """Segments of a sequence."""
    batch, length = like.shape[:2]
    tokens = max(1, SEGMENT_TOKENS // (batch * step.chunk)) * step.chunk
    return [slice(first, min(first + tokens, length)) for first in range(0, length, tokens)]


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.to(accumulation_dtype(x.dtype)) for x in tensors]


def convolved(x_BLC: Tensor, tail_BKC: Tensor, weight_CK: Tensor, bias_C: Tensor | None) -> tuple[Tensor, Tensor]:
    """(``silu`` of a causal convolution of every channel by itself, the last K - 1 inputs, which the next segment
    needs). ``tail_BKC``: those of the segment before, K being the length of the kernel."""
    length, kernel = x_BLC.shape[1], weight_CK.shape[1]
    together = torch.cat([tail_BKC, x_BLC], 1)
    y = together[:, :length] * weight_CK[:, 0]
    for at in range(1, kernel):
        y = y + together[:, at : at + length] * weight_CK[:, at]
    return torch.nn.functional.silu(y if bias_C is None else y + bias_C), together[:, length:]


def in_chunks(x: Tensor, size: int) -> Tensor:
    """[B, L, H, ...] as [B, chunks, H, tokens of a chunk, ...]; zeros fill the last chunk."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.unflatten(1, (-1, size)).transpose(2, 3)


def from_chunks(x: Tensor, length: int) -> Tensor:
    """Inverse of `in_chunks` for the first ``length`` tokens."""
    return x.transpose(2, 3).flatten(1, 2)[:, :length]
