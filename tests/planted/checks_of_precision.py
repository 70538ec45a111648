"""Checks of what float64 has none of: loss scales, and products in fp8. As those of `tests.planted.checks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.planted.plant import Fault, with_fault
from tests.pool import Pool
from tests.workloads.engine import test_fp8, test_fp8_experts, test_loss_scale
from tests.workloads.engine.parity import train_rank
from workloads.engine.ops import fp8
from workloads.engine.update_ops.adamw import AdamW
from workloads.engine.update_ops.stochastic_rounding import Segment
from workloads.parity.shards import put_together
from workloads.spec.experiment import Experiment


def loss_scaling(pool: Pool, fault: Fault | None) -> None:
    """A step that overflows updates nothing and halves the scale; another has the norm, the first moments and the
    weights of the same step in fp32, whatever the scale is."""
    layout = {"dp": 2, "zero_stage": 1, "micro_batch_size": 2}
    for found in pool.run(with_fault, 2, fault, test_loss_scale.overflowing, layout):
        scales = [record.loss_scale for record, _, _ in found]
        first = next((step for step, (record, _, _) in enumerate(found) if not record.skipped), 6)
        assert 0 < first < 6 and scales == [2.0**21 / 2 ** min(step, first) for step in range(6)], scales
        assert [moved for _, moved, _ in found] == [step >= first for step in range(6)]
    exact = pool.run(with_fault, 2, None, _after_a_step, layout, "fp32")
    for scale in (2.0**10, 2.0**16):
        for got, right in zip(pool.run(with_fault, 2, fault, _after_a_step, layout, "fp16", scale), exact, strict=True):
            for name, value in right.items():
                error = ((got[name] - value).norm() / value.norm()).item()
                assert error < 0.02, f"{name} is off by {error:.3f} at a scale of {scale:g}"


def _after_a_step(rank: int, layout: dict[str, Any], precision: str, scale: float | None = None) -> dict[str, Tensor]:
    engine = test_loss_scale.engine(rank, scale, **layout, precision=precision)
    record = test_loss_scale.take_step(engine, 0)
    assert engine.optimizer.optimizer is not None and record.grad_norm is not None
    moments = [state["exp_avg"].reshape(-1) for state in engine.optimizer.optimizer.state.values()]
    weights = test_loss_scale.weights(engine)
    return {"norm": torch.tensor(record.grad_norm), "moments": torch.cat(moments), "weights": weights}


def loss_scaling_of_experts(pool: Pool, fault: Fault | None) -> None:
    """The first moments of every weight of a model with experts and a balance term are those of the step in fp32."""
    layout = {**test_loss_scale.EXPERTS, "micro_batch_size": 2}
    exact = pool.run(with_fault, 2, None, _moments, layout, "fp32")
    for scale in (2.0**10, 2.0**16):
        for got, right in zip(pool.run(with_fault, 2, fault, _moments, layout, "fp16", scale), exact, strict=True):
            for name, value in right.items():
                error = ((got[name] - value).norm() / value.norm()).item()
                assert error < 0.02, f"{name} is off by {error:.3f} at a scale of {scale:g}"


def _moments(rank: int, layout: dict[str, Any], precision: str, scale: float | None = None) -> dict[str, Tensor]:
    engine = test_loss_scale.engine(rank, scale, **layout, precision=precision)
    test_loss_scale.take_step(engine, 0)
    assert engine.optimizer.optimizer is not None
    states = engine.optimizer.optimizer.state.values()
    return {
        named.spec.parts[0].name: state["exp_avg"]
        for named, state in zip(engine.optimizer.parameters, states, strict=True)
    }


def skipped_steps(pool: Pool, fault: Fault | None) -> None:
    """A step that overflows moves neither the learning rate nor the experts' biases."""
    layout = {**test_loss_scale.EXPERTS, "model": test_loss_scale.BIAS, "micro_batch_size": 2}
    ranks = pool.run(with_fault, 2, fault, test_loss_scale.warming_up, layout, "fp16")
    test_loss_scale.check_that_a_skipped_step_moves_nothing(ranks)


def fp8_products(pool: Pool, fault: Fault | None) -> None:
    """Gradients in fp8 are near those in fp32, and their norm is nearer: errors of rounding have either sign."""
    _compare_with_fp32(pool, fault, "dense", test_fp8.RECIPES, {"dp": 2, "zero_stage": 2, "micro_batch_size": 1})


