"""fp8 products of routed experts: each group's are those of a dense layer with scales by rows, whatever its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.workloads.engine.op_checks import check_casts_of_groups, randn, relative_error
from tests.workloads.engine.test_expert_ops import groups
from tests.workloads.engine.test_fp8 import matrix, small
from tests.workloads.engine.test_traffic import built
from workloads.engine.fp8_gather import _expert_parameters, _shard
from workloads.engine.ops import fp8, fp8_grouped
from workloads.engine.ops.fp8_linear import Fp8Products, fp8_linear
from workloads.engine.ops.grouped_linear import grouped_linear, grouped_product
from workloads.engine.ops.linear import DeferredGradients
from workloads.experiment import Experiment

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


def gathered(rank: int, case: Experiment) -> list[tuple[bool, bool]]:
    """Of each parameter of experts: whether the gathered values, and the factors, are those of one cast of each expert
    as a whole."""
    engine = built(rank, case)
    chunk = engine.chunks[0]
    found = list(_expert_parameters(chunk))
    masters = [_shard(parameter) for parameter in found]
    for master in masters if rank else []:
        master.mul_(8.0)  # of an expert that two ranks share, the largest value is the second one's
    for weights in engine.pipeline.fp8_weights:
        weights.find_scales()
    assert engine.groups.expert_mesh is not None
    shards = engine.groups.expert_mesh["shard"]
    results = []
    for parameter, master in zip(found, masters, strict=True):
        parts = [torch.empty_like(master) for _ in range(shards.size())]
        torch.distributed.all_gather(parts, master, group=shards.get_group())
        module = parameter._module_info.module
        module.unshard()
        weight = parameter.unsharded_param
        assert weight.dtype == fp8.E4M3 and case.model.moe is not None
        each = weight.shape[0] // (case.model.moe.num_experts // case.ep)
        rows = torch.cat(parts)[: weight.shape[0]]
        casts = [fp8.cast(own, "tensorwise", "weight", columns=False)[0] for own in rows.split(each)]
        values = torch.cat([cast.values for cast in casts if cast is not None])
        factors = torch.cat([cast.factors for cast in casts if cast is not None])
        same = torch.equal(values.view(torch.uint8), weight.detach().view(torch.uint8))
        results.append((same, torch.equal(module.factors[parameter._module_info.param_name], factors)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"dp": 3, "zero_stage": 3, "global_batch_size": 3}, {"dp": 4, "zero_stage": 1, "ep": 2}],
    ids=["shards begin inside experts", "ep 2"],
)
def test_gathered_experts_are_one_cast_of_each_expert(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    case = small("fp8_tensorwise", "experts", micro_batch_size=1, **layout)
    for found in gloo_pool.run(gathered, case.world_size, case):
        assert len(found) == 2 * 2 and set(found) == {(True, True)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weights_that_come_in_fp8_have_one_scale_for_each_group(sizes: list[int]) -> None:
    """The products are those of the weights as they were cast, both ways round."""
    rows, count, into, out = sum(sizes), len(sizes), 96, 64
    x, weight, grad = matrix(rows, into), matrix(count * out, into, seed=3) / 64, matrix(rows, out, seed=4)
    casts = [fp8.cast(own, "tensorwise", "weight", columns=False)[0] for own in weight.split(out)]
    values = torch.cat([cast.values for cast in casts if cast is not None])
    factors = torch.cat([cast.factors for cast in casts if cast is not None])
    wide = torch.cat([cast.wide() for cast in casts if cast is not None])
    which = groups(sizes)
    y = grouped_product(x, values, which, in_fp8=True, factors_G=factors)
    how = which.ends_G, which.sizes
    dx = fp8_grouped.rows_by_weights(grad, values, *how, turned=True, factors_G=factors)
    for found, left, turned in ((y, x, False), (dx, grad, True)):
        cast, _ = fp8.cast(left, "rowwise", "activation", columns=False)
        assert cast is not None
        parts = zip(cast.wide().split(sizes), wide.split(out), strict=True)
        expected = torch.cat([own @ (of if turned else of.t()) for own, of in parts])
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-6)


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
