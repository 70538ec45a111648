"""The only module that multiplies an activation by a weight matrix and computes the weight's gradient.

A schedule that splits the backward computes a stage's input gradients first, because the previous stage waits for them,
and the weights' gradients when it would otherwise idle (zero bubble, arXiv:2401.10241). A product's backward then
leaves its weight's gradient to a `DeferredGradients`, which computes it later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Make = Callable[[], Tensor]
AfterGradient = Callable[[Tensor, int], None]
"""Callback ``(weight, missing)`` for each weight whose gradient has been computed; ``missing``: gradients still to
come."""


class DeferredGradients:
    """Weight gradients of one chunk that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Make]] | None = None
        self._waiting: dict[int, list[tuple[Tensor, Make]]] = {}

    def collect(self, microbatch: int) -> None:
        """Defer weight gradients of this micro-batch from now on."""
        assert microbatch not in self._waiting, f"micro-batch {microbatch} had its input gradients already"
        self._open = self._waiting[microbatch] = []

    def stop(self) -> None:
        self._open = None

    def add(self, weight: Tensor, make: Make) -> bool:
        """Defer the gradient that ``make`` computes. False if the caller has to compute it now."""
        if self._open is None:
            return False
        self._open.append((weight, make))
        return True

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
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            del make, gradient  # free their tensors before the gradient is passed on
            after_gradient(weight, len(waiting))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not the saved tensor: the gradient belongs to this object, even after data parallelism has freed its storage.
        ctx.parameter, ctx.deferred = weight, deferred
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        deferred = ctx.deferred.add(ctx.parameter, lambda: grad.t() @ x)
        return grad_x, None if deferred else grad.t() @ x, None


def linear(x_TI: Tensor, weight_OI: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
    """``x W^T`` of tokens (T, I) and a weight (O, I): (T, O). ``deferred``: takes the weight's gradient if the backward
    is split; None if no schedule splits it."""
    if deferred is None:
        return F.linear(x_TI, weight_OI)
    return _Linear.apply(x_TI, weight_OI, deferred)
