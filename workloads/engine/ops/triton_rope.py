# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of RoPE: queries and keys in one launch. A row is one head of one token."""

import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Elements of each half that a program rotates."""


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated_q: Tensor, rotated_k: Tensor, *, inverse: bool
) -> None:
    """Rotate ``q`` and ``k`` [B, S, heads, H] of any strides into contiguous outputs."""
    if q.stride(3) != 1:
        q = q.contiguous()
    if k.stride(3) != 1:
        k = k.contiguous()
    batch, seq_len, q_heads, head_dim = q.shape
    k_heads = k.shape[2]
    block = triton.next_power_of_2(head_dim // 2)
    tile_rows = max(1, _TILE // block)
    q_programs = triton.cdiv(batch * seq_len * q_heads, tile_rows)
    k_programs = triton.cdiv(batch * seq_len * k_heads, tile_rows)
    _rotate_kernel[(q_programs + k_programs,)](
        q,
        *q.stride()[:3],
        rotated_q,
        k,
        *k.stride()[:3],
        rotated_k,
        cos.contiguous(),
        sin.contiguous(),
        batch * seq_len,
        seq_len,
        q_programs,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=head_dim // 2,
        ROWS=tile_rows,
        BLOCK=block,
        INVERSE=inverse,
        num_warps=4,
    )


@triton.jit
def _rotate_rows(
    x_ptr,
    batch_stride,
    token_stride,
    head_stride,
    y_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    seq_len,
    tile,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
):
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    position = token % seq_len
    column = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens)[:, None] & (column < HALF)
    table = position[:, None] * HALF + column
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    batch = (token // seq_len).to(tl.int64)
    start = batch * batch_stride + position.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    source = x_ptr + start[:, None] + column
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = y_ptr + row.to(tl.int64)[:, None] * (2 * HALF) + column
    tl.store(target, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(
    q_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    rotated_q_ptr,
    k_ptr,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    rotated_k_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    seq_len,
    q_programs,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
):
    program = tl.program_id(0)
    if program < q_programs:
        _rotate_rows(
            q_ptr, q_batch_stride, q_token_stride, q_head_stride, rotated_q_ptr,
            cos_ptr, sin_ptr, tokens, seq_len, program, Q_HEADS, HALF, ROWS, BLOCK, INVERSE,
        )  # fmt: skip
    else:
        _rotate_rows(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride, rotated_k_ptr,
            cos_ptr, sin_ptr, tokens, seq_len, program - q_programs, K_HEADS, HALF, ROWS, BLOCK, INVERSE,
        )  # fmt: skip
