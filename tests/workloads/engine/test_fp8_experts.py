"""fp8 products of routed experts: each group's are those of a dense layer with scales by rows, whatever its size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.workloads.engine.op_checks import check_casts_of_groups, randn, relative_error
from tests.workloads.engine.test_expert_ops import groups
from tests.workloads.engine.test_fp8 import matrix
from workloads.engine.ops import fp8, fp8_grouped
from workloads.engine.ops.fp8_linear import Fp8Products, fp8_linear
from workloads.engine.ops.grouped_linear import grouped_linear, grouped_product
from workloads.engine.ops.linear import DeferredGradients

SIZES = [[48, 0, 17, 63], [0, 0, 128], [128]]


def with_gradients(product: Callable[[Tensor, Tensor], Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """(output, gradients of rows and weight) of ``product``; the last of ``inputs`` is the output's gradient."""
    x, weight = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    y = product(x, weight)
    y.backward(inputs[2])
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_group_is_a_dense_layer_with_scales_by_rows(sizes: list[int]) -> None:
    """The recipe that torchao's rowwise one is an oracle of (`test_fp8`); here on rows of very different sizes."""
    rows, count, into, out = sum(sizes), len(sizes), 96, 64
    x, weight, grad = matrix(rows, into), matrix(count * out, into, seed=3) / 64, matrix(rows, out, seed=4)
    found = with_gradients(lambda x, w: grouped_linear(x, w, groups(sizes), in_fp8=True), x, weight, grad)
    parts = zip(x.split(sizes), weight.split(out), grad.split(sizes), strict=True)
    alone = [
        with_gradients(lambda x, w: fp8_linear(x, w, Fp8Products("rowwise")), *part) for part in parts if len(part[0])
    ]
    held = [number for number, size in enumerate(sizes) if size]
    assert torch.equal(found[0], torch.cat([y for y, _, _ in alone]))
    assert torch.equal(found[1], torch.cat([dx for _, dx, _ in alone]))
    own = found[2].view(count, out, into)
    assert torch.equal(own[held], torch.stack([dw for _, _, dw in alone]))
    assert all(not own[number].any() for number in range(count) if number not in held)


def test_rows_and_weights_have_scales_of_their_own() -> None:
    """A huge value takes the precision of its row, or of its weight's row in its group, and of no other."""
    x, weight = randn(32, 64).bfloat16(), randn(2 * 48, 64, seed=1).bfloat16()
    exact = grouped_product(x, weight, groups([16, 16]), in_fp8=True)
    for changed, outside in ((x, (slice(0, 5), slice(None))), (weight, (slice(16, 32), slice(None)))):
        kept = changed[5, 7].clone()
        changed[5, 7] = 1e6
        assert torch.equal(grouped_product(x, weight, groups([16, 16]), in_fp8=True)[outside], exact[outside])
        changed[5, 7] = kept


def test_a_deferred_gradient_is_the_same() -> None:
    sizes = [48, 0, 80]
    inputs = matrix(128, 96), matrix(3 * 64, 96, seed=3) / 64, matrix(128, 64, seed=4)
    _, dx, dweight = with_gradients(lambda x, w: grouped_linear(x, w, groups(sizes), in_fp8=True), *inputs)
    x, weight, deferred = inputs[0].clone().requires_grad_(), inputs[1].clone().requires_grad_(), DeferredGradients()
    y = grouped_linear(x, weight, groups(sizes), deferred, in_fp8=True)
    deferred.collect(0)
    y.backward(inputs[2])
    deferred.stop()
    assert weight.grad is None and x.grad is not None and torch.equal(x.grad, dx)
    deferred.compute(0)
    assert torch.equal(weight.grad, dweight)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x, weight = matrix(32, 64), matrix(2 * 48, 64, seed=5)
    x[3, 5] = bad
    y = grouped_product(x, weight, groups([16, 16]), in_fp8=True)
    assert y[3].isnan().all() and y[4:].isfinite().all()


def test_no_rows() -> None:
    x, weight = matrix(0, 64), matrix(2 * 48, 64)
    y, dx, dweight = with_gradients(
        lambda x, w: grouped_linear(x, w, groups([0, 0]), in_fp8=True), x, weight, matrix(0, 48)
    )
    assert y.shape == (0, 48) and dx.shape == (0, 64) and not dweight.any()


def test_weights_of_groups_are_cast_apart() -> None:
    check_casts_of_groups("cpu", 3, (48, 96))


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "shape"), [(16, (1536, 2048)), (3, (2048, 768)), (2, (100, 4112))])
def test_weights_of_groups_are_cast_apart_on_a_gpu(count: int, shape: tuple[int, int]) -> None:
    check_casts_of_groups("cuda", count, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[512] * 16, [0, 1000, 3, 0, 77], [0, 0, 8192]], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_products_on_a_gpu(sizes: list[int], turned: bool) -> None:
    """Products of what was cast, against the same in float64: they are rounded to bf16 once."""
    count, into, out = len(sizes), 2048, 1536
    weight = randn(count * out, into, dtype=torch.bfloat16, device="cuda", seed=1)
    x = randn(sum(sizes), out if turned else into, dtype=torch.bfloat16, device="cuda")
    which = groups(sizes, "cuda")
    found = fp8_grouped.rows_by_weights(x, weight, which.ends_G, which.sizes, turned=turned)
    rows, _ = fp8.cast(x, "rowwise", "activation", columns=False)
    weights = fp8_grouped.cast_weights(weight, count, turned=turned)
    assert rows is not None
    wide, first, expected = rows.wide().double(), 0, []
    for group, size in enumerate(sizes):
        expected.append(wide[first : first + size] @ weights.of_group(group).wide().double().t())
        first += size
    assert relative_error(found, torch.cat(expected)) < 2**-8
