"""Layers for tensor parallelism, with local weight shards and explicit collectives.

Activations between tensor-parallel regions are flattened to tokens, ``x_TD``. With sequence parallelism each rank holds
``T / tp`` consecutive rows of the flattened batch, so gathering along dim 0 needs no transpose whatever the batch.

    column-parallel  Y = X W^T, W = [W_1; ...; W_tp] by rows:    X gathered over tokens, Y split over features
    row-parallel     Y = X W^T, W = [W_1, ..., W_tp] by columns: X split over features, Y reduce-scattered over tokens

(Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198.) Without sequence parallelism the pair is
identity forward / all-reduce backward, and all-reduce forward / identity backward. The products and their exchanges are
in `workloads.engine.collectives.tensor_products`.

DTensor could express the same, but its dispatch costs the host more time than a GPU needs for a layer in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.engine.collectives.communication import gather_async, wait
from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.collectives.peer_memory import PeerMemory
from workloads.engine.collectives.tensor_products import (
    ColumnProduct,
    Exchange,
    Fp8ColumnProduct,
    RowProduct,
    TensorParallel,
    sum_async,
)
from workloads.engine.ops.fp8_linear import Fp8Products, fp8_linear, take_gradients_in
from workloads.engine.ops.linear import DeferredGradients, linear, saved
from workloads.spec.weights import Weight


class _GatherTokens(torch.autograd.Function):
    """Gathers the tokens of all ranks, as before the head. The input's gradient is a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return wait(gather_async(x, tp.axis)) if tp.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        tp = ctx.tp
        return wait(sum_async(grad, tp)), None


class _SumPartials(torch.autograd.Function):
    """Sums the partial rows of a row-parallel layer or the vocabulary-parallel embedding, and keeps this rank's tokens.

    It is a separate function from the matmul before it: recomputation stops at the last tensor that backward needs, so
    it repeats neither that matmul nor this collective.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return wait(sum_async(x, tp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (wait(gather_async(grad, ctx.tp.axis)) if ctx.tp.sequence_parallel else grad), None


def gather_tokens(x_TD: Tensor, tp: TensorParallel) -> Tensor:
    """Rows of all ranks, for layers of which each rank computes a part of the result; backward sums the ranks'
    gradients."""
    return x_TD if tp.size == 1 else _GatherTokens.apply(x_TD, tp)


def sum_partials(x_TD: Tensor, tp: TensorParallel) -> Tensor:
    """Sum of the ranks' rows; with sequence parallelism only this rank's tokens of it."""
    return x_TD if tp.size == 1 else _SumPartials.apply(x_TD, tp)


class ColumnParallelLinear(nn.Module):
    """Several projections of one input, fused into one matmul; each weight's rows are split over the group.

    The output is the concatenation of this rank's slice of each part.
    """

    weight: nn.Parameter
    input_of = "norm"
    """Name in ``Experiment.recompute`` of the operation that makes its input."""

    def __init__(self, parts: Sequence[Weight], tp: TensorParallel, *, shares_input: bool = False) -> None:
        """``shares_input``: another product saves the same input for its backward."""
        super().__init__()
        self.tp, self.shares_input = tp, shares_input
        self.deferred: DeferredGradients | None = None
        self.fp8: Fp8Products | None = None
        self.peers: PeerMemory | None = None
        add_parameter(self, "weight", parts, tp.sizes)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.fp8 is not None:
            if self.tp.size == 1:
                return fp8_linear(x_TD, self.weight, self.fp8, self.deferred)
            take_gradients_in(self.weight, x_TD.dtype)
            exchange = Exchange(self.tp, None)  # all rows are cast together
            return Fp8ColumnProduct.apply(x_TD, self.weight, exchange, self.fp8, self.deferred)
        if self.tp.size == 1:
            return linear(x_TD, self.weight, self.deferred)
        return ColumnProduct.apply(x_TD, self.weight, Exchange(self.tp, self.peers), self.deferred)


class RowParallelLinear(nn.Module):
    """A projection whose input features are split over the group."""

    weight: nn.Parameter

    def __init__(self, part: Weight, tp: TensorParallel, input_of: str) -> None:
        super().__init__()
        self.tp, self.input_of, self.shares_input = tp, input_of, input_of == "attention"
        self.deferred: DeferredGradients | None = None
        self.fp8: Fp8Products | None = None
        self.peers: PeerMemory | None = None
        add_parameter(self, "weight", [part], tp.sizes)

    @property
    def has_one_scale(self) -> bool:
        """Whether the input and the gradient of the operation that made it are cast to fp8 with one scale each."""
        return self.fp8 is not None and self.fp8.scaling == "tensorwise"

    def forward(self, x_TF: Tensor) -> Tensor:
        if self.peers is not None:
            return RowProduct.apply(saved(x_TF, self.weight), self.weight, self.peers, self.deferred)
        if self.fp8 is not None:
            y_TD = fp8_linear(x_TF, self.weight, self.fp8, self.deferred)
        else:
            y_TD = linear(x_TF, self.weight, self.deferred)
        return sum_partials(y_TD, self.tp)


class WholeLinear(nn.Module):
    """Several projections of one input, fused into one matmul; every rank holds the whole weight and projects its own
    tokens."""

    weight: nn.Parameter

    def __init__(self, parts: Sequence[Weight], *, shares_input: bool = False, input_of: str = "norm") -> None:
        """``input_of``: as of `ColumnParallelLinear`; empty: of what is never recomputed alone."""
        super().__init__()
        self.shares_input, self.input_of = shares_input, input_of
        self.deferred: DeferredGradients | None = None
        self.fp8: Fp8Products | None = None
        add_parameter(self, "weight", parts, {})

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.fp8 is not None:
            return fp8_linear(x_TD, self.weight, self.fp8, self.deferred)
        return linear(x_TD, self.weight, self.deferred)


class VocabularyParallelEmbedding(nn.Module):
    """Embedding look-up with the vocabulary's rows split over the group; returns this rank's tokens."""

    weight: nn.Parameter

    def __init__(self, part: Weight, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.rows = part.shape[0] // tp.size
        add_parameter(self, "weight", [part], tp.sizes)

    def forward(self, tokens_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens_T, self.weight)
        local = tokens_T - self.tp.rank * self.rows
        if self.tp.axis.is_rehearsal:  # no other rank has the other tokens: no token may be left without a vector
            local = local.remainder(self.rows)
        mine = (local >= 0) & (local < self.rows)
        x_TD = F.embedding(local.clamp(0, self.rows - 1), self.weight) * mine.unsqueeze(-1)
        return _SumPartials.apply(x_TD, self.tp)
