"""Every layout computes the losses, gradient norms and gradients of the unsharded model.

In float64, where a right layout agrees to about 1e-13 and every wrong one known to us is off by half or more; bf16
would hide them. The same body runs on gloo (CPU) and on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partialmethod
from itertools import product
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.workloads.engine import reference
from tests.workloads.engine.parity import RankTrace, full_gradients, train_rank
from workloads.experiment import Experiment, ModelSpec

STEPS = 3
TOLERANCE = 1e-12
PIPELINES: list[dict[str, Any]] = [{}, {"pp": 2, "pp_schedule": "gpipe"}, {"pp": 2, "pp_schedule": "1f1b"}]


def model(**changes: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "name": "parity",
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 48,
        "vocab_size": 96,
    }
    return ModelSpec(**{**shape, **changes})


def experiment(tie: bool = False, **layout: Any) -> Experiment:
    layout = {"global_batch_size": 8, **layout}
    return Experiment.canonical(model=model(tie_embeddings=tie), seq_len=16, precision="fp64", **layout)


def _matrix() -> list[Experiment]:
    """ZeRO 0-3 x tp x pipeline x accumulation; recompute takes turns so that it meets every other choice."""
    cases = []
    for (zero, tp, (i, pipeline)), rounds in product(product(range(4), (1, 2), enumerate(PIPELINES)), (1, 2)):
        recompute = ("none", "selective", "full")[(zero + tp + i) % 3]
        cases.append(
            experiment(dp=2, zero_stage=zero, tp=tp, recompute=recompute, micro_batch_size=4 // rounds, **pipeline)
        )
    return cases


EXTRAS = [
    experiment(),
    experiment(tp=2, sequence_parallel=False),
    experiment(tp=2, pp=2, sequence_parallel=False, micro_batch_size=2),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=1, micro_batch_size=1),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=2, micro_batch_size=1),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=3, micro_batch_size=2, recompute="full"),
    experiment(tie=True, dp=2, zero_stage=3, micro_batch_size=2),
    experiment(tie=True, pp=2, tp=2, micro_batch_size=2),
    experiment(tie=True, pp=2, dp=2, zero_stage=1, micro_batch_size=2),
    experiment(dp=3, zero_stage=3, global_batch_size=12, micro_batch_size=2),
    experiment(pp=3, micro_batch_size=2),
    experiment(pp=3, micro_batch_size=4),
    experiment(dp=4, zero_stage=2, micro_batch_size=1),
]
CASES = _matrix() + EXTRAS


@cache
def trained_reference(pool: Pool, device: str, tie: bool, global_batch_size: int) -> reference.Trace:
    case = experiment(tie, global_batch_size=global_batch_size)
    (weights,) = pool.run(reference.draw_weights, 1, case, device)
    return reference.train(case, weights, STEPS)


def check(pool: Pool, case: Experiment, device: str, body: Callable[..., RankTrace] = train_rank) -> None:
    expected = trained_reference(pool, device, case.model.tie_embeddings, case.global_batch_size)
    traces = pool.run(body, case.world_size, case, STEPS, device, timeout_s=150)
    for trace in traces:
        torch.testing.assert_close(trace.losses, expected.losses, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=0)
    for step in range(STEPS):
        gradients = full_gradients(case, traces, step)
        assert gradients.keys() == expected.gradients[step].keys()
        for name, gradient in gradients.items():
            wanted = expected.gradients[step][name]
            error = ((gradient - wanted).abs().max() / wanted.abs().max()).item()
            assert error < TOLERANCE, f"step {step}, {name}: relative error {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_layout_equals_single_process_on_gloo(gloo_pool: Pool, case: Experiment) -> None:
    check(gloo_pool, case, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero_stage": 0, "micro_batch_size": 2, "recompute": "selective"},
        {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
        {"dp": 2, "zero_stage": 2, "micro_batch_size": 2, "recompute": "full"},
        {"dp": 2, "zero_stage": 3, "micro_batch_size": 2},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "micro_batch_size": 1},
        {"tp": 2, "pp": 2, "micro_batch_size": 2},
    ],
    ids=str,
)
def test_bf16_stays_near_float64(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    """Mixed precision has paths of its own: master weights, and gradients reduced and accumulated in fp32."""
    case = experiment(**layout).replace(precision="bf16")
    expected = trained_reference(gloo_pool, "cpu", False, case.global_batch_size)
    for trace in gloo_pool.run(train_rank, case.world_size, case, STEPS, "cpu"):
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=2e-3, atol=0)


def train_compiled_rank(rank: int, case: Experiment, steps: int, device: str) -> RankTrace:
    """Traced and differentiated ahead of time as in a compiled run, but executed op by op: no compiler, exact."""
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(compile_module, backend="aot_eager")  # type: ignore[method-assign, assignment]
    try:
        return train_rank(rank, case, steps, device)
    finally:
        torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero_stage": 3, "micro_batch_size": 2, "recompute": "full"},
        {"tp": 2, "micro_batch_size": 4, "recompute": "selective"},
        {"tp": 2, "micro_batch_size": 4, "sequence_parallel": False},
    ],
    ids=str,
)
def test_compiled_blocks_equal_single_process(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    case = experiment(**layout, compile="block")
    check(gloo_pool, case, "cpu", body=train_compiled_rank)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_layout_equals_single_process_on_nccl(nccl_pool: Pool, case: Experiment) -> None:
    if case.world_size > nccl_pool.size:
        pytest.skip(f"{case.world_size} ranks, {nccl_pool.size} devices")
    check(nccl_pool, case, "cuda")


def test_matrix_is_wide_enough() -> None:
    assert len({case.id for case in CASES}) >= 40
    assert {(c.zero_stage, c.tp, c.pp_schedule) for c in CASES} >= set(
        product(range(4), (1, 2), ("none", "gpipe", "1f1b"))
    )
    assert {(c.recompute, c.num_microbatches > 1) for c in CASES} == set(
        product(("none", "selective", "full"), (False, True))
    )
