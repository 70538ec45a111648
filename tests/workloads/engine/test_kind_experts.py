"""Routed experts with biases and other activations, against plain torch in fp64 and the published module of gpt-oss."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from tests.workloads.engine.kind_models import CLAMPED, kind_model
from tests.workloads.engine.kind_op_checks import (
    DEEPSEEK_V4,
    GELU,
    GPT_OSS,
    RELU2,
    SILU,
    check_activation,
    check_bias,
    check_dense,
    row_groups,
)
from tests.workloads.engine.op_checks import randn
from workloads.engine.collectives.parameters import initialise
from workloads.engine.kind_ops.group_bias import add_group_bias
from workloads.engine.kind_ops.weighted_activations import weighted_activation
from workloads.engine.layers.experts import Experts
from workloads.engine.ops import backend
from workloads.spec import kind_weights
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP


@pytest.mark.parametrize(
    "mlp", [SILU, GPT_OSS, DEEPSEEK_V4, GELU, RELU2], ids=lambda mlp: f"{mlp.activation}-{mlp.slope:g}"
)
@pytest.mark.parametrize("block", [7, backend.BLOCK_ELEMENTS])
def test_weighted_activations(mlp: DenseMLP, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "BLOCK_ELEMENTS", block)
    check_activation(mlp, 40, 24, torch.float64, "cpu", 1e-13)
    check_activation(mlp, 40, 24, torch.bfloat16, "cpu", 2**-8)
    x, weights = randn(3, 8 if mlp.gated else 4), randn(3)
    assert gradcheck(lambda x, w: weighted_activation(x, w, mlp), (x.requires_grad_(), weights.requires_grad_()))


@pytest.mark.parametrize("sizes", [[5, 0, 11, 3], [0, 0, 7], [9]], ids=str)
@pytest.mark.parametrize("block", [7, backend.BLOCK_ELEMENTS])
def test_biases_of_groups(sizes: list[int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "BLOCK_ELEMENTS", block)
    check_bias(sizes, 12, torch.float64, "cpu", 1e-13)


def test_a_group_without_rows_has_no_gradient() -> None:
    bias = torch.ones(3 * 4, 1, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    add_group_bias(y.clone(), bias, row_groups([0, 0, 0])).sum().backward()
    assert bias.grad is not None and bias.grad.count_nonzero() == 0


def test_experts_are_the_published_ones_of_gpt_oss() -> None:
    """`GptOssExperts` of transformers on the same weights: its gate and up projections take turns by column."""
    published = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    model = kind_model("clamped_experts")
    assert model.layers is not None
    mlp = model.layers.kinds[0].mlp
    assert isinstance(mlp, RoutedMLP) and mlp.expert.limit == CLAMPED["expert"]["limit"]
    mlp = dataclasses.replace(mlp, expert=dataclasses.replace(mlp.expert, limit=0.1))
    own = Experts(kind_weights.experts(model, mlp, "layers.0.experts"), {"ep": 1, "etp": 1}, mlp.expert).double()
    initialise(own, 0, {}, lambda spec: (1, 0))
    count, width, hidden = mlp.experts, mlp.expert.width, model.hidden_size
    config: Any = types.SimpleNamespace(
        intermediate_size=width,
        num_local_experts=count,
        hidden_size=hidden,
        swiglu_alpha=1.702,
        swiglu_limit=0.1,
    )
    theirs = published.GptOssExperts(config).double()
    assert own.first_bias is not None and own.second_bias is not None
    with torch.no_grad():
        first = own.gate_up.view(count, 2, width, hidden).permute(0, 3, 2, 1)
        theirs.gate_up_proj.copy_(first.reshape(count, hidden, 2 * width))
        of_first = own.first_bias.weight.view(count, 2, width).transpose(1, 2)
        theirs.gate_up_proj_bias.copy_(of_first.reshape(count, 2 * width))
        theirs.down_proj.copy_(own.down.view(count, hidden, width).transpose(1, 2))
        theirs.down_proj_bias.copy_(own.second_bias.weight.view(count, hidden))
    tokens = randn(20, hidden)
    choice = torch.stack([torch.randperm(count)[: mlp.chosen] for _ in range(20)])
    shares = randn(20, mlp.chosen).softmax(-1)
    order = choice.flatten().argsort(stable=True)
    sizes = torch.bincount(choice.flatten(), minlength=count).tolist()
    rows = own(tokens[order // mlp.chosen], shares.flatten()[order], row_groups(sizes))
    found = torch.zeros_like(tokens).index_add(0, order // mlp.chosen, rows)
    # The published class may be wrapped to take other kernels; the plain one is asked here.
    forward = getattr(published.GptOssExperts.forward, "__wrapped__", published.GptOssExperts.forward)
    expected = forward(theirs, tokens, choice, shares)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert (own.gate_up.view(count, 2, width, hidden)[:, 0] @ tokens.t()).max() > 0.1, "nothing is clamped"


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize(("rows", "columns"), [(32768, 768), (8192, 2880), (1000, 14336), (77, 2731)])
    @pytest.mark.parametrize("mlp", [SILU, GPT_OSS, GELU, RELU2], ids=lambda mlp: mlp.activation)
    def test_weighted_activations(self, mlp: DenseMLP, rows: int, columns: int) -> None:
        check_activation(mlp, rows, columns, torch.bfloat16, "cuda", 2**-8)
        check_activation(mlp, rows, columns, torch.float32, "cuda", 2e-6)

    @pytest.mark.parametrize("mlp", [GELU, RELU2], ids=lambda mlp: mlp.activation)
    def test_activations_of_dense_layers(self, mlp: DenseMLP) -> None:
        check_dense(mlp, 4096, 14336, torch.bfloat16, "cuda", 2**-8)
        check_dense(mlp, 77, 2731, torch.float32, "cuda", 2e-6)

    @pytest.mark.parametrize("sizes", [[512] * 16, [0, 1000, 3, 0, 77], [4096]], ids=str)
    def test_biases_of_groups(self, sizes: list[int]) -> None:
        check_bias(sizes, 2880, torch.bfloat16, "cuda", 2**-7)

    def test_gradients_of_biases_are_the_same_again(self) -> None:
        y, bias = (randn(n, c, dtype=torch.bfloat16, device="cuda") for n, c in ((4096, 2880), (8 * 2880, 1)))
        found = []
        for _ in range(2):
            own = bias.clone().requires_grad_()
            add_group_bias(y.clone(), own, row_groups([512] * 8, "cuda")).float().square().sum().backward()
            found.append(own.grad)
        assert found[0] is not None and torch.equal(found[0], found[1])