def fp8_experts(pool: Pool, fault: Fault | None) -> None:
    """The same of routed experts and latent attention."""
    layout = {"dp": 2, "zero_stage": 2, "micro_batch_size": 1, "ep": 2}
    _compare_with_fp32(pool, fault, "experts", ("tensorwise", "rowwise"), layout)


def _compare_with_fp32(
    pool: Pool, fault: Fault | None, shape: str, recipes: tuple[fp8.Fp8Scaling, ...], layout: dict[str, Any]
) -> None:
    exact = _gradients(pool, None, test_fp8.small("fp32", shape, **layout))
    for recipe in recipes:
        found = _gradients(pool, fault, test_fp8.small(f"fp8_{recipe}", shape, **layout))
        for name, value in exact.items():
            error = ((found[name] - value).norm() / value.norm()).item()
            norm = (found[name].norm() / value.norm()).item()
            assert error < 0.35 and abs(norm - 1) < 0.06, f"{recipe}, {name}: {error:.3f}, norm times {norm:.3f}"


def _gradients(pool: Pool, fault: Fault | None, case: Experiment) -> dict[str, Tensor]:
    traces = pool.run(with_fault, case.world_size, fault, train_rank, case, 1)
    together = put_together(case, [trace.steps[0].gradients for trace in traces])
    return {name: tensor.value for name, tensor in together.items()}


def fp8_expert_gathers(pool: Pool, fault: Fault | None) -> None:
    """What every rank gathers of experts in fp8 is one cast of each expert, also when weights have become smaller."""
    case = test_fp8.small("fp8_rowwise", "experts", dp=3, zero_stage=3, global_batch_size=3, micro_batch_size=1)
    for found in pool.run(with_fault, 3, fault, test_fp8_experts.gathered, case):
        assert set(found) == {(True, True)}, found


def fp8_gathers(pool: Pool, fault: Fault | None) -> None:
    """What every rank gathers of a weight in fp8 is one cast of the whole weight."""
    case = test_fp8.small("fp8_tensorwise", dp=2, zero_stage=3)
    for found in pool.run(with_fault, 2, fault, test_fp8.gathered, case):
        assert set(found) == {(True, 1.0, 1)}, found


def stochastic_rounding(pool: Pool, fault: Fault | None) -> None:
    """Of 65,536 equal weights and moments, a share moves that leaves the mean where it is in fp32; and other ones move
    in the next step."""
    (found,) = pool.run(with_fault, 1, fault, _rounded_tensors)
    for name, (wide, first, second) in found.items():
        step = (first.max() - first.min()).item()
        error = abs(first.mean().item() - wide)
        # a mean of as many choices between two neighbours is seldom further off than 5 of its standard deviations
        assert step > 0, f"{name}: all numbers are rounded alike"
        assert error < 5 * 0.5 * step / 256, f"{name}: the mean is off by {error / step:.3f} of a step"
        changed = ((first == first.max()) != (second == second.max())).double().mean().item()
        assert changed > 0.05, f"{name}: the same elements are rounded up in every step"


def _rounded_tensors(rank: int) -> dict[str, tuple[float, Tensor, Tensor]]:
    """Of weights and both moments: the value in fp32, and all in bf16 after the first update and after a second one
    from the same start."""
    count, value = 2**16, 1.0 + 2**-9 + 2**-11
    given = {"weight": 1.0, "exp_avg": value, "exp_avg_sq": value}
    results: dict[str, list[Tensor]] = {name: [] for name in given}
    wide: dict[str, float] = {}
    for step in (0.0, 1.0, -1.0):
        dtype = torch.float32 if step < 0 else torch.bfloat16
        weight = torch.nn.Parameter(torch.ones(count, dtype=dtype))
        run = [Segment(0, count, 11, 0, count, count)]
        rates: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
        optimizer = AdamW([weight], state_dtype=dtype, segments=[run], **rates)
        optimizer.allocate()
        state = optimizer.state[weight]
        state["step"].fill_(abs(step) if step > 0 else 0.0)
        weight.grad = torch.full((count,), 1.0, dtype=dtype)
        optimizer.update(torch.full((), value), None)
        for name, tensor in {"weight": weight.detach(), **{n: state[n] for n in ("exp_avg", "exp_avg_sq")}}.items():
            if step < 0:
                wide[name] = tensor[0].double().item()
            else:
                results[name].append(tensor.double())
    return {name: (wide[name], *both) for name, both in results.items()}  # type: ignore[misc]
