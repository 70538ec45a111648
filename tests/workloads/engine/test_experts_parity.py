"""Routed experts: every layout computes what the unsharded model computes, in float64 (see `test_parity`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.parity import (
    check,
    check_on,
    experiment,
    experts,
    on_backends,
    train_compiled_rank,
    train_prepared_rank,
)
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

CLIP_AT = 0.3
MANY = experts()


def routed(moe: MoESpec = MANY, **layout: Any) -> Experiment:
    return experiment(moe=moe, **layout)


AUX = experts(gate="sigmoid", balance="aux_loss", balance_coefficient=0.5)
THREE = {"micro_batch_size": 3, "global_batch_size": 6}
"""With sequence parallelism each of two ranks has one whole sequence and half of another one."""
BIAS = experts(gate="sigmoid", balance="bias", balance_coefficient=0.05)
ONE_RANK = [
    routed(),
    routed(routing="skewed", routing_imbalance=2.5, micro_batch_size=4),
    *(routed(routing="learned", micro_batch_size=2, recompute=kind) for kind in ("none", "selective", "full")),
    routed(experts(gate="sigmoid", weight_scale=2.5, num_shared_experts=0, num_dense_layers=0), routing="learned"),
    routed(experts(normalize_weights=False, balance="aux_loss", balance_coefficient=0.5), routing="learned"),
    routed(experts(gate="sigmoid", balance="aux_loss", balance_coefficient=0.5), routing="learned", recompute="full"),
    routed(experts(gate="sigmoid", balance="bias", balance_coefficient=0.05), routing="learned", micro_batch_size=2),
    routed(routing="learned", capacity_factor=1.1, micro_batch_size=2),  # of 8.8 copies an expert takes 9
    routed(recompute="experts", micro_batch_size=2),
    routed(AUX, routing="learned", recompute="selective+experts"),
    routed(BIAS, latent=16, routing="learned", recompute="selective+mla_up+experts", attention="math"),
]
FEW_RANKS = [
    *(routed(dp=2, zero_stage=zero, micro_batch_size=2, ep=ep) for zero in range(4) for ep in (1, 2)),
    *(routed(dp=2, zero_stage=zero, rounds=2, ep=2, routing="learned") for zero in (1, 3)),
    routed(dp=2, ep=2, routing="skewed", routing_imbalance=3.0, recompute="selective"),
    routed(dp=2, ep=2, routing="learned", capacity_factor=0.9, zero_stage=2, micro_batch_size=2),
    routed(AUX, dp=2, ep=2, routing="learned", recompute="full"),
    routed(BIAS, dp=2, ep=2, routing="learned", zero_stage=3),
    *(routed(tp=2, etp=etp, routing=kind) for etp in (1, 2) for kind in ("balanced", "learned")),
    *(routed(AUX, tp=2, etp=etp, routing="learned", **THREE) for etp in (1, 2)),
    *(routed(BIAS, tp=2, etp=etp, routing="learned") for etp in (1, 2)),
    routed(tp=2, etp=2, sequence_parallel=False, routing="learned"),
    routed(AUX, tp=2, etp=2, sequence_parallel=False, routing="learned", **THREE),
    routed(tp=2, etp=1, ep=2, routing="learned", capacity_factor=1.1),
    *(
        routed(AUX, cp=2, cp_kind=kind, ep=ep, routing="learned", micro_batch_size=2)
        for kind, ep in (("ring", 2), ("allgather", 1), ("ulysses", 1))
    ),
    routed(cp=2, cp_kind="allgather", ep=2, zero_stage=3, micro_batch_size=2),
    *(
        routed(pp=2, pp_schedule=schedule, virtual_stages=chunks, routing=kind)
        for schedule, chunks in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved_1f1b", 2),
            ("interleaved_zero_bubble", 2),
            ("zero_bubble_v", 2),
            ("dualpipe_v", 2),
        )
        for kind in ("balanced", "learned")
    ),
    routed(BIAS, pp=2, micro_batch_size=2, routing="learned"),
    *(routed(dp=2, ep=2, zero_stage=zero, rounds=2, recompute="experts", routing="learned") for zero in (0, 3)),
    *(routed(tp=2, etp=etp, recompute="swiglu+experts", routing="learned") for etp in (1, 2)),
    routed(tp=2, etp=2, sequence_parallel=False, recompute="experts"),
    routed(AUX, cp=2, ep=2, recompute="norm+experts", routing="learned", micro_batch_size=4),
    *(
        routed(pp=2, pp_schedule=schedule, virtual_stages=chunks, recompute="experts")
        for schedule, chunks in (("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble_v", 2))
    ),
]
MORE_RANKS = [
    *(routed(dp=4, ep=ep, zero_stage=zero) for ep in (2, 4) for zero in range(4)),
    routed(dp=8, ep=8, zero_stage=2, routing="learned"),
    routed(dp=8, ep=4, zero_stage=3),
    routed(dp_replicate=2, dp_shard=2, ep=2, zero_stage=3, routing="learned"),
    routed(dp_replicate=2, dp_shard=2, ep=4, zero_stage=2),
    routed(dp=2, tp=2, ep=2, etp=2, zero_stage=3, routing="learned"),
    routed(dp=2, tp=2, ep=2, etp=1, zero_stage=2, routing="learned"),
    routed(AUX, dp=2, tp=2, ep=4, etp=1, zero_stage=1, routing="learned", recompute="selective", micro_batch_size=2),
    routed(AUX, cp=2, tp=2, etp=1, routing="learned", recompute="full", **THREE),
    routed(dp=2, cp=2, ep=4, zero_stage=3, routing="learned", recompute="full"),
    routed(dp=2, cp=2, ep=2, cp_kind="allgather", zero_stage=1),
    routed(dp=2, pp=2, ep=2, pp_schedule="zero_bubble_v", virtual_stages=2, zero_stage=2, rounds=4, routing="learned"),
    routed(dp=2, pp=2, ep=2, pp_schedule="dualpipe_v", virtual_stages=2, zero_stage=3, rounds=4),
    routed(BIAS, dp=2, pp=2, tp=2, ep=2, etp=1, zero_stage=1, rounds=2, routing="learned", tie=True, qk_norm=True),
    routed(cp=2, tp=2, pp=2, ep=2, etp=2, rounds=2, recompute="norm+swiglu"),
    routed(dp=4, ep=4, zero_stage=3, routing="learned", recompute="experts", recompute_every=2),
    routed(
        dp=2, pp=2, ep=2, pp_schedule="dualpipe_v", virtual_stages=2, zero_stage=3, rounds=4, recompute="rope+experts"
    ),
    routed(BIAS, cp=2, tp=2, pp=2, ep=4, etp=1, rounds=2, routing="learned", recompute="selective+experts"),
]
CASES = ONE_RANK + FEW_RANKS + MORE_RANKS


OF_MESSAGES = [
    routed(dp=2, tp=2, etp=1, ep=4, routing="skewed", routing_imbalance=2.0, zero_stage=3),
    routed(cp=2, tp=2, etp=1, ep=4, routing="skewed", routing_imbalance=2.0, cp_kind="ulysses", num_kv_heads=4),
    routed(tp=2, etp=2, recompute="full", micro_batch_size=2, sequence_parallel=False, qk_norm=True),
]


def split(case: Experiment) -> set[str]:
    """What splits the work of a case among its ranks."""
    kinds = {axis for axis in ("dp", "tp", "cp", "pp", "ep", "etp") if getattr(case, axis) > 1}
    return kinds | ({case.pp_schedule} if case.pp > 1 else set()) | ({case.cp_kind} if case.cp > 1 else set())


ON_GLOO = [
    *sampled(ONE_RANK, 2),
    *sampled(FEW_RANKS, 7, kinds=split),
    *sampled(MORE_RANKS, 1),
    *sampled(OF_MESSAGES, 1),
]


@pytest.mark.parametrize(("backend", "case"), on_backends(ON_GLOO, CASES))
def test_layout_equals_single_process(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """What it computes; on gloo also what every rank sends, which is what the closed form says, to the byte."""
    check_on(request, backend, case, CLIP_AT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    sampled(
        [
            *({"recompute": kind, "micro_batch_size": 4} for kind in ("none", "selective", "full")),
            {
                "cp": 2,
                "cp_kind": "ring",
                "ep": 2,
                "micro_batch_size": 4,
                "recompute": "selective",
                "recompute_every": 2,
            },
            {"cp": 2, "cp_kind": "allgather", "latent": 16, "micro_batch_size": 4, "recompute": "selective"},
        ],
        2,
        seconds=6,
    ),
    ids=str,
)
def test_compiled_blocks_with_experts_equal_single_process(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    check(gloo_pool, routed(compile="block", **layout), body=train_compiled_rank, clip_at=CLIP_AT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2, "zero_stage": 1}, {"pp": 2, "micro_batch_size": 2}], ids=str)
def test_biases_that_have_moved_move_on(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    """The first two steps use biases of 0 and after one move; only the third sees the second move."""
    check(gloo_pool, routed(BIAS, routing="learned", **layout), clip_at=CLIP_AT, steps=3)


@pytest.mark.slow
def test_preparations_leave_no_loads_behind(gloo_pool: Pool) -> None:
    check(gloo_pool, routed(BIAS, pp=2, micro_batch_size=2, routing="learned"), body=train_prepared_rank)
