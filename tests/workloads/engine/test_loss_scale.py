"""fp16: the loss scale, skipped steps, and gradients that would underflow without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.op_checks import randn, relative_error
from tests.workloads.engine.parity import experts, model
from workloads.contract.protocol import StepRecord
from workloads.engine.collectives.groups import make_groups
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.layers.transformer import routers
from workloads.engine.ops.linear_cross_entropy import linear_cross_entropy
from workloads.engine.training import loss_scale
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.engine.training.loss_scale import LossScale
from workloads.measuring.step import Diverged, _batches, _finish, run_step
from workloads.spec.experiment import Experiment

SPREAD = 2.0**-9
"""fp16 has 11 significant bits: sums in another order differ by few roundings of 2^-11."""


AUX = model(num_layers=2, moe=experts(gate="sigmoid", balance="aux_loss", balance_coefficient=0.5))
BIAS = model(num_layers=2, moe=experts(gate="sigmoid", balance="bias", balance_coefficient=0.05))
EXPERTS = {"model": AUX, "routing": "learned", "dp": 2, "ep": 2, "zero_stage": 1}


def engine(
    rank: int, initial: float | None = None, rate: Callable[[int], float] | None = None, **layout: Any
) -> Engine:
    fields = {"model": model(num_layers=2), "seq_len": 16, "global_batch_size": 4, "precision": "fp16", **layout}
    case = Experiment.canonical(**fields)
    choose_attention(case)
    built = build(case, make_groups(case, rank, torch.device("cpu")), rate)
    if initial is not None:
        assert built.optimizer.loss_scale is not None
        built.optimizer.loss_scale.value.fill_(initial)
    return built


def take_step(built: Engine, step: int) -> StepRecord:
    pending = run_step(built, step, _batches(built, step), is_warmup=False)
    built.clock.finish()
    return _finish(built, pending)


def weights(built: Engine) -> torch.Tensor:
    return torch.cat([local_shard(p.current).reshape(-1).clone() for p in built.optimizer.parameters])


def overflowing(rank: int, layout: dict[str, Any]) -> list[tuple[StepRecord, bool, float]]:
    """Of six steps from a scale that is too large: the record, whether weights moved, AdamW's own count of steps."""
    built = engine(rank, 2.0**21, **layout)
    found = []
    for _ in range(6):
        before = weights(built)
        record = take_step(built, 0)
        assert built.optimizer.optimizer is not None
        count = max(float(state["step"]) for state in built.optimizer.optimizer.state.values())
        found.append((record, not torch.equal(before, weights(built)), count))
    return found


LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 1},
    {"dp": 2, "zero_stage": 1},
    {"dp": 2, "zero_stage": 3},
    {"tp": 2},
    {"pp": 2, "micro_batch_size": 1},
    EXPERTS,
    {**EXPERTS, "dp": 1, "ep": 1, "zero_stage": 0, "tp": 2, "etp": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 2), ids=str)
def test_a_step_that_overflows_is_skipped_by_every_rank_and_halves_the_scale(
    gloo_pool: Pool, layout: dict[str, Any]
) -> None:
    size = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    ranks = gloo_pool.run(overflowing, size, {"micro_batch_size": 2, **layout})
    for found in ranks:
        records = [record for record, _, _ in found]
        skipped = [record.skipped for record in records]
        assert skipped[0] is True and skipped[-1] is False, skipped
        first = skipped.index(False)
        assert skipped == [True] * first + [False] * (6 - first), "once it is small enough, it stays"
        scales = [2.0**21 / 2 ** min(step, first) for step in range(6)]
        assert [record.loss_scale for record in records] == scales, "halved after every overflow, and only then"
        assert [moved for _, moved, _ in found] == [not skip for skip in skipped]
        assert [count for _, _, count in found] == [max(0, step + 1 - first) for step in range(6)]
        assert all((record.grad_norm is None) == record.skipped for record in records)
    assert len({tuple(record.skipped for record, _, _ in found) for found in ranks}) == 1
    alone = {name: layout[name] for name in ("model", "routing") if name in layout}
    expected = gloo_pool.run(overflowing, 1, {"micro_batch_size": 2, **alone})[0][-1][0]
    for found in ranks:
        last = found[-1][0]
        assert last.grad_norm == pytest.approx(expected.grad_norm, rel=SPREAD)
        assert last.loss == pytest.approx(expected.loss, rel=SPREAD)


