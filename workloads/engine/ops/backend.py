"""Chooses the backend that computes an operation, and the precision of its sums.

| tensors                    | backend  | what happens                                                  |
|----------------------------|----------|---------------------------------------------------------------|
| FakeTensor, meta           | `SHAPES` | outputs are allocated, as for a kernel, and not filled        |
| CUDA, up to 32 bits        | `TRITON` | one fused kernel a pass                                       |
| others (CPU, CUDA float64) | `TORCH`  | torch operations on a block of rows at a time                 |

All three allocate the same outputs and saved tensors. None of them is used under `torch.compile`: RMSNorm, RoPE and
SwiGLU are then plain expressions, which Inductor fuses with their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

BLOCK_ELEMENTS = 1 << 20
"""The torch backend works on about this many elements at a time: its fp32 temporaries stay far below the outputs."""

ROW_ALIGNMENT = 16
"""Rows of the logits start at multiples of this many elements, and kernels may read and write up to the next one, so
that every access is 16 bytes wide whatever the vocabulary. Every backend pads: the padding counts as memory."""


class Backend(Enum):
    SHAPES = auto()
    TRITON = auto()
    TORCH = auto()


def backend_of(*tensors: Tensor) -> Backend:
    """Backend for an operation on ``tensors``, which share a device and a precision."""
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return Backend.SHAPES
    first = tensors[0]
    return Backend.TRITON if first.is_cuda and first.dtype != torch.float64 else Backend.TORCH


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and transcendental functions: fp32, or fp64 for fp64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(rows: int, row_elements: int) -> Iterator[slice]:
    """Cut ``rows`` into slices of at most `BLOCK_ELEMENTS` elements, and at least one row."""
    step = max(1, BLOCK_ELEMENTS // max(1, row_elements))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
