"""Weight gradients added to fp32 sums in their products: the same step, and more exact gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.parity import check, experiment, experts, on_backends
from workloads.rules.layout_rules import layout_violations
from workloads.spec.experiment import Experiment

FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
CASES = [
    experiment(**FUSED),
    experiment(rounds=3, tie=True, recompute="selective", **FUSED),
    experiment(dp=2, zero_stage=0, rounds=2, recompute="full", **FUSED),
    experiment(dp=2, zero_stage=1, rounds=3, qk_norm=True, **FUSED),
    experiment(dp=2, zero_stage=1, rounds=2, tie=True, **FUSED),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=1, rounds=2, **FUSED),
    experiment(dp=3, zero_stage=1, global_batch_size=12, micro_batch_size=2, **FUSED),
    *(experiment(tp=2, sequence_parallel=sp, rounds=2, **FUSED) for sp in (True, False)),
    experiment(cp=2, zero_stage=1, rounds=2, **FUSED),
    experiment(latent=16, rounds=2, recompute="selective+mla_up", attention="math", **FUSED),
    *(experiment(pp=2, pp_schedule=schedule, rounds=4, tie=True, **FUSED) for schedule in ("gpipe", "1f1b")),
    experiment(pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, rounds=4, tie=True, **FUSED),
    *(
        experiment(pp=2, pp_schedule=schedule, virtual_stages=2, rounds=4, dp=2, zero_stage=1, **FUSED)
        for schedule in ("interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
    ),
    *(experiment(moe=experts(), dp=2, ep=2, zero_stage=zero, rounds=2, **FUSED) for zero in (0, 1)),
    experiment(moe=experts(), tp=2, ep=2, pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, rounds=4, **FUSED),
]
"""Layouts whose products have a sum to add to: every way in which a weight gets its gradient."""


def test_the_layouts_are_allowed_and_fused() -> None:
    for case in CASES:
        assert not layout_violations(case), case.id
        assert case.gradient_accumulation_fusion


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, 6), CASES))
def test_sums_of_products_equal_a_single_process(
    request: pytest.FixtureRequest, backend: str, case: Experiment
) -> None:
    """Losses, gradient norms, gradients and weights in float64. A sum that starts with the last step's content, a
    product that overwrites, or a reduction before the last micro-batch is off by more than half of a gradient."""
    pool: Pool = request.getfixturevalue(f"{backend}_pool")
    check(pool, case, "cpu" if backend == "gloo" else "cuda", clip_at=0.3, counts=backend == "gloo")
