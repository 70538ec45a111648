# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of AdamW: reads weight, gradient and both moments once, and writes all but the gradient once."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WARPS = 8


def update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    factor: Tensor,
    skip: Tensor | None,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    """Update in place. ``step``, ``factor`` and ``skip`` are 0-dim tensors on the device; ``step`` counts this
    update."""
    size = weight.numel()
    assert weight.is_contiguous() and gradient.is_contiguous() and first.is_contiguous() and second.is_contiguous()
    _update_kernel[(triton.cdiv(size, _BLOCK),)](
        weight, gradient, first, second, step, factor, skip, size, rate, beta1, beta2, epsilon, decay,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _update_kernel(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    step_ptr,
    factor_ptr,
    skip_ptr,
    size,
    rate,
    beta1,
    beta2,
    epsilon,
    decay,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if skip_ptr is not None:
        size = tl.where(tl.load(skip_ptr) == 0.0, size, 0)
    mask = offset < size
    step = tl.load(step_ptr).to(tl.float32)
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + offset, mask=mask, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    first = tl.load(first_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    first = beta1 * first + (1.0 - beta1) * gradient
    second = beta2 * second + (1.0 - beta2) * gradient * gradient
    correction1 = 1.0 - tl.exp2(step * tl.log2(beta1))
    correction2 = 1.0 - tl.exp2(step * tl.log2(beta2))
    deviation = tl.sqrt(second) / tl.sqrt(correction2) + epsilon
    weight = weight * (1.0 - rate * decay) - rate / correction1 * first / deviation
    tl.store(first_ptr + offset, first, mask=mask)
    tl.store(second_ptr + offset, second, mask=mask)
    tl.store(weight_ptr + offset, weight, mask=mask)
