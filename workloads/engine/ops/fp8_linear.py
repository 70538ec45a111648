"""A linear layer whose matrix products run in fp8: its forward and both of its backward products.

Shapes: T tokens, I input and O output features. The three products contract over I, O and T, so each of their matrices
is needed in fp8 in both directions (`workloads.engine.ops.fp8`):

    y (T, O) = x W^T        dx (T, I) = dy W        dW (O, I) = dy^T x

With scales by rows the weight's gradient stays a bf16 product, as in torchao's recipe ``rowwise_with_gw_hp``:
contracted over tokens, every row of ``x^T`` and ``dy^T`` would need its own scale, and outliers are rows of tokens and
features at once. Embedding, head, norms and attention do not use fp8: they stay in bf16.

Backward keeps the input in fp8, already transposed. If the input is saved in bf16 elsewhere (attention saves its
output) or recomputed, a second copy would only cost memory: the input itself is saved and cast again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workloads.engine.ops.fp8 import Fp8Scaling, Operand, cast, largest, product, transposed
from workloads.engine.ops.linear import DeferredGradients


@dataclass(slots=True)
class Gradient:
    """Gradient of an output, in the form that each of the two products of the backward takes."""

    rows: Operand
    for_weight: Operand | Tensor


class Fp8Products:
    """Products of one linear layer. It holds no tensors except the weight's scale."""

    def __init__(self, scaling: Fp8Scaling, *, keeps_input: bool = False) -> None:
        self.scaling: Fp8Scaling = scaling
        self.keeps_input = keeps_input
        """The input is already saved or recomputed elsewhere, so save the bf16 tensor itself instead of a second, fp8
        copy."""
        self.wide_weight_gradient = scaling == "rowwise"
        self.weight_factors: Tensor | None = None
        """Inverse of the weight's scale, (1,), if the weight is gathered in fp8
        (`workloads.engine.training.fp8_gather`)."""

    def forward(self, x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(``x W^T``, tensors of ``x`` to save for `weight_gradient`)."""
        if self.keeps_input or self.wide_weight_gradient:
            bits = largest(x_TI) if self.scaling == "tensorwise" else None
            rows, _ = cast(x_TI, self.scaling, "activation", columns=False, bits=bits)
            kept: tuple[Tensor, ...] = (x_TI,) if bits is None else (x_TI, bits)
        else:
            rows, columns = cast(x_TI, self.scaling, "activation")
            assert columns is not None
            kept = columns.tensors
        assert rows is not None
        return product(rows, self._weight(weight_OI), x_TI.dtype, fast=True), kept

    def gradient(self, grad_TO: Tensor) -> Gradient:
        """Cast the output's gradient to fp8, once for both products."""
        wide = self.wide_weight_gradient
        rows, columns = cast(grad_TO, self.scaling, "gradient", columns=not wide)
        assert rows is not None
        return Gradient(rows, grad_TO if columns is None else columns)

    def input_gradient(self, grad: Gradient, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        return product(grad.rows, self._transposed_weight(weight_OI), dtype, fast=False)

    def weight_gradient(
        self,
        grad_for_weight: Operand | Tensor,
        kept: tuple[Tensor, ...],
        dtype: torch.dtype,
        weight: Tensor | None = None,
        deferred: DeferredGradients | None = None,
    ) -> Tensor | None:
        """``dy^T x``. ``kept``: the saved tensors that `forward` returned, or the input itself. A product in bf16 may
        be added to the sum of ``weight`` (`DeferredGradients.product`); those in fp8 cannot add to fp32."""
        if isinstance(grad_for_weight, Tensor):
            if deferred is not None and weight is not None:
                return deferred.product(weight, grad_for_weight, kept[0])
            return grad_for_weight.t() @ kept[0]
        if kept[0].dtype == dtype:
            bits = kept[1] if len(kept) > 1 else None
            _, columns = cast(kept[0], self.scaling, "activation", rows=False, bits=bits)
        else:
            columns = Operand(kept[0], kept[1], "tensor" if self.scaling == "tensorwise" else "blocks")
        assert columns is not None
        return product(grad_for_weight, columns, dtype, fast=False)

    def _weight(self, weight: Tensor) -> Operand:
        if self.weight_factors is not None:
            return Operand(weight.detach(), self.weight_factors, "tensor")
        rows, _ = cast(weight, self.scaling, "weight", columns=False)
        assert rows is not None
        return rows

    def _transposed_weight(self, weight: Tensor) -> Operand:
        if self.weight_factors is not None:
            return Operand(transposed(weight.detach()), self.weight_factors, "tensor")
        _, columns = cast(weight, self.scaling, "weight", rows=False)
        assert columns is not None
        return columns


def take_gradients_in(weight: Tensor, dtype: torch.dtype) -> None:
    """Let a weight that was gathered in fp8 have gradients of the compute dtype: autograd would cast them to fp8."""
    if weight.dtype != dtype and weight.grad_dtype != dtype:
        weight.grad_dtype = dtype


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, products: Fp8Products, deferred: DeferredGradients | None
    ) -> Tensor:
        y, kept = products.forward(x, weight)
        ctx.save_for_backward(weight, *kept)
        ctx.products, ctx.deferred, ctx.dtype = products, deferred, x.dtype
        ctx.parameter = weight if deferred is not None else None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weight, *saved = ctx.saved_tensors
        kept = tuple(one.detach() for one in saved)
        products: Fp8Products = ctx.products
        dtype, parameter, deferred = ctx.dtype, ctx.parameter, ctx.deferred
        cast_grad = products.gradient(grad)
        del grad
        grad_x = products.input_gradient(cast_grad, weight, dtype)
        for_weight = cast_grad.for_weight
        del cast_grad

        def make() -> Tensor | None:
            return products.weight_gradient(for_weight, kept, dtype, parameter, deferred)

        if deferred is not None and deferred.add(parameter, make):
            return grad_x, None, None, None
        return grad_x, make(), None, None


def fp8_linear(
    x_TI: Tensor, weight_OI: Tensor, products: Fp8Products, deferred: DeferredGradients | None = None
) -> Tensor:
    """``x W^T`` of tokens (T, I) and a weight (O, I), like `workloads.engine.ops.linear.linear`, but in fp8."""
    take_gradients_in(weight_OI, x_TI.dtype)
    y: Tensor = _Fp8Linear.apply(x_TI, weight_OI, products, deferred)
    return y
