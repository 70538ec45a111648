"""Casts matrices to fp8 with dynamic scales, and multiplies them.

Shapes: an operand has R rows and C columns, of which C is contracted: ``product`` of (M, C) and (N, C) is (M, N).

| scaling    | activations                  | weights      | gradients                    |
|------------|------------------------------|--------------|------------------------------|
| tensorwise | e4m3, one scale              | e4m3, one    | e5m2, one scale              |
| rowwise    | e4m3, one scale a row        | e4m3, a row  | e4m3, one scale a row        |
| blockwise  | e4m3, 1 x 128                | e4m3, 128^2  | e4m3, 1 x 128                |

A whole tensor of gradients with one scale needs the wider exponent of e5m2 (Micikevicius et al., arXiv:2209.05433,
section 3); with finer scales the significand of e4m3 is more accurate everywhere, as in DeepSeek-V3 (arXiv:2412.19437,
section 3.3). Scales are powers of two, so that scaling itself never rounds, and dynamic: computed from the values that
are cast. Inf and NaN make the whole group of values that share their scale NaN.

A matrix is cast once for both directions in which it is contracted, see `workloads.engine.ops.triton_fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from typing import cast as cast_type

import torch
from torch import Tensor

from workloads.engine.ops.backend import Backend, backend_of, row_blocks

Fp8Scaling = Literal["tensorwise", "rowwise", "blockwise"]
Role = Literal["activation", "weight", "gradient"]
SCALINGS, ROLES = get_args(Fp8Scaling), get_args(Role)

BLOCK = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENT = {E4M3: 8, E5M2: 15}
"""Exponent by format: its largest value is 1.75 times two to this power."""
_Scaled = Literal["tensor", "row", "blocks", "squares"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in fp8, contracted dim last: ``values * factors`` approximates the matrix that was cast."""

    values: Tensor
    """(R, C), contiguous."""
    factors: Tensor
    """fp32: (1,) for the whole matrix; (R,) by row; (C / 128, R) by 1 x 128 values; (R / 128, C / 128) by squares, the
    last dim padded to a multiple of 4 (as cuBLAS reads them)."""
    scaled: _Scaled

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.values, self.factors

    def wide(self, rows: slice = slice(None)) -> Tensor:
        """Some rows as fp32, exactly."""
        values = self.values[rows].float()
        if self.scaled == "tensor":
            return values * self.factors
        if self.scaled == "row":
            return values * self.factors[rows, None]
        if self.scaled == "blocks":
            return values * self.factors[:, rows].t().repeat_interleave(BLOCK, dim=1)
        factors = self.factors[:, : values.shape[1] // BLOCK].repeat_interleave(BLOCK, dim=1)
        return values * factors.repeat_interleave(BLOCK, dim=0)[rows]


def format_of(scaling: Fp8Scaling, role: Role) -> torch.dtype:
    return E5M2 if scaling == "tensorwise" and role == "gradient" else E4M3


def cast(
    x_RC: Tensor,
    scaling: Fp8Scaling,
    role: Role,
    *,
    rows: bool = True,
    columns: bool = True,
    bits: Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:
    """(``x`` to be contracted over its columns (C), ``x^T`` to be contracted over the rows of ``x`` (R)).

    ``rows``, ``columns``: which of the two to compute; the other is None. ``bits``: `largest` of ``x`` if it is already
    known; used only with one scale.
    """
    kind = format_of(scaling, role)
    if scaling == "tensorwise":
        bits = largest(x_RC) if bits is None else bits  # before a copy is made, for which no largest value is recorded
        return cast_with(x_RC.contiguous(), bits, kind, rows=rows, columns=columns)
    x_RC = x_RC.contiguous()
    if scaling == "rowwise":
        return (
            _cast_lines(x_RC, kind, transposed=False) if rows else None,
            _cast_lines(x_RC, kind, transposed=True) if columns else None,
        )
    return _cast_blocks(x_RC, kind, rows, columns, squares=role == "weight")


def product(a_MC: Operand, b_NC: Operand, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """``a b^T``, (M, N) in ``dtype``, accumulated in fp32. ``fast``: tensor cores may keep partial sums in 14 bits for
    the whole product, which is accurate enough for a forward."""
    backend = backend_of(a_MC.values)
    if backend is Backend.TRITON:
        return _product_on_cuda(a_MC, b_NC, dtype, fast)
    out = torch.empty(a_MC.values.shape[0], b_NC.values.shape[0], dtype=dtype, device=a_MC.values.device)
    if backend is Backend.TORCH:
        for rows in row_blocks(*a_MC.values.shape):
            wide = a_MC.wide(rows)
            for columns in row_blocks(*b_NC.values.shape):
                out[rows, columns] = (wide @ b_NC.wide(columns).t()).to(dtype)
    return out


def record_largest(x: Tensor, bits: Tensor) -> Tensor:
    """Record on ``x`` the `largest` that the kernel which made it has computed: it is used until ``x`` is changed in
    place."""
    x._recorded_largest = bits, x._version  # type: ignore[attr-defined]
    return x


def transposed(values_RC: Tensor) -> Tensor:
    """A contiguous copy of the transpose of a matrix in fp8."""
    return transposed_groups(values_RC, 1)[0]


def transposed_groups(values_RC: Tensor, groups: int) -> Tensor:
    """Transpose each of ``groups`` matrices that are stacked by rows: [G, C, R / G]."""
    rows, columns = values_RC.shape
    out = values_RC.new_empty(groups, columns, rows // groups)
    backend = backend_of(values_RC)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8_lines

        triton_fp8_lines.transpose_groups(values_RC, out)
    elif backend is Backend.TORCH:
        out.copy_(values_RC.view(groups, -1, columns).transpose(1, 2))
    return out


def power_of_two(bits: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, its inverse) for the bits (int32) of largest absolute values in fp32: the largest power of two that
    brings them into the format's range. The inverse is NaN for Inf and NaN."""
    exponent = EXPONENT[kind]
    power = (bits.clamp(max=0x7F800000) + 0x1FFFFF >> 23).clamp(min=exponent + 1)
    scale = (exponent + 254 - power << 23).view(torch.float32)
    inverse = (power - exponent << 23).view(torch.float32)
    return scale, inverse.masked_fill(bits >= 0x7F800000, float("nan"))


def largest(x_RC: Tensor) -> Tensor:
    """Bits of the largest absolute value, (1,) as int32: they order like the values, and NaN is above all numbers."""
    bits, version = getattr(x_RC, "_recorded_largest", (None, None))
    if bits is not None and version == x_RC._version:
        return cast_type(Tensor, bits)
    x, backend = x_RC.contiguous(), backend_of(x_RC)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8

        return triton_fp8.largest(x, "tensor")
    bits = x.new_zeros(1, dtype=torch.int32)
    if backend is Backend.TORCH:
        for block in row_blocks(*x.shape):
            torch.maximum(bits, _bits(x[block]).max(), out=bits)
    return bits


def cast_with(
    x: Tensor, bits: Tensor, kind: torch.dtype, *, rows: bool = True, columns: bool = True
) -> tuple[Operand | None, Operand | None]:
    """Like `cast` with one scale, for given bits of the largest value, (1,)."""
    as_rows = x.new_empty(x.shape, dtype=kind) if rows else None
    as_columns = x.new_empty(x.shape[::-1], dtype=kind) if columns else None
    factors = x.new_empty(1, dtype=torch.float32)
    backend = backend_of(x)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8

        triton_fp8.cast(x, bits, "tensor", EXPONENT[kind], as_rows, as_columns, factors)
    elif backend is Backend.TORCH:
        scale, inverse = power_of_two(bits, kind)
        factors.copy_(inverse)
        for block in row_blocks(*x.shape):
            _fill(x[block].float() * scale, block, as_rows, as_columns)
    return _operand(as_rows, factors, "tensor"), _operand(as_columns, factors, "tensor")


def cast_rows_with(x: Tensor, bits_R: Tensor, kind: torch.dtype) -> Tensor:
    """``x`` (R, C) with one scale for each row, for given bits of the row's largest absolute value or of an upper
    bound."""
    values = x.new_empty(x.shape, dtype=kind)
    backend = backend_of(x)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8_lines

        triton_fp8_lines.cast_rows_with(x, bits_R, EXPONENT[kind], values)
    elif backend is Backend.TORCH:
        for block in row_blocks(*x.shape):
            values[block] = (x[block].float() * power_of_two(bits_R[block], kind)[0][:, None]).to(kind)
    return values


def _cast_lines(x: Tensor, kind: torch.dtype, *, transposed: bool) -> Operand:
    """Cast with one scale for each row of ``x``, or of its transpose."""
    values = x.new_empty(x.shape[::-1] if transposed else x.shape, dtype=kind)
    factors = x.new_empty(values.shape[0], dtype=torch.float32)
    backend = backend_of(x)
    if backend is Backend.TRITON and not transposed:
        from workloads.engine.ops import triton_fp8_lines

        triton_fp8_lines.cast_rows(x, EXPONENT[kind], values, factors)
        return Operand(values, factors, "row")
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8

        triton_fp8.cast(x, triton_fp8.largest(x, "column"), "column", EXPONENT[kind], None, values, factors)
        return Operand(values, factors, "row")
    bits = x.new_empty(values.shape[0], dtype=torch.int32)
    if backend is Backend.TORCH:
        source = x.t() if transposed else x
        for block in row_blocks(*source.shape):
            bits[block] = _bits(source[block]).amax(dim=1)
            scale, factors[block] = power_of_two(bits[block], kind)
            values[block] = (source[block].float() * scale[:, None]).to(kind)
    return Operand(values, factors, "row")


def _cast_blocks(
    x: Tensor, kind: torch.dtype, rows: bool, columns: bool, *, squares: bool
) -> tuple[Operand | None, Operand | None]:
    assert x.shape[0] % BLOCK == 0 and x.shape[1] % BLOCK == 0, f"{tuple(x.shape)} is not made of squares of {BLOCK}"
    as_rows = x.new_empty(x.shape, dtype=kind) if rows else None
    as_columns = x.new_empty(x.shape[::-1], dtype=kind) if columns else None
    high, wide = x.shape[0] // BLOCK, x.shape[1] // BLOCK
    if squares:
        row_factors = x.new_empty(high, -(-wide // 4) * 4, dtype=torch.float32)
        column_factors = x.new_empty(wide, -(-high // 4) * 4, dtype=torch.float32)
    else:
        row_factors = x.new_empty(wide, x.shape[0], dtype=torch.float32)
        column_factors = x.new_empty(high, x.shape[1], dtype=torch.float32)
    backend = backend_of(x)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8

        kernel = triton_fp8.cast_squares if squares else triton_fp8.cast_blocks
        kernel(x, EXPONENT[kind], as_rows, as_columns, row_factors, column_factors)
    elif backend is Backend.TORCH:
        for values, source, factors in ((as_rows, x, row_factors), (as_columns, x.t(), column_factors)):
            if values is not None:
                _fill_blocks(values, source, factors, squares=squares)
    scaled: _Scaled = "squares" if squares else "blocks"
    return _operand(as_rows, row_factors, scaled), _operand(as_columns, column_factors, scaled)


def _fill_blocks(values: Tensor, source: Tensor, factors: Tensor, *, squares: bool) -> None:
    for start in range(0, source.shape[0], BLOCK):
        rows = slice(start, start + BLOCK)
        tiles = source[rows].float().reshape(BLOCK, -1, BLOCK)  # row, block of columns, column
        bits = _bits(tiles).amax(dim=2)
        if squares:
            bits = bits.amax(dim=0, keepdim=True)
        scale, inverse = power_of_two(bits, values.dtype)
        values[rows] = (tiles * scale[:, :, None]).to(values.dtype).reshape(BLOCK, -1)
        if squares:
            factors[start // BLOCK, : tiles.shape[1]] = inverse[0]
        else:
            factors[:, rows] = inverse.t()


def _fill(y: Tensor, block: slice, as_rows: Tensor | None, as_columns: Tensor | None) -> None:
    if as_rows is not None:
        as_rows[block] = y.to(as_rows.dtype)
    if as_columns is not None:
        as_columns[:, block] = y.to(as_columns.dtype).t()


def _bits(x: Tensor) -> Tensor:
    return x.float().view(torch.int32) & 0x7FFFFFFF


def _operand(values: Tensor | None, factors: Tensor, scaled: _Scaled) -> Operand | None:
    return None if values is None else Operand(values, factors, scaled)


def _product_on_cuda(a: Operand, b: Operand, dtype: torch.dtype, fast: bool) -> Tensor:
    if a.scaled == "tensor":
        return torch._scaled_mm(a.values, b.values.t(), a.factors, b.factors, out_dtype=dtype, use_fast_accum=fast)
    if a.scaled == "row":
        return torch._scaled_mm(
            a.values, b.values.t(), a.factors[:, None], b.factors[None, :], out_dtype=dtype, use_fast_accum=True
        )
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = {"blocks": ScalingType.BlockWise1x128, "squares": ScalingType.BlockWise128x128}
    return scaled_mm(
        a.values, b.values.t(), a.factors.t(), kinds[a.scaled], b.factors.t(), kinds[b.scaled], output_dtype=dtype
    )
