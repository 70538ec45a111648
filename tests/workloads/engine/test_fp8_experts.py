"""fp8 products of routed experts: each group's are those of its rows and weights as they were cast, of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.workloads.engine.kind_op_checks import row_groups
from tests.workloads.engine.op_checks import check_casts_of_groups, randn, relative_error
from tests.workloads.engine.test_fp8 import TINY, UNIT, matrix, small
from tests.workloads.engine.traffic_checks import built
from workloads.engine.ops import fp8, fp8_grouped
from workloads.engine.ops.backend import Backend
from workloads.engine.ops.fp8_grouped import rows_by_weights
from workloads.engine.ops.grouped_linear import grouped_linear, grouped_product
from workloads.engine.ops.linear import DeferredGradients
from workloads.engine.training.fp8_gather import _expert_parameters, _shard
from workloads.spec.experiment import Experiment

SIZES = [[48, 0, 17, 63], [0, 0, 128], [128]]
OUT, INTO = 64, 96


def cast_weights(weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values [G*O, I], factors [G], what they stand for in fp32 [G, O, I]) with one scale for each group."""
    casts = [fp8.cast(own, "tensorwise", "weight", columns=False)[0] for own in weight.chunk(count)]
    held = [cast for cast in casts if cast is not None]
    values, factors = torch.cat([cast.values for cast in held]), torch.cat([cast.factors for cast in held])
    return values, factors, torch.stack([cast.wide() for cast in held])


def cast_rows(x: Tensor) -> Tensor:
    """What rows stand for when they have been cast, in fp32."""
    rows, _ = fp8.cast(x, "rowwise", "activation", columns=False)
    assert rows is not None
    return rows.wide()


