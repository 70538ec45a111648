# mypy: disable-error-code="no-untyped-def"
"""Splits a matrix among the programs of the Triton kernels that work by rows: a program has some columns of one row."""

import triton
import triton.language as tl

_MAX_BLOCK = 2048
WARPS = 4


def blocks_of(size: int) -> tuple[int, int]:
    """(columns of a block, blocks of a row) for rows of ``size`` columns."""
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    return block, triton.cdiv(size, block)


@triton.jit
def own_columns(size, blocks, BLOCK: tl.constexpr):
    """(row, columns, mask of the columns that are in the row) of this program."""
    program = tl.program_id(0)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return (program // blocks).to(tl.int64), column, column < size
