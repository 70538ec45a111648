"""The only module that multiplies an activation by a weight matrix and computes the weight's gradient.

A schedule that splits the backward computes a stage's input gradients first, because the previous stage waits for them,
and the weights' gradients when it would otherwise idle (zero bubble, arXiv:2401.10241). A product's backward then
leaves its weight's gradient to a `DeferredGradients`, which computes it later.

With ``gradient_accumulation_fusion`` a `DeferredGradients` adds the product to the sum of the weight's gradients in the
master dtype: on CUDA in the product itself, so that no gradient of one micro-batch exists, or is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.ops.backend import Backend, backend_of, row_blocks


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Sum of a weight's gradients over the micro-batches of a step, in the master dtype."""

    total_OI: Tensor
    is_empty: bool
    """Whether nothing was added yet: the content is then overwritten."""


def accumulate(total_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool) -> None:
    """``total (+)= grad^T @ x``; the old content of ``total`` is ignored if ``first``."""
    beta, backend = 0.0 if first else 1.0, backend_of(grad_TO)
    if total_OI.dtype == grad_TO.dtype:
        torch.addmm(total_OI, grad_TO.t(), x_TI, beta=beta, out=total_OI)
    elif backend is Backend.TRITON:
        torch.ops.aten.addmm.dtype_out(total_OI, grad_TO.t(), x_TI, total_OI.dtype, beta=beta, out=total_OI)
    elif backend is Backend.TORCH:  # no CPU matmul accumulates into a wider dtype
        for rows in row_blocks(*total_OI.shape):
            product = grad_TO[:, rows].t() @ x_TI
            total_OI[rows] = product if first else total_OI[rows] + product


SumOf = Callable[[Tensor], GradientSum]
"""Returns the sum of a weight's gradients so far."""
Make = Callable[[], Tensor | None]
"""Computes a weight's gradient; None if it was added to a `GradientSum`."""
AfterGradient = Callable[[Tensor, int], None]
"""Callback ``(weight, missing)`` for each weight whose gradient has been computed; ``missing``: gradients still to
come."""


class DeferredGradients:
    """Weight gradients of one chunk that autograd does not get: those still to be computed, by micro-batch, and those
    added to sums. ``sum_of``: None if gradients of several micro-batches are summed by autograd and FSDP."""

    def __init__(self, sum_of: SumOf | None = None) -> None:
        self.sum_of = sum_of
        self._open: list[tuple[Tensor, Make]] | None = None
        self._waiting: dict[int, list[tuple[Tensor, Make]]] = {}

    def collect(self, microbatch: int) -> None:
        """Defer weight gradients of this micro-batch from now on."""
        assert microbatch not in self._waiting, f"micro-batch {microbatch} had its input gradients already"
        self._open = self._waiting[microbatch] = []

    def stop(self) -> None:
        self._open = None

    def add(self, weight: Tensor, make: Make) -> bool:
        """Defer the gradient that ``make`` computes. False if the caller has to compute it now.

        ``make`` lives until the weight-gradient pass, and with it all that it refers to. So it must hold detached
        tensors, and not the context of the function: both lead through the graph to the input of the chunk and to that
        input's gradient.
        """
        if self._open is None:
            return False
        self._open.append((weight, make))
        return True

    def product(self, weight: Tensor, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
        """A weight's gradient, ``grad^T x``; None if it was added to the weight's sum."""
        if self.sum_of is None:
            return grad_TO.t() @ x_TI
        so_far = self.sum_of(weight)
        accumulate(so_far.total_OI, grad_TO, x_TI, first=so_far.is_empty)
        return None

    def weights(self, microbatch: int) -> list[Tensor]:
        """Weights whose gradients of a micro-batch are still to be computed."""
        return [weight for weight, _ in self._waiting[microbatch]]

    @torch.no_grad()
    def compute(self, microbatch: int, after_gradient: AfterGradient = lambda weight, missing: None) -> None:
        """Compute the deferred gradients of a micro-batch and add them to their weights, in the order of their
        backward."""
        waiting = self._waiting.pop(microbatch)
        waiting.reverse()
        while waiting:  # each frees its activations before the next one needs memory
            weight, make = waiting.pop()
            gradient = make()
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            del make, gradient  # free their tensors before the gradient is passed on
            after_gradient(weight, len(waiting))


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def saved(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The input of a product, saved with its weight before the product is computed, whose backward finds both in the
    node of its input (``saved_tensors``).

    What a function saves exists for autograd when its forward has ended. Recomputation ends with the last tensor that
    backward needs, so it repeats no product whose tensors were saved before.
    """
    return _Saved.apply(x_TI, weight_OI)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredGradients) -> Tensor:
        # Not the saved tensor: the gradient belongs to this object, even after data parallelism has freed its storage.
        ctx.saved, ctx.parameter, ctx.deferred = x.grad_fn, weight, deferred
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved.saved_tensors
        x, parameter = x.detach(), ctx.parameter
        grad_x = grad @ weight
        deferred: DeferredGradients = ctx.deferred

        def make() -> Tensor | None:
            return deferred.product(parameter, grad, x)

        return grad_x, None if deferred.add(parameter, make) else make(), None


def linear(x_TI: Tensor, weight_OI: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
    """``x W^T`` of tokens (T, I) and a weight (O, I): (T, O). ``deferred``: takes the weight's gradient if the backward
    is split or gradients are added to sums; None if autograd gets it."""
    if deferred is None:
        return F.linear(x_TI, weight_OI)
    return _Linear.apply(saved(x_TI, weight_OI), weight_OI, deferred)
