"""fp8 products against float64 within bounds of the formats, against torchao, and in every kind of layout."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.op_checks import check_fp8_casts, check_largest_values, randn, relative_error
from tests.workloads.engine.parity import experts, model, train_and_count, train_rank
from tests.workloads.engine.traffic_checks import built, check_counts
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.ops import fp8
from workloads.engine.ops.fp8 import E4M3, E5M2, Fp8Scaling, Operand, Role
from workloads.engine.ops.fp8_linear import Fp8Products, fp8_linear
from workloads.engine.ops.linear import DeferredGradients
from workloads.engine.training.fp8_gather import _fp8_parameters
from workloads.parity.shards import put_together
from workloads.parity.training import RankTrace
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MLASpec, ModelSpec

RECIPES: tuple[Fp8Scaling, ...] = ("tensorwise", "rowwise", "blockwise")
ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")
UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half a unit in the last place of a number of 1: rounding to nearest is off by this share at most ..."""
TINY = {E4M3: 2.0**-10, E5M2: 2.0**-17}
"""... but for numbers so small that they are subnormal: those by half of the smallest one."""
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different sizes, in bf16."""
    sizes = randn(rows, 1, seed=seed + 1).exp() * randn(1, columns, seed=seed + 2).exp()
    return (randn(rows, columns, seed=seed) * sizes).bfloat16()


def exact(operand: Operand) -> Tensor:
    return operand.wide().double()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "role"), list(itertools.product(RECIPES, ROLES)))
def test_a_cast_is_as_near_as_the_format_is(recipe: Fp8Scaling, role: Role) -> None:
    x = matrix(256, 384)
    rows, columns = fp8.cast(x, recipe, role)
    assert rows is not None and columns is not None
    for operand, source in ((rows, x.double()), (columns, x.t().double())):
        kind = operand.values.dtype
        assert kind == (E5M2 if (recipe, role) == ("tensorwise", "gradient") else E4M3)
        assert operand.values.shape == source.shape and operand.values.is_contiguous()
        factors = exact(Operand(torch.ones_like(operand.values), operand.factors, operand.scaled))
        assert torch.equal(torch.exp2(factors.log2().round()), factors), "scales are powers of two"
        error = (exact(operand) - source).abs()
        assert (error <= torch.maximum(UNIT[kind] * source.abs(), TINY[kind] * factors)).all()
        assert operand.values.double().abs().max() > LARGEST[kind] / 2, "a scale uses the whole range"
    if recipe == "tensorwise" or (recipe, role) == ("blockwise", "weight"):
        assert torch.equal(exact(rows).t(), exact(columns)), "both directions are of one cast"


@pytest.mark.parametrize("recipe", RECIPES)
def test_as_many_scales_as_the_recipe_has(recipe: Fp8Scaling) -> None:
    """A value of 1e6 takes the precision of those with which it shares its scale, and of no others."""
    x = randn(256, 384)
    x[130, 140] = 1e6
    for role, shared in (
        ("activation", {"tensorwise": (256, 384), "rowwise": (1, 384), "blockwise": (1, 128)}),
        ("weight", {"tensorwise": (256, 384), "rowwise": (1, 384), "blockwise": (128, 128)}),
    ):
        rows, _ = fp8.cast(x.bfloat16(), recipe, role)  # type: ignore[arg-type]
        assert rows is not None
        lost = ((exact(rows) - x).abs() > 2 * UNIT[E4M3] * x.abs() + 1e-2).nonzero()
        high, wide = (int(lost[:, dim].max() - lost[:, dim].min()) + 1 for dim in (0, 1))
        limit = shared[recipe]
        assert high <= limit[0] and wide <= limit[1] and high > 0.9 * limit[0] and wide > 0.9 * limit[1]


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_so(recipe: Fp8Scaling, bad: float) -> None:
    x, weight = matrix(128, 128), matrix(128, 128, seed=5)
    x[3, 5] = bad
    y = fp8_linear(x, weight, Fp8Products(recipe))
    assert y[3].isnan().all(), "saturated, it would train on as if nothing had happened"


def test_zeros_are_cast() -> None:
    for recipe in RECIPES:
        rows, _ = fp8.cast(torch.zeros(128, 128, dtype=torch.bfloat16), recipe, "activation")
        assert rows is not None and (exact(rows) == 0).all()


def products(recipe: Fp8Scaling, x: Tensor, weight: Tensor, grad: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = fp8_linear(x, weight, Fp8Products(recipe, **how))
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_within_the_bounds_of_their_formats(recipe: Fp8Scaling) -> None:
    """Elementwise: two operands that are off by a share of u and v give a product off by u + v + u v of the products of
    absolute values, and by a rounding to bf16. Subnormals add up to T of the size of what is summed."""
    x, weight, grad = randn(256, 384).bfloat16(), randn(128, 384, seed=1).bfloat16(), randn(256, 128, seed=2).bfloat16()
    found = products(recipe, x, weight, grad / 2**20)
    x, weight, grad = x.double(), weight.double(), grad.double() / 2**20
    pairs = {"y": (x, weight.t(), E4M3, E4M3), "dx": (grad, weight, None, E4M3), "dW": (grad.t(), x, None, E4M3)}
    for (name, (a, b, left, right)), got in zip(pairs.items(), found, strict=True):
        in_bf16 = name == "dW" and recipe == "rowwise"
        kind = left or fp8.format_of(recipe, "gradient")
        u, v = (0.0, 0.0) if in_bf16 else (UNIT[kind], UNIT[right])
        bound = (u + v + u * v) * (a.abs() @ b.abs()) + 2.0**-8 * (a @ b).abs()
        bound += 2.0**-8 * (a.abs().amax() * b.abs().sum(0) + b.abs().amax() * a.abs().sum(1, keepdim=True)) * 2.0**-6
        assert ((got.double() - a @ b).abs() <= bound).all(), name
        relative = ((got.double() - a @ b).norm() / (a @ b).norm()).item()
        assert relative < (0.004 if in_bf16 else 0.045 if kind == E4M3 else 0.065), (name, relative)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_input_gives_the_same_bits(recipe: Fp8Scaling) -> None:
    inputs = matrix(256, 384), matrix(128, 384, seed=3) / 64, matrix(256, 128, seed=4)
    for one, other in zip(products(recipe, *inputs), products(recipe, *inputs, keeps_input=True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deferred_gradient_is_the_same(recipe: Fp8Scaling) -> None:
    x, weight, grad = matrix(256, 384), matrix(128, 384, seed=3) / 64, matrix(256, 128, seed=4)
    _, dx, dweight = products(recipe, x, weight, grad)
    x, weight, deferred = x.clone().requires_grad_(), weight.clone().requires_grad_(), DeferredGradients()
    y = fp8_linear(x, weight, Fp8Products(recipe), deferred)
    deferred.collect(0)
    y.backward(grad)
    deferred.stop()
    assert weight.grad is None and x.grad is not None and torch.equal(x.grad, dx)
    deferred.compute(0)
    assert torch.equal(weight.grad, dweight)


@pytest.mark.slow
def test_torchao_computes_the_same_bits() -> None:
    pytest.importorskip("torchao", reason="an oracle, not a dependency: pip install --no-deps torchao==0.17.0")
    Float8LinearConfig = importlib.import_module("torchao.float8").Float8LinearConfig
    Float8Linear = importlib.import_module("torchao.float8.float8_linear").Float8Linear

    configs: dict[Fp8Scaling, Any] = {
        "tensorwise": Float8LinearConfig(round_scales_to_power_of_2=True, emulate=True),
        "rowwise": dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True),
    }
    x, grad = matrix(64, 96), matrix(64, 48, seed=2) / 2**10
    for recipe, config in configs.items():
        plain = torch.nn.Linear(96, 48, bias=False).bfloat16()
        theirs, theirs_x = Float8Linear.from_float(plain, config), x.clone().requires_grad_()
        y = theirs(theirs_x)
        y.backward(grad)
        ours = products(recipe, x, plain.weight.detach(), grad)
        for own, other in zip(ours, (y, theirs_x.grad, theirs.weight.grad), strict=True):
            assert torch.equal(own, other), recipe


# Layouts

SMALL = {"hidden_size": 128, "head_dim": 64, "ffn_hidden_size": 256, "vocab_size": 128, "num_layers": 3}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
    {"dp": 2, "zero_stage": 3, "micro_batch_size": 1},
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "micro_batch_size": 1},
    {"tp": 2, "micro_batch_size": 4},
    {"tp": 2, "micro_batch_size": 4, "sequence_parallel": False},
    {"pp": 2, "micro_batch_size": 1, "pp_schedule": "interleaved_zero_bubble"},
    {"micro_batch_size": 4, "recompute": "selective"},
    {"micro_batch_size": 4, "recompute": "norm"},
    {"micro_batch_size": 4, "recompute": "full"},
)


LATENT = MLASpec(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
SHAPES: dict[str, dict[str, Any]] = {
    "latents": {"mla": LATENT},
    "experts": {
        "mla": dataclasses.replace(LATENT, q_lora_rank=0),
        "moe": experts(expert_hidden_size=256, num_shared_experts=1),
    },
}
LAYOUTS_OF_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("latents", {"dp": 2, "zero_stage": 3, "micro_batch_size": 1}),
    ("latents", {"tp": 2, "micro_batch_size": 4}),
    ("latents", {"tp": 2, "micro_batch_size": 4, "sequence_parallel": False}),
    ("latents", {"cp": 2, "cp_kind": "ring", "zero_stage": 1, "micro_batch_size": 4}),
    ("latents", {"pp": 2, "micro_batch_size": 1, "pp_schedule": "interleaved_zero_bubble"}),
    ("latents", {"micro_batch_size": 4, "recompute": "selective+mla_up"}),
    ("experts", {"dp": 2, "zero_stage": 2, "micro_batch_size": 2}),
    ("experts", {"dp": 2, "zero_stage": 3, "micro_batch_size": 1, "ep": 2}),
    ("experts", {"dp": 2, "zero_stage": 1, "tp": 2, "etp": 1, "ep": 4, "micro_batch_size": 2}),
    ("experts", {"tp": 2, "etp": 2, "micro_batch_size": 4, "sequence_parallel": False}),
    ("experts", {"pp": 2, "micro_batch_size": 1, "pp_schedule": "interleaved_zero_bubble"}),
    ("experts", {"micro_batch_size": 4, "recompute": "selective+mla_up"}),
    ("experts", {"micro_batch_size": 4, "recompute": "full"}),
    ("experts", {"micro_batch_size": 4, "recompute": "selective+experts"}),
    ("experts", {"micro_batch_size": 4, "recompute": "experts"}),
)


def small(precision: str, shape: str = "dense", **layout: Any) -> Experiment:
    spec: ModelSpec = model(**SMALL, num_kv_heads=4, **SHAPES.get(shape, {}))
    fields = {"model": spec, "global_batch_size": 4, "seq_len": 128, "precision": precision, **layout}
    return Experiment.canonical(**fields)


EVERY = [("dense", layout) for layout in LAYOUTS] + list(LAYOUTS_OF_SHAPES)
BOUNDS = (2e-4, 8e-3, 0.15)
"""Relative differences of a loss, of a gradient norm, and of a whole gradient in its norm. Layouts round bf16 sums in
other orders, and processors too, which moves a value next to a rounding boundary by a whole step of fp8 (1/8): a few in
a hundred do. The gradients of norms' weights are sums of terms that nearly cancel, and show most of it."""


