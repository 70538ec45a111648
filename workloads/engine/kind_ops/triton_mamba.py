# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `workloads.engine.kind_ops.mamba_inputs`. A program takes one token of one group of heads, or for
the skip some tokens of one head. Letters as there."""

import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4


def spread(x: Tensor, b: Tensor, c: Tensor, steps: Tensor, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write ``outputs``: x times steps, and B and C of every head."""
    grid, sizes = _by_group(x, b)
    _spread_kernel[grid](x, b, c, steps, *outputs, *sizes, num_warps=_WARPS)


def gathered(
    x: Tensor, steps: Tensor, grads: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Write ``results``: the gradients of x, B, C and steps, from ``grads``, those of x times steps, B and C of every
    head."""
    grid, sizes = _by_group(x, results[1])
    _gathered_kernel[grid](x, steps, *grads, *results, *sizes, num_warps=_WARPS)


def skipped(y: Tensor, x: Tensor, skip: Tensor, z: Tensor, out: Tensor, gate: Tensor, block: int) -> None:
    """Write ``out = y + skip x``, and to ``gate`` the values of ``z``, whose tokens may be apart. ``block``: tokens of
    a program."""
    assert z.stride(0) == z.shape[1] * z.stride(1) and z.stride(2) == 1
    tokens, heads, size = x.shape[0] * x.shape[1], *x.shape[2:]
    _skipped_kernel[(triton.cdiv(tokens, block), heads)](
        y, x, skip, z, out, gate, z.stride(1), tokens, heads, size, block, triton.next_power_of_2(size),
        num_warps=_WARPS,
    )  # fmt: skip


def skip_gradients(grad: Tensor, x: Tensor, skip: Tensor, grad_x: Tensor, parts: Tensor, block: int) -> None:
    """Write ``grad_x = skip grad``, and to ``parts`` [programs, H] the sums of ``grad x`` of ``block`` tokens each."""
    tokens, heads, size = x.shape[0] * x.shape[1], *x.shape[2:]
    _skip_gradients_kernel[(parts.shape[0], heads)](
        grad, x, skip, grad_x, parts, tokens, heads, size, block, triton.next_power_of_2(size), num_warps=_WARPS
    )


def _by_group(x: Tensor, b: Tensor) -> tuple[tuple[int], tuple[int, ...]]:
    """(grid, numbers and blocks) of the kernels whose programs take one token of one group."""
    (sequences, tokens, heads, size), (groups, state) = x.shape, b.shape[2:]
    numbers = (heads // groups, size, state)
    return (sequences * tokens * groups,), (groups, *numbers, *map(triton.next_power_of_2, numbers))


@triton.jit
def _spread_kernel(
    x_ptr, b_ptr, c_ptr, steps_ptr, v_ptr, k_ptr, q_ptr, groups, of_group, size, state,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    token, group = program // groups, program % groups
    head, channel, number = tl.arange(0, HEADS), tl.arange(0, SIZE), tl.arange(0, STATE)
    own = (head < of_group)[:, None]
    inside = own & (channel < size)[None, :]
    at = token * groups * of_group * size + (group * of_group + head)[:, None] * size + channel[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    steps = tl.load(steps_ptr + program * of_group + head, mask=head < of_group, other=0.0)
    steps = steps.to(v_ptr.dtype.element_ty).to(tl.float32)
    tl.store(v_ptr + at, (x * steps[:, None]).to(v_ptr.dtype.element_ty), mask=inside)
    b = tl.load(b_ptr + program * state + number, mask=number < state, other=0.0)
    c = tl.load(c_ptr + program * state + number, mask=number < state, other=0.0)
    inside = own & (number < state)[None, :]
    at = (program * of_group + head)[:, None] * state + number[None, :]
    tl.store(k_ptr + at, tl.broadcast_to(b[None, :], (HEADS, STATE)), mask=inside)
    tl.store(q_ptr + at, tl.broadcast_to(c[None, :], (HEADS, STATE)), mask=inside)


@triton.jit
def _gathered_kernel(
    x_ptr, steps_ptr, grad_v_ptr, grad_k_ptr, grad_q_ptr, grad_x_ptr, grad_b_ptr, grad_c_ptr, grad_steps_ptr,
    groups, of_group, size, state, HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    token, group = program // groups, program % groups
    head, channel, number = tl.arange(0, HEADS), tl.arange(0, SIZE), tl.arange(0, STATE)
    own = (head < of_group)[:, None]
    inside = own & (channel < size)[None, :]
    at = token * groups * of_group * size + (group * of_group + head)[:, None] * size + channel[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_v_ptr + at, mask=inside, other=0.0).to(tl.float32)
    steps = tl.load(steps_ptr + program * of_group + head, mask=head < of_group, other=0.0)
    steps = steps.to(grad_x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(grad_x_ptr + at, (grad * steps[:, None]).to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_steps_ptr + program * of_group + head, tl.sum(grad * x, axis=1), mask=head < of_group)
    inside = own & (number < state)[None, :]
    at = (program * of_group + head)[:, None] * state + number[None, :]
    of_b = tl.sum(tl.load(grad_k_ptr + at, mask=inside, other=0.0).to(tl.float32), axis=0)
    of_c = tl.sum(tl.load(grad_q_ptr + at, mask=inside, other=0.0).to(tl.float32), axis=0)
    tl.store(grad_b_ptr + program * state + number, of_b.to(grad_b_ptr.dtype.element_ty), mask=number < state)
    tl.store(grad_c_ptr + program * state + number, of_c.to(grad_c_ptr.dtype.element_ty), mask=number < state)


@triton.jit
def _skipped_kernel(
    y_ptr, x_ptr, skip_ptr, z_ptr, out_ptr, gate_ptr, z_stride, tokens, heads, size,
    TOKENS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at, inside, token, head = _own_tokens(tokens, heads, size, TOKENS, SIZE)
    of_z = token[:, None] * z_stride + head * size + tl.arange(0, SIZE)[None, :]
    tl.store(gate_ptr + at, tl.load(z_ptr + of_z, mask=inside, other=0.0), mask=inside)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(skip_ptr + head).to(tl.float32) * x
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _skip_gradients_kernel(
    grad_ptr, x_ptr, skip_ptr, grad_x_ptr, parts_ptr, tokens, heads, size, TOKENS: tl.constexpr, SIZE: tl.constexpr
):
    at, inside, _, head = _own_tokens(tokens, heads, size, TOKENS, SIZE)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    of_x = grad * tl.load(skip_ptr + head).to(tl.float32)
    tl.store(grad_x_ptr + at, of_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(parts_ptr + tl.program_id(0) * heads + head, tl.sum(tl.sum(grad * x, axis=1), axis=0))


@triton.jit
def _own_tokens(tokens, heads, size, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """(offsets, which of them exist, tokens, head) of a program of the skip."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel, head = tl.arange(0, SIZE), tl.program_id(1)
    at = (token * heads + head)[:, None] * size + channel[None, :]
    return at, (token < tokens)[:, None] & (channel < size)[None, :], token, head
