# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of SGD with momentum: reads weight, gradient and momentum once, and writes all but the gradient
once."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WARPS = 8


def update(
    weight: Tensor, gradient: Tensor, momentum: Tensor, factor: Tensor, rate: float, kept: float, decay: float
) -> None:
    """Update flat fp32 tensors in place. ``factor``: of the gradient, a 0-dim tensor on the device; ``kept``: the share
    of the momentum that an update keeps."""
    size = weight.numel()
    assert weight.is_contiguous() and gradient.is_contiguous() and momentum.is_contiguous()
    _update_kernel[(triton.cdiv(size, _BLOCK),)](
        weight, gradient, momentum, factor, size, rate, kept, decay, BLOCK=_BLOCK, num_warps=_WARPS
    )


@triton.jit
def _update_kernel(weight_ptr, gradient_ptr, momentum_ptr, factor_ptr, size, rate, kept, decay, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0)
    gradient = tl.load(gradient_ptr + offset, mask=mask, other=0.0) * tl.load(factor_ptr)
    momentum = tl.load(momentum_ptr + offset, mask=mask, other=0.0)
    momentum = kept * momentum + gradient + decay * weight
    tl.store(momentum_ptr + offset, momentum, mask=mask)
    tl.store(weight_ptr + offset, weight - rate * momentum, mask=mask)