@cache
def on_one_rank(pool: Pool, case: Experiment) -> RankTrace:
    (trace,) = pool.run(train_rank, 1, case, 2)
    return trace


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recipe"), sampled(list(itertools.product(["dense", "experts"], RECIPES)), 3, kinds=lambda case: case)
)
def test_weights_and_gradients_in_bf16_change_little(gloo_pool: Pool, recipe: Fp8Scaling, shape: str) -> None:
    """Scales are those of the weights in bf16, which differ from the ones in fp32 by 2^-9 of a weight."""
    layout = {"dp": 2, "zero_stage": 3, **({"ep": 2} if shape == "experts" else {})}
    case = small(f"fp8_{recipe}", shape, **layout).replace(master_weights="bf16", grad_reduce="bf16")
    expected = on_one_rank(gloo_pool, small(f"fp8_{recipe}", shape, micro_batch_size=4))
    for trace in gloo_pool.run(train_rank, 2, case, 2):
        assert trace.losses == pytest.approx(expected.losses, rel=2e-3)
        assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "shape", "layout"),
    sampled(
        [(recipe, *case) for recipe in RECIPES for case in EVERY],
        5,
        kinds=lambda case: [
            *case[:2],
            *(axis for axis in ("dp", "tp", "cp", "pp", "ep", "recompute") if axis in case[2]),
        ],
    ),
    ids=str,
)
def test_layouts_agree(gloo_pool: Pool, recipe: Fp8Scaling, shape: str, layout: dict[str, Any]) -> None:
    """Layouts compute nearly what one rank computes, and send what the closed form says, to the byte."""
    precision = f"fp8_{recipe}"
    one = small(precision, shape, micro_batch_size=4)
    case = small(precision, shape, **layout)
    expected = on_one_rank(gloo_pool, one)
    ranks = gloo_pool.run(train_and_count, case.world_size, train_rank, case, 2)
    traces = [trace for trace, _ in ranks]
    check_counts(case, [count for _, count in ranks])
    bounds = (1e-6, 1e-4, 0.02) if "recompute" in layout else BOUNDS  # here every product is of the same numbers
    for step in range(2):
        for trace in traces:
            got, right = trace.steps[step], expected.steps[step]
            assert got.loss == pytest.approx(right.loss, rel=bounds[0])
            assert got.grad_norm == pytest.approx(right.grad_norm, rel=bounds[1])
    whole = put_together(case, [trace.steps[0].gradients for trace in traces])
    for name, tensor in put_together(one, [expected.steps[0].gradients]).items():
        difference = (whole[name].value - tensor.value).norm() / tensor.value.norm()
        assert difference < bounds[2], f"{name}: {difference:.3f}"


