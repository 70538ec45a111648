# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `workloads.engine.kind_ops.mamba_inputs`. A program takes one or some tokens of one group of
heads, or for the skip of one head. Letters as there."""

import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4
_TOKENS = 8
"""Tokens of one group that a program of `gathered` takes, so that it adds up heads without other threads."""


def spread(x: Tensor, b: Tensor, c: Tensor, steps: Tensor, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write ``outputs``: x times steps, and B and C of every head."""
    assert all(one.is_contiguous() for one in (x, b, c, steps))
    (rows, *numbers), blocks = _by_group(x, b)
    _spread_kernel[(rows,)](x, b, c, steps, *outputs, *numbers, *blocks, num_warps=_WARPS)


def gathered(
    x: Tensor, steps: Tensor, grads: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Write ``results``: the gradients of x, B, C and steps, from ``grads``, those of x times steps, B and C of every
    head."""
    (rows, *numbers), blocks = _by_group(x, results[1])
    grid = (triton.cdiv(rows, _TOKENS),)
    _gathered_kernel[grid](x, steps, *grads, *results, rows, *numbers, *blocks[1:], _TOKENS, num_warps=_WARPS)


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


def _by_group(x: Tensor, b: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens of all groups, groups, heads of a group, channels, numbers of a state), (blocks of the last three)."""
    (sequences, tokens, heads, size), (groups, state) = x.shape, b.shape[2:]
    numbers = (heads // groups, size, state)
    return (sequences * tokens * groups, groups, *numbers), tuple(map(triton.next_power_of_2, numbers))


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
    rows, groups, of_group, size, state, SIZE: tl.constexpr, STATE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists, channel, number = own < rows, tl.arange(0, SIZE), tl.arange(0, STATE)
    of_size = exists[:, None] & (channel < size)[None, :]
    of_state = exists[:, None] & (number < state)[None, :]
    of_b = tl.zeros((TOKENS, STATE), dtype=tl.float32)
    of_c = tl.zeros((TOKENS, STATE), dtype=tl.float32)
    for head in range(of_group):
        row = own * of_group + head
        at = row[:, None] * state + number[None, :]
        of_b += tl.load(grad_k_ptr + at, mask=of_state, other=0.0).to(tl.float32)
        of_c += tl.load(grad_q_ptr + at, mask=of_state, other=0.0).to(tl.float32)
        at = row[:, None] * size + channel[None, :]
        x = tl.load(x_ptr + at, mask=of_size, other=0.0).to(tl.float32)
        grad = tl.load(grad_v_ptr + at, mask=of_size, other=0.0).to(tl.float32)
        steps = tl.load(steps_ptr + row, mask=exists, other=0.0).to(grad_x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(grad_x_ptr + at, (grad * steps[:, None]).to(grad_x_ptr.dtype.element_ty), mask=of_size)
        tl.store(grad_steps_ptr + row, tl.sum(grad * x, axis=1), mask=exists)
    at = own[:, None] * state + number[None, :]
    tl.store(grad_b_ptr + at, of_b.to(grad_b_ptr.dtype.element_ty), mask=of_state)
    tl.store(grad_c_ptr + at, of_c.to(grad_c_ptr.dtype.element_ty), mask=of_state)


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
