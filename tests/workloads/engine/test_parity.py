"""Every layout computes the losses, gradient norms, gradients and updated weights of the unsharded model.

In float64, where a right layout agrees to about 1e-13 and every wrong one known to us is off by half or more; bf16
would hide them. The same body runs on gloo (CPU) and on NCCL.
"""

from __future__ import annotations

from functools import partialmethod
from itertools import product
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.workloads.engine.parity import STEPS, RankTrace, check, experiment, train_rank, trained_reference
from workloads.experiment import Experiment

PIPELINES: list[dict[str, Any]] = [{}, {"pp": 2, "pp_schedule": "gpipe"}, {"pp": 2, "pp_schedule": "1f1b"}]


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
QK_NORM = [
    experiment(qk_norm=True, **layout)
    for layout in (
        {},
        {"tp": 2, "micro_batch_size": 2},
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        {"tp": 2, "pp": 2, "micro_batch_size": 2, "recompute": "selective"},
        {"pp": 3, "pp_schedule": "gpipe", "micro_batch_size": 2},
        {"dp": 2, "micro_batch_size": 2, "recompute": "selective"},
        {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
        {"dp": 2, "zero_stage": 2, "micro_batch_size": 2, "recompute": "full"},
        {"dp": 2, "tp": 2, "zero_stage": 3, "micro_batch_size": 2},
        {"dp": 3, "zero_stage": 3, "global_batch_size": 12, "micro_batch_size": 2, "recompute": "selective"},
    )
]
CASES = _matrix() + EXTRAS + QK_NORM


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
        {"qk_norm": True, "tp": 2, "micro_batch_size": 2, "recompute": "selective"},
    ],
    ids=str,
)
def test_bf16_stays_near_float64(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    """Mixed precision has paths of its own: master weights, and gradients reduced and accumulated in fp32."""
    case = experiment(**layout).replace(precision="bf16")
    expected = trained_reference(gloo_pool, "cpu", case.model, case.global_batch_size)
    for trace in gloo_pool.run(train_rank, case.world_size, case, STEPS, "cpu"):
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=2e-3, atol=0)


def train_compiled_rank(rank: int, case: Experiment, steps: int, device: str, gradient_scale: float) -> RankTrace:
    """Traced and differentiated ahead of time as in a compiled run, but executed op by op: no compiler, exact."""
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(compile_module, backend="aot_eager")  # type: ignore[method-assign, assignment]
    try:
        return train_rank(rank, case, steps, device, gradient_scale)
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
        {"qk_norm": True, "tp": 2, "micro_batch_size": 4, "recompute": "selective"},
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