def gathered(rank: int, case: Experiment) -> list[tuple[bool, float, float]]:
    """Of each fp8 weight: whether the gathered copy is that of one cast of the whole, its factor, and its bytes."""
    engine = built(rank, case)
    chunk = engine.chunks[0]
    found = list(_fp8_parameters(chunk))
    masters = [local_shard(parameter.sharded_param) for parameter, _ in found]
    (weights,) = engine.pipeline.fp8_weights
    for master in masters if rank else []:
        master.mul_(8.0)  # its largest value is another rank's, too
    weights.find_scales()
    results = []
    for block in chunk.blocks:
        block.unshard()
    group = engine.groups.data_mesh["shard"].get_group()
    for (parameter, products), master in zip(found, masters, strict=True):
        parts = [torch.empty_like(master) for _ in range(case.dp_shard)]
        torch.distributed.all_gather(parts, master, group=group)
        rows, _ = fp8.cast(torch.cat(parts), "tensorwise", "weight", columns=False)
        weight = parameter.unsharded_param
        assert rows is not None and products.weight_factors is not None and weight.dtype == E4M3
        same = torch.equal(rows.values.view(torch.uint8), weight.detach().view(torch.uint8))
        results.append((same, products.weight_factors.item() / rows.factors.item(), weight.element_size()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_gathered_weight_is_one_cast_of_the_whole_weight(gloo_pool: Pool, zero_stage: int) -> None:
    for found in gloo_pool.run(gathered, 2, small("fp8_tensorwise", dp=2, zero_stage=zero_stage)):
        assert len(found) == 4 * 3 and set(found) == {(True, 1.0, 1)}


def not_freed(rank: int, case: Experiment) -> int:
    """Number of weights whose memory stays after their engine is gone."""
    engine = built(rank, case)
    memory = [StorageWeakRef(local_shard(named.current).untyped_storage()) for named in engine.optimizer.parameters]
    assert memory and not any(one.expired() for one in memory)
    del engine
    gc.collect()
    return sum(not one.expired() for one in memory)


@pytest.mark.parametrize("shape", ["dense", "experts"])
def test_weights_go_with_their_engine(gloo_pool: Pool, shape: str) -> None:
    assert gloo_pool.run(not_freed, 1, small("fp8_tensorwise", shape)) == [0]


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    check_fp8_casts("cuda", (512, 768))
    check_largest_values("cuda", 1000, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_on_a_gpu(recipe: Fp8Scaling) -> None:
    """Products of what was cast, against the same in float64: they are rounded to bf16 once."""
    x, weight = (randn(1024, 2048, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (1, 2))
    for a, b in zip(fp8.cast(x, recipe, "activation"), fp8.cast(weight, recipe, "weight"), strict=True):
        assert a is not None and b is not None
        assert relative_error(fp8.product(a, b, torch.bfloat16, fast=False), exact(a) @ exact(b).t()) < 2**-9
