"""Layers for tensor parallelism, with local weight shards and explicit collectives.

Activations between tensor-parallel regions are flattened to tokens, ``x_TD``. With sequence parallelism each rank holds
``T / tp`` consecutive rows of the flattened batch, so gathering along dim 0 needs no transpose whatever the batch.

    column-parallel  Y = X W^T, W = [W_1; ...; W_tp] by rows:    X gathered over tokens, Y split over features
    row-parallel     Y = X W^T, W = [W_1, ..., W_tp] by columns: X split over features, Y reduce-scattered over tokens

(Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198.) Without sequence parallelism the pair is
identity forward / all-reduce backward, and all-reduce forward / identity backward. A column-parallel layer saves the
*local* rows of X and gathers them again in its backward, beside the input-gradient matmul.

DTensor could express the same, but its dispatch costs the host more time than a GPU needs for a layer in eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.engine.groups import TensorParallel
from workloads.engine.parameters import ParameterSpec, Part

_ops = torch.ops._c10d_functional


def gather_async(x: Tensor, tp: TensorParallel) -> Tensor:
    """Start gathering ``x`` along dim 0; call `wait` before using the result."""
    return _ops.all_gather_into_tensor(x.contiguous(), tp.size, tp.name)


def reduce_scatter_async(x: Tensor, tp: TensorParallel) -> Tensor:
    """Start summing ``x`` over the group and keeping this rank's part of dim 0; call `wait` before using the result."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", tp.size, tp.name)


def all_reduce_async(x: Tensor, tp: TensorParallel) -> Tensor:
    """Start summing ``x`` over the group; call `wait` before using the result."""
    return _ops.all_reduce(x.contiguous(), "sum", tp.name)


def wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        full = wait(gather_async(x, tp)) if tp.sequence_parallel else x
        return full @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        if tp.sequence_parallel:
            gathered = gather_async(x, tp)
            partial = reduce_scatter_async(grad @ weight, tp)
            grad_weight = grad.t() @ wait(gathered)
        else:
            partial = all_reduce_async(grad @ weight, tp)
            grad_weight = grad.t() @ x
        return wait(partial), grad_weight, None


class _EnterVocabulary(torch.autograd.Function):
    """Before the vocabulary-parallel head: every rank needs every token; the input's gradient is a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return wait(gather_async(x, tp)) if tp.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        tp = ctx.tp
        return wait(reduce_scatter_async(grad, tp) if tp.sequence_parallel else all_reduce_async(grad, tp)), None


class _SumPartials(torch.autograd.Function):
    """After a row-parallel layer or the vocabulary-parallel embedding: sum the partial rows, keep this rank's tokens.

    It is a function of its own, apart from the matmul before it: recomputation stops at the last tensor that backward
    needs, and so repeats neither that matmul nor this collective.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return wait(reduce_scatter_async(x, tp) if tp.sequence_parallel else all_reduce_async(x, tp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (wait(gather_async(grad, ctx.tp)) if ctx.tp.sequence_parallel else grad), None


def enter_vocabulary(x_TD: Tensor, tp: TensorParallel) -> Tensor:
    return x_TD if tp.size == 1 else _EnterVocabulary.apply(x_TD, tp)


class ColumnParallelLinear(nn.Module):
    """Several projections of one input, fused into one matmul; each part's rows are split over the group.

    ``parts`` are (canonical name, full output size). The output is the concatenation of this rank's slice of each part.
    """

    def __init__(self, in_features: int, parts: list[tuple[str, int]], std: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(sum(rows for _, rows in parts) // tp.size, in_features))
        self.specs = {
            "weight": ParameterSpec(
                parts=tuple(Part(name, (rows, in_features), std=std) for name, rows in parts), tp_dim=0
            )
        }

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x_TD, self.weight)
        return _ColumnLinear.apply(x_TD, self.weight, self.tp)


class RowParallelLinear(nn.Module):
    """A projection whose input features are split over the group."""

    def __init__(self, name: str, in_features: int, out_features: int, std: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp.size))
        self.specs = {"weight": ParameterSpec(parts=(Part(name, (out_features, in_features), std=std),), tp_dim=1)}

    def forward(self, x_TF: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x_TF, self.weight)
        return _SumPartials.apply(F.linear(x_TF, self.weight), self.tp)


class VocabularyParallelEmbedding(nn.Module):
    """Embedding look-up with the vocabulary's rows split over the group; returns this rank's tokens."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.rows = vocab_size // tp.size
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))
        self.specs = {"weight": vocabulary_spec(vocab_size, hidden_size, std)}

    def forward(self, tokens_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens_T, self.weight)
        local = tokens_T - self.tp.rank * self.rows
        mine = (local >= 0) & (local < self.rows)
        x_TD = F.embedding(local.clamp(0, self.rows - 1), self.weight) * mine.unsqueeze(-1)
        return _SumPartials.apply(x_TD, self.tp)


def vocabulary_spec(vocab_size: int, hidden_size: int, std: float, name: str = "embedding") -> ParameterSpec:
    return ParameterSpec(parts=(Part(name, (vocab_size, hidden_size), std=std),), tp_dim=0)
