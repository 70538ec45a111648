"""Bytes that unfused operations of experts move, counted on the engine's own operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workloads.costs.time.unfused import (
    ACTIVATION_BYTES,
    BIAS_BYTES,
    WEIGHTED_BIAS_BYTES,
    moved_bytes,
)
from workloads.engine.kind_ops import group_bias, weighted_activations
from workloads.engine.ops.grouped_linear import RowGroups
from workloads.spec.layer_kinds.mlp import DenseMLP

ROWS, COLUMNS, GROUPS = 64, 4096, 4
ONLY_ALLOCATE = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::new_ones", "aten::_unsafe_view"}


class Bytes(TorchDispatchMode):
    """Bytes that operations read and write; an input that is overwritten is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name in ONLY_ALLOCATE:
            return out
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name == "aten::copy_":
            read = read[1:]
        # Products read a matrix once for all groups, and their results are small.
        read = read if name != "aten::mm" else []
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)] if name != "aten::mm" else []
        self.count += sum(x.numel() * x.element_size() for x in (*read, *written))
        return out

    @property
    def of_an_element(self) -> float:
        return self.count / ROWS / COLUMNS


@pytest.fixture(autouse=True)
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weighted_activations, group_bias):
        monkeypatch.setattr(module, "device_row_blocks", lambda x: [slice(0, len(x))])


@pytest.mark.parametrize("activation", ACTIVATION_BYTES)
def test_activations(activation: str) -> None:
    gated = activation != "relu2"
    mlp = DenseMLP(width=COLUMNS, activation=activation, gated=gated, limit=7.0, slope=1.702, offset=1.0)
    x = torch.randn(ROWS, COLUMNS * (1 + gated), dtype=torch.bfloat16, requires_grad=True)
    weights, grad = torch.rand(ROWS, requires_grad=True), torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    with Bytes() as forward:
        y = weighted_activations.weighted_activation(x, weights, mlp)
    with Bytes() as backward:
        torch.autograd.grad(y, (x, weights), grad)
    found = forward.of_an_element, backward.of_an_element
    assert found == pytest.approx(ACTIVATION_BYTES[activation], rel=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_biases(weighted: bool) -> None:
    ends = torch.arange(1, GROUPS + 1, dtype=torch.int32) * (ROWS // GROUPS)
    groups = RowGroups(ends, lambda: [ROWS // GROUPS] * GROUPS)
    bias = torch.randn(GROUPS * COLUMNS, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(ROWS, requires_grad=True) if weighted else None
    y = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16, requires_grad=True).clone()
    grad = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    with Bytes() as forward:
        out = group_bias.add_group_bias(y, bias, groups, weights)
    with Bytes() as backward:
        torch.autograd.grad(out, [one for one in (bias, weights) if one is not None], grad)
    sums = 2  # of the product that sums gradients: it reads each once
    found = forward.of_an_element, backward.of_an_element + sums
    # The rows of biases are few here, but for every row of the input one is read.
    assert found == pytest.approx(WEIGHTED_BIAS_BYTES if weighted else BIAS_BYTES, abs=0.6)


def test_experts() -> None:
    """gpt-oss: its activation and biases; SwiGLU: three passes forward, six backward."""
    gpt_oss = DenseMLP(width=2880, activation="clamped_silu", bias=True)
    forward, backward = ACTIVATION_BYTES["clamped_silu"]
    moved = moved_bytes(gpt_oss, 1440, 2880)
    assert moved.activation == (1440 * forward, 1440 * backward)
    assert moved.biases == (2880 * (8 + 16), 2880 * (2 + 12))
    assert moved_bytes(DenseMLP(width=768, activation="silu"), 768, 2048) == ((768 * 6, 768 * 12), (0, 0))