def inputs(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, weights of all groups, outputs' gradients) of very different sizes."""
    rows, count = sum(sizes), len(sizes)
    sizes_of_groups = torch.logspace(-6, 6, count, base=2.0).repeat_interleave(OUT)[:, None].bfloat16()
    return matrix(rows, INTO), matrix(count * OUT, INTO, seed=3) * sizes_of_groups, matrix(rows, OUT, seed=4)


def products(sizes: list[int], deferred: DeferredGradients | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, gradients of rows and of the weights) of a layer whose weights come in fp8."""
    x, weight, grad = inputs(sizes)
    values, factors, _ = cast_weights(weight, len(sizes))
    x, parameter = x.requires_grad_(), torch.nn.Parameter(values, requires_grad=False)
    parameter.requires_grad_()
    y = grouped_linear(x, parameter, row_groups(sizes), deferred, factors_G=factors)
    if deferred is not None:
        deferred.collect(0)
    y.backward(grad)
    if deferred is not None:
        deferred.stop()
        assert parameter.grad is None
        deferred.compute(0)
    assert x.grad is not None and parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
    return y.detach(), x.grad, parameter.grad


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_those_of_what_was_cast(sizes: list[int]) -> None:
    """Outputs and the rows' gradients; the weights' gradients are of rows and gradients as they are, in bf16."""
    y, dx, dweight = products(sizes)
    x, weight, grad = inputs(sizes)
    wide = cast_weights(weight, len(sizes))[2]
    for found, left, of_weight in ((y, x, wide.transpose(1, 2)), (dx, grad, wide)):
        expected = torch.cat([own @ of for own, of in zip(cast_rows(left).split(sizes), of_weight, strict=True)])
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-5)
    parts = zip(grad.split(sizes), x.split(sizes), dweight.view(len(sizes), OUT, INTO), strict=True)
    for own_grad, own, found in parts:
        torch.testing.assert_close(found, own_grad.t() @ own)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_within_the_bounds_of_the_format(sizes: list[int]) -> None:
    """As of dense layers (`test_fp8`): two operands off by u give a product off by 2 u + u^2 of absolute values."""
    y, dx, _ = products(sizes)
    x, weight, grad = (tensor.double() for tensor in inputs(sizes))
    u, weights = UNIT[fp8.E4M3], weight.view(len(sizes), OUT, INTO)
    for found, left, of_weight in ((y, x, weights.transpose(1, 2)), (dx, grad, weights)):
        parts = zip(found.double().split(sizes), left.split(sizes), of_weight, strict=True)
        for got, a, b in parts:
            bound = (2 * u + u * u) * (a.abs() @ b.abs()) + 2.0**-8 * (a @ b).abs()
            tiny = b.abs().amax() * TINY[fp8.E4M3] / 0.5  # what subnormals of a weight are off by, of a row far less
            bound += tiny * a.abs().sum(1, keepdim=True) + 2.0**-15 * a.abs().amax(1, keepdim=True) * b.abs().sum(0)
            assert ((got - a @ b).abs() <= bound).all()


def test_a_row_has_a_scale_of_its_own() -> None:
    x, weight = randn(32, INTO).bfloat16(), randn(2 * OUT, INTO, seed=1).bfloat16()
    values, factors, _ = cast_weights(weight, 2)
    exact = grouped_product(x, values, row_groups([16, 16]), factors)
    x[5, 7] = 1e6
    y = grouped_product(x, values, row_groups([16, 16]), factors)
    assert torch.equal(y[:5], exact[:5]) and torch.equal(y[6:], exact[6:])


def test_a_deferred_gradient_is_the_same() -> None:
    for one, other in zip(products([48, 0, 80]), products([48, 0, 80], DeferredGradients()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x, weight = matrix(32, INTO), matrix(2 * OUT, INTO, seed=5)
    values, factors, _ = cast_weights(weight, 2)
    x[3, 5] = bad
    y = grouped_product(x, values, row_groups([16, 16]), factors)
    assert y[3].isnan().all() and y[4:].isfinite().all()


def test_no_rows() -> None:
    y, dx, dweight = products([0, 0])
    assert y.shape == (0, OUT) and dx.shape == (0, INTO) and not dweight.any()


def test_rows_are_cast_and_groups_turned() -> None:
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
    for factor in (64.0, 1 / 64):  # scales follow weights that become smaller, too
        for master in masters:
            master.mul_(factor)
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
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gathered_experts_are_one_cast_of_each_expert(gloo_pool: Pool, recipe: str, layout: dict[str, Any]) -> None:
    case = small(f"fp8_{recipe}", "experts", micro_batch_size=1, **layout)
    for found in gloo_pool.run(gathered, case.world_size, case):
        assert len(found) == 2 * 2 and set(found) == {(True, True)}


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "shape"), [(16, (1536, 2048)), (3, (2048, 768)), (2, (100, 4112)), (1, (5, 14336))])
def test_rows_are_cast_and_groups_turned_on_a_gpu(count: int, shape: tuple[int, int]) -> None:
    check_casts_of_groups("cuda", count, shape)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_groups_one_by_one_where_the_device_has_no_kernel_for_all(
    sizes: list[int], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, grad = inputs(sizes)
    values, factors, _ = cast_weights(weight, len(sizes))
    which = row_groups(sizes)

    def found() -> Tensor:
        return rows_by_weights(grad if turned else x, values, factors, which.ends_G, which.sizes, turned=turned)

    expected = found()
    monkeypatch.setattr(fp8_grouped, "backend_of", lambda *tensors: Backend.TRITON)
    monkeypatch.setattr(fp8_grouped, "_has_kernel", lambda device: False)
    assert relative_error(found(), expected.double()) < 2**-8


def test_no_rows_need_no_weights() -> None:
    values, factors, _ = cast_weights(inputs([128])[1], 1)
    which = row_groups([0])
    assert rows_by_weights(matrix(0, INTO), values, factors, which.ends_G, which.sizes).shape == (0, OUT)
    turned = rows_by_weights(matrix(0, OUT), values, factors, which.ends_G, which.sizes, turned=True)
    assert turned.shape == (0, INTO)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[512] * 16, [0, 1000, 3, 0, 77], [0, 0, 8192]], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_products_on_a_gpu(sizes: list[int], turned: bool, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of what was cast, against the same in float64: they are rounded to bf16 once."""
    if not has_kernel:
        monkeypatch.setattr(fp8_grouped, "_has_kernel", lambda device: False)
    count, into, out = len(sizes), 2048, 1536
    weight = randn(count * out, into, dtype=torch.bfloat16, device="cuda", seed=1)
    x = randn(sum(sizes), out if turned else into, dtype=torch.bfloat16, device="cuda")
    which, (values, factors, wide) = row_groups(sizes, "cuda"), cast_weights(weight, count)
    found = rows_by_weights(x, values, factors, which.ends_G, which.sizes, turned=turned)
    of_weight = wide.double() if turned else wide.double().transpose(1, 2)
    parts = zip(cast_rows(x).double().split(sizes), of_weight, strict=True)
    assert relative_error(found, torch.cat([own @ of for own, of in parts])) < 2**-8
