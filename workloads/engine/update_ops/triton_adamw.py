# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of AdamW: reads weight, gradient and both moments once, and writes all but the gradient once.

What is kept in bf16 is rounded stochastically, by the bits of `workloads.engine.update_ops.stochastic_rounding`.
"""

import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.update_ops.stochastic_rounding import Segment

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
    segment: Segment | None = None,
) -> None:
    """Update flat tensors in place. ``step``, ``factor`` and ``skip`` are 0-dim tensors on the device; ``step`` counts
    this update. ``segment``: where the elements stand in the whole parameter; None if all tensors are fp32."""
    size = weight.numel()
    assert weight.is_contiguous() and gradient.is_contiguous() and first.is_contiguous() and second.is_contiguous()
    _update_kernel[(triton.cdiv(size, _BLOCK),)](
        weight, gradient, first, second, step, factor, skip, size, rate, beta1, beta2, epsilon, decay,
        *(segment[2:] if segment is not None else (0, 0, 1, 1, 0)), ROUNDS=segment is not None,
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
    key,
    base,
    columns,
    whole_columns,
    cut_off,
    ROUNDS: tl.constexpr,
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
    if ROUNDS:
        place = cut_off + offset
        index = base + place // columns * whole_columns + place % columns
        zero = tl.zeros_like(index).to(tl.uint32)
        counted = zero + step.to(tl.uint32)
        of_weight, of_first, of_second, _ = tl.philox(
            key, index.to(tl.uint32), (index >> 32).to(tl.uint32), counted, zero
        )
        weight = _rounded(weight, of_weight, weight_ptr)
        first = _rounded(first, of_first, first_ptr)
        second = _rounded(second, of_second, second_ptr)
    tl.store(first_ptr + offset, first, mask=mask)
    tl.store(second_ptr + offset, second, mask=mask)
    tl.store(weight_ptr + offset, weight, mask=mask)


@triton.jit
def _rounded(x, bits, pointer):
    """fp32 ``x``, with the bits that bf16 has not chosen at random and then cut if ``pointer`` points to bf16."""
    if pointer.dtype.element_ty == tl.bfloat16:
        raised = x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
        x = (raised & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x
