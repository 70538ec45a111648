"""``loss_agrees`` can be false: right layouts of a bf16 model agree; errors planted in the engine do not.

Every planted error is of a kind that a falling loss hides: clipping and AdamW hide a wrong scale, and near
initialisation the loss hardly depends on the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from launchers.attempt.loss_check import LossComparison, compare, loss_key
from tests.pool import Pool
from tests.sampling import sampled
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring import step as steps
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, MoESpec

pytestmark = pytest.mark.slow(seconds=5)

MODEL = ModelSpec(
    name="agreement",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_hidden_size=512,
    vocab_size=4096,
)
Numbers = tuple[list[float], list[float]]


def experiment(**layout: Any) -> Experiment:
    return Experiment.canonical(**{"model": MODEL, "seq_len": 128, "global_batch_size": 8, **layout})


def attention_off(engine: Engine) -> None:
    for block in engine.chunks[0].blocks:
        block.attention.register_forward_hook(lambda module, inputs, output: output * 0)


def feed_forward_off(engine: Engine) -> None:
    for block in engine.chunks[0].blocks:
        block.ffn.register_forward_hook(lambda module, inputs, output: output * 0)


def gradients_times_accumulation(engine: Engine) -> None:
    finish = engine.optimizer.finish_gradients

    def wrong() -> None:
        finish()
        for parameter in engine.optimizer.parameters:
            parameter.gradient.mul_(2)

    engine.optimizer.finish_gradients = wrong  # type: ignore[method-assign]


def no_update(engine: Engine) -> None:
    def forget(norm: torch.Tensor) -> None:
        for parameter in engine.optimizer.parameters:
            parameter.current.grad = None

    engine.optimizer.step = forget  # type: ignore[method-assign]


def one_microbatch_for_all(engine: Engine) -> None:
    run = engine.pipeline.run
    engine.pipeline.run = lambda batches: run([batches[0]] * len(batches))  # type: ignore[method-assign]


ERRORS: list[Callable[[Engine], None]] = [
    attention_off,
    feed_forward_off,
    gradients_times_accumulation,
    no_update,
    one_microbatch_for_all,
]


class ProductsInFloat32(TorchDispatchMode):
    """Computes products of bf16 matrices, and attention's backward, in fp32 and rounds once, as a GPU does.

    A CPU without bf16 instructions takes a hundred times as long for a bf16 product as for one in fp32.
    """

    SLOW = tuple(
        getattr(torch.ops.aten, name)
        for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func.overloadpacket not in self.SLOW or args[0].dtype != torch.bfloat16:
            return func(*args, **options)
        out = options.pop("out", None)
        exact = func.overloadpacket(*tree_map_only(torch.Tensor, torch.Tensor.float, args), **options)
        return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, exact) if out is None else out.copy_(exact)


def train(rank: int, case: Experiment, plant: Callable[[Engine], None] | None = None) -> Numbers:
    choose_attention(case)
    engine = build(case, make_groups(case, rank, torch.device("cpu")))
    if plant is not None:
        plant(engine)
    with ProductsInFloat32():
        records = [
            steps._finish(engine, steps.run_step(engine, i, steps._batches(engine, i), is_warmup=False))
            for i in range(3)
        ]
    losses, norms = [r.loss for r in records], [r.grad_norm for r in records]
    assert None not in losses + norms
    return losses, norms  # type: ignore[return-value]


@cache
def plain(pool: Pool) -> Numbers:
    return pool.run(train, 1, experiment(micro_batch_size=4))[0]


def routed(**fields: Any) -> str:
    moe = MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=64)
    model = dataclasses.replace(MODEL, moe=moe)
    return loss_key(experiment(**{"model": model, "dp": 2, "micro_batch_size": 2, **fields}))


def test_losses_are_compared_within_one_routing() -> None:
    learned, limited = {"routing": "learned"}, {"routing": "learned", "capacity_factor": 1.0}
    keys = [routed(), routed(routing="skewed", routing_imbalance=2), routed(**learned), routed(**limited)]
    keys += [routed(routing="skewed", routing_imbalance=3), routed(routing="learned", capacity_factor=2.0)]
    assert len(set(keys)) == 6
    assert routed(**learned, ep=2, micro_batch_size=1) == routed(**learned)
    assert routed(**learned, routing_imbalance=2.0) == routed(**learned)  # assumed by the planner, in no run


def test_losses_with_a_capacity_are_compared_where_the_same_tokens_are_dropped() -> None:
    limited = {"routing": "learned", "capacity_factor": 1.0}
    same = [{"ep": 2}, {"zero_stage": 2}, {"recompute": "full"}, {"pp": 2}]
    other = [{"dp": 1}, {"micro_batch_size": 1}, {"cp": 2}, {"tp": 2}]
    assert {routed(**limited, **layout) for layout in same} == {routed(**limited)}
    assert len({routed(**limited, **layout) for layout in other} | {routed(**limited)}) == 5


def compared(folder: Path, reference: Numbers, other: Numbers) -> LossComparison:
    compare(folder, experiment(), "reference", *reference)
    return compare(folder, experiment(), "other", *other)


@pytest.mark.parametrize(
    "layout",
    sampled(
        [
            {"dp": 2, "zero_stage": 3, "micro_batch_size": 2, "recompute": "selective"},
            {"tp": 2, "micro_batch_size": 2},
            {"pp": 2, "micro_batch_size": 2, "recompute": "full"},
        ],
        1,
        seconds=5,
    ),
    ids=str,
)
def test_right_layouts_agree(gloo_pool: Pool, tmp_path: Path, layout: dict[str, Any]) -> None:
    case = experiment(**layout)
    result = compared(tmp_path, plain(gloo_pool), gloo_pool.run(train, case.world_size, case)[0])
    assert result.agrees, result


@pytest.mark.parametrize("error", sampled(ERRORS, 2, seconds=5), ids=lambda error: error.__name__)
def test_planted_errors_do_not(gloo_pool: Pool, tmp_path: Path, error: Callable[[Engine], None]) -> None:
    wrong = gloo_pool.run(train, 1, experiment(micro_batch_size=4), error)[0]
    result = compared(tmp_path, plain(gloo_pool), wrong)
    assert result.agrees is False, result
