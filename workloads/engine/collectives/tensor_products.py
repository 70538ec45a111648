"""Products of tensor parallelism and what they exchange, as autograd functions.

A column-parallel product saves the *local* rows of its input and gathers them again in its backward, overlapped with
the product of the input's gradient. Where ranks share memory, every exchange of a product overlaps with this product
itself (`workloads.engine.collectives.peer_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workloads.engine.collectives.communication import Axis, all_reduce_async, gather_async, reduce_scatter_async, wait
from workloads.engine.collectives.peer_memory import Gathering, PeerMemory, Sum, gathered_product
from workloads.engine.ops.fp8_linear import Fp8Products
from workloads.engine.ops.linear import DeferredGradients


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor-parallel axis as the layers need it. With ``size == 1`` no collective runs."""

    axis: Axis
    sequence_parallel: bool

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def rank(self) -> int:
        return self.axis.rank

    @property
    def sizes(self) -> dict[str, int]:
        return {"tp": self.size}


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the products of a layer exchange tokens."""

    tp: TensorParallel
    peers: PeerMemory | None

    def gather(self, x: Tensor) -> Gathering | Tensor:
        """Start to gather tokens; without sequence parallelism every rank has them."""
        if self.peers is not None:
            return self.peers.gather(x)
        return gather_async(x, self.tp.axis) if self.tp.sequence_parallel else x

    def gathered(self, tokens: Gathering | Tensor) -> Tensor:
        if isinstance(tokens, Gathering):
            return tokens.wait()
        return wait(tokens) if self.tp.sequence_parallel else tokens

    def gathered_product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """``X matrix`` of the tokens of all ranks."""
        if self.peers is not None:
            return gathered_product(self.peers.gather(x, whole=False), matrix)
        return self.gathered(self.gather(x)) @ matrix

    def summed_product(self, x: Tensor, matrix: Tensor) -> Sum | Tensor:
        """Start to sum ``x matrix`` over ranks; with sequence parallelism this rank keeps only its own tokens."""
        if self.peers is not None:
            return self.peers.summed_product(x, matrix)
        return sum_async(x @ matrix, self.tp)

    @staticmethod
    def summed(rows: Sum | Tensor) -> Tensor:
        return rows.wait() if isinstance(rows, Sum) else wait(rows)


class ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, exchange: Exchange, deferred: DeferredGradients | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exchange, ctx.deferred = exchange, deferred
        ctx.parameter = weight if deferred is not None else None
        return exchange.gathered_product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        x, parameter, deferred = x.detach(), ctx.parameter, ctx.deferred
        exchange: Exchange = ctx.exchange

        def product(full: Tensor) -> Tensor | None:
            return grad.t() @ full if deferred is None else deferred.product(parameter, grad, full)

        def later() -> Tensor | None:
            return product(exchange.gathered(exchange.gather(x)))

        if deferred is not None and deferred.add(parameter, later):
            return exchange.summed(exchange.summed_product(grad, weight)), None, None, None
        tokens = exchange.gather(x)
        partial = exchange.summed_product(grad, weight)
        grad_weight = product(exchange.gathered(tokens))
        return exchange.summed(partial), grad_weight, None, None


class RowProduct(torch.autograd.Function):
    """A row-parallel product and its sum over ranks, in shared memory. Its input is one of `saved`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, peers: PeerMemory, deferred: DeferredGradients | None) -> Tensor:
        ctx.saved, ctx.peers, ctx.deferred = x.grad_fn, peers, deferred
        ctx.parameter = weight if deferred is not None else None
        return peers.summed_product(x, weight.t()).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved.saved_tensors
        x, parameter, deferred = x.detach(), ctx.parameter, ctx.deferred
        tokens = ctx.peers.gather(grad)
        grad_x = gathered_product(tokens, weight)
        full = tokens.wait()

        def make() -> Tensor | None:
            return full.t() @ x if deferred is None else deferred.product(parameter, full, x)

        if deferred is not None and deferred.add(parameter, make):
            return grad_x, None, None, None
        return grad_x, make(), None, None


class Fp8ColumnProduct(torch.autograd.Function):
    """Like `ColumnProduct`, in fp8. The local rows are saved and gathered in the compute dtype, and cast after the
    gather."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        exchange: Exchange,
        products: Fp8Products,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exchange, ctx.products, ctx.deferred = exchange, products, deferred
        ctx.parameter = weight if deferred is not None else None
        return products.forward(exchange.gathered(exchange.gather(x)), weight)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        x, parameter, deferred = x.detach(), ctx.parameter, ctx.deferred
        exchange: Exchange = ctx.exchange
        products: Fp8Products = ctx.products
        cast_grad = products.gradient(grad)
        for_weight = cast_grad.for_weight
        del grad

        def product(full: Tensor) -> Tensor | None:
            return products.weight_gradient(for_weight, (full,), x.dtype, parameter, deferred)

        def later() -> Tensor | None:
            return product(exchange.gathered(exchange.gather(x)))

        grad_weight = None
        if deferred is not None and deferred.add(parameter, later):
            partial = sum_async(products.input_gradient(cast_grad, weight, x.dtype), exchange.tp)
        else:
            tokens = exchange.gather(x)
            partial = sum_async(products.input_gradient(cast_grad, weight, x.dtype), exchange.tp)
            del cast_grad
            grad_weight = product(exchange.gathered(tokens))
        return wait(partial), grad_weight, None, None, None


def sum_async(x: Tensor, tp: TensorParallel) -> Tensor:
    """Start summing partial rows; with sequence parallelism this rank keeps only its own tokens."""
    return reduce_scatter_async(x, tp.axis) if tp.sequence_parallel else all_reduce_async(x, tp.axis)