Moved = tuple[bool | None, float, torch.Tensor]
"""Of a step: whether it was skipped, its learning rate, and the experts' biases after it."""


def warming_up(rank: int, layout: dict[str, Any], precision: str) -> list[Moved]:
    """Six steps from a scale that is too large, with a rate of 1e-6 more in each update."""
    scale = 2.0**21 if precision == "fp16" else None
    built = engine(rank, scale, lambda update: 1e-6 * (update + 1), **layout, precision=precision)
    steps = []
    for step in range(6):
        record = take_step(built, step)
        biases = [router.bias.clone() for chunk in built.chunks for router in routers(chunk)]
        steps.append((record.skipped, built.optimizer.learning_rate, torch.cat(biases)))
    return steps


def check_that_a_skipped_step_moves_nothing(ranks: list[list[Moved]]) -> None:
    for steps in ranks:
        skipped = [bool(skip) for skip, _, _ in steps]
        assert 0 < sum(skipped) < 6
        updates = [skipped[:step].count(False) for step in range(6)]
        assert [rate for _, rate, _ in steps] == [1e-6 * (update + 1) for update in updates]
        before = torch.zeros_like(steps[0][2])
        for skip, (_, _, biases) in zip(skipped, steps, strict=True):
            assert torch.equal(biases, before) == skip, "biases move in every step but a skipped one"
            before = biases


@pytest.mark.slow
def test_a_skipped_step_moves_neither_the_rate_nor_the_biases(gloo_pool: Pool) -> None:
    layout = {**EXPERTS, "model": BIAS, "micro_batch_size": 2}
    check_that_a_skipped_step_moves_nothing(gloo_pool.run(warming_up, 2, layout, "fp16"))


def test_the_scale_grows_after_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GOOD_STEPS", 3)
    scale = LossScale(torch.device("cpu"))
    seen = []
    for norm in (1.0, 2.0, float("inf"), 1.0, 1.0, 1.0, 1.0, float("nan"), 1.0):
        scale.update(scale.overflowed(torch.tensor(norm)))
        seen.append(scale.value.item() / loss_scale.INITIAL)
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1, 1, 0.5, 0.5], "an overflow begins the count of good steps anew"


def diverging(rank: int) -> str:
    built = engine(rank, 1.0)
    with torch.no_grad():
        local_shard(built.optimizer.parameters[0].current).fill_(float("nan"))
    record = take_step(built, 0)
    assert record.skipped and record.loss is None and record.loss_scale == 1.0
    with pytest.raises(Diverged) as raised:
        take_step(built, 1)
    return str(raised.value)


def test_a_collapsed_scale_is_divergence(gloo_pool: Pool) -> None:
    (said,) = gloo_pool.run(diverging, 1)
    assert "at a loss scale of 0.5" in said


@pytest.mark.parametrize("in_forward", [True, False])
def test_gradients_are_scaled_before_they_are_rounded(in_forward: bool) -> None:
    tokens, scale = 64, 1.0 / 2**22  # as of a step of four million tokens
    x, weight = randn(tokens, 16), randn(32, 16) / 4
    targets = torch.arange(tokens) % 32

    def gradients(dtype: torch.dtype, factor: float) -> list[torch.Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        loss = linear_cross_entropy(
            *inputs, targets, scale=scale, group=None, grads_in_forward=in_forward, gradient_scale=torch.tensor(factor)
        )
        plain = linear_cross_entropy(*inputs, targets, scale=scale, group=None)
        assert torch.equal(loss, plain), "the loss itself is not scaled"
        return [g.double() / factor for g in torch.autograd.grad(loss, inputs)]

    exact = gradients(torch.float64, 1.0)
    for got, expected in zip(gradients(torch.float16, 2.0**16), exact, strict=True):
        assert relative_error(got, expected) < SPREAD
    assert relative_error(gradients(torch.float16, 1.0)[0], exact[0]) > 0.05, "without the scale they underflow"


def test_other_precisions_have_no_scale(gloo_pool: Pool) -> None:
    ((record, has),) = gloo_pool.run(unscaled, 1)
    assert (record.loss_scale, record.skipped, has) == (None, None, False)


def unscaled(rank: int) -> tuple[StepRecord, bool]:
    built = engine(rank, precision="bf16")
    return take_step(built, 0), built.optimizer.loss_scale is not None
