"""Every layout computes the losses, gradient norms, gradients and updated weights of the unsharded model.

In float64, where a right layout agrees to about 1e-13 and every wrong one known to us is off by half or more; bf16
would hide them. The same body runs on gloo (CPU) and on NCCL. On gloo the run is counted, too: what every rank sends in
the second step is what the closed form says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.layouts import AXES, FEW_RANKS, ODD, OF_MESSAGES, every_pair, larger
from tests.workloads.engine.parity import (
    STEPS,
    check,
    check_on,
    experiment,
    on_backends,
    train_compiled_rank,
    train_inductor_rank,
    train_prepared_rank,
    train_rank,
    trained_reference,
)
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
"""Below the gradient norms of these cases (about 0.75), so that clipping is compared too."""
LARGER = every_pair(8) + larger(60, 8, 2)
CASES = FEW_RANKS + ODD + LARGER
ON_16_RANKS = larger(4, 16, 4)


def choices(case: Experiment) -> set[tuple[str, Any]]:
    """What a case has chosen on each axis."""
    names = ["dp", "tp", "pp_schedule", "sequence_parallel"]
    names += ["zero_stage"] * (case.dp > 1) + ["cp_kind"] * (case.cp > 1)
    return {(name, getattr(case, name)) for name in names} | {("latent", case.model.mla is not None)}


ON_GLOO = [
    *sampled(FEW_RANKS, 14, kinds=choices),
    *sampled(ODD, 3),
    *sampled(OF_MESSAGES, 2),
    *sampled(LARGER, 4),
]


@pytest.mark.parametrize(("backend", "case"), on_backends(ON_GLOO, CASES))
def test_layout_equals_single_process(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """What it computes; on gloo also what every rank sends, which is what the closed form says, to the byte."""
    check_on(request, backend, case, CLIP_AT)


@pytest.mark.exhaustive(seconds=15)
def test_four_dimensions_equal_single_process_on_gloo() -> None:
    pool = Pool(16, "gloo")
    try:
        for case in ON_16_RANKS:
            check(pool, case, "cpu", clip_at=CLIP_AT)
    finally:
        pool.close()


IN_BF16: list[dict[str, Any]] = [
    {"dp": 2, "zero_stage": 0, "micro_batch_size": 2, "recompute": "selective"},
    {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
    {"dp": 2, "zero_stage": 2, "micro_batch_size": 2, "recompute": "full"},
    {"dp": 2, "zero_stage": 3, "micro_batch_size": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "micro_batch_size": 1},
    {"tp": 2, "pp": 2, "micro_batch_size": 2},
    {"qk_norm": True, "tp": 2, "micro_batch_size": 2, "recompute": "selective"},
    {"cp": 2, "cp_kind": "ring", "tp": 2, "micro_batch_size": 2},
    {"cp": 2, "cp_kind": "allgather", "dp": 2, "zero_stage": 3, "micro_batch_size": 2},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "dp": 2, "zero_stage": 2, "rounds": 4},
    {"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 2, "dp": 2, "zero_stage": 3, "rounds": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(IN_BF16, 2), ids=str)
def test_bf16_stays_near_float64(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    """Mixed precision has paths of its own: master weights, and gradients reduced and accumulated in fp32."""
    case = experiment(**layout).replace(precision="bf16")
    expected = trained_reference(gloo_pool, "cpu", case.model, case.global_batch_size)
    for trace in gloo_pool.run(train_rank, case.world_size, case, STEPS, "cpu"):
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=2e-3, atol=0)


TRACED_BLOCKS: list[dict[str, Any]] = [
    {"dp": 2, "zero_stage": 3, "micro_batch_size": 2, "recompute": "full"},
    {"tp": 2, "micro_batch_size": 4, "recompute": "selective"},
    {"tp": 2, "micro_batch_size": 4, "sequence_parallel": False},
    {"tp": 2, "micro_batch_size": 4, "recompute": "full"},
    {"dp": 2, "zero_stage": 2, "micro_batch_size": 2, "recompute": "full", "recompute_every": 2},
    {"tp": 2, "micro_batch_size": 4, "recompute": "selective", "recompute_every": 3},
    {"qk_norm": True, "tp": 2, "micro_batch_size": 4, "recompute": "selective"},
    {"latent": 16, "micro_batch_size": 4},
    {"latent": 0, "tp": 2, "micro_batch_size": 4, "recompute": "selective"},
    {"latent": 16, "tp": 2, "micro_batch_size": 4, "sequence_parallel": False, "recompute": "full"},
    {"latent": 16, "cp": 2, "cp_kind": "ring", "micro_batch_size": 4},
    {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "recompute": "selective"},
    {"cp": 2, "cp_kind": "allgather", "micro_batch_size": 4, "recompute": "selective"},
    {"cp": 4, "cp_kind": "ring", "micro_batch_size": 4, "recompute": "selective"},
    {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "recompute": "full"},
    {"latent": 16, "cp": 2, "cp_kind": "allgather", "micro_batch_size": 4, "recompute": "selective"},
]


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(TRACED_BLOCKS, 1, seconds=5), ids=str)
def test_compiled_blocks_equal_single_process(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    case = experiment(**layout, compile="block")
    check(gloo_pool, case, "cpu", body=train_compiled_rank)


COMPILED = [
    {"micro_batch_size": 4},
    {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
    {"dp": 2, "zero_stage": 2, "micro_batch_size": 2, "recompute": "selective"},
    {"dp": 2, "zero_stage": 3, "micro_batch_size": 2, "recompute": "full"},
    {"tp": 2, "micro_batch_size": 4},
    {"tp": 2, "micro_batch_size": 4, "sequence_parallel": False},
    {"tp": 2, "micro_batch_size": 4, "qk_norm": True, "recompute": "selective"},
    {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4},
    {"cp": 2, "cp_kind": "allgather", "micro_batch_size": 4},
    {"cp": 2, "cp_kind": "ulysses", "micro_batch_size": 4, "num_kv_heads": 4},
    {"pp": 2, "pp_schedule": "1f1b", "micro_batch_size": 4},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batch_size": 4, "tie": True},
]


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow(seconds=30)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", sampled(COMPILED, 1, seconds=12), ids=str)
def test_blocks_that_inductor_compiles_stay_near_float64(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    case = experiment(**layout, compile="block").replace(precision="bf16")
    expected = trained_reference(gloo_pool, "cpu", case.model, case.global_batch_size)
    for trace in gloo_pool.run(train_inductor_rank, case.world_size, case, STEPS, "cpu", timeout_s=360):
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=2e-3, atol=0)


PREPARED: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "zero_stage": 3, "tp": 2, "rounds": 2},
    {"pp": 2, "pp_schedule": "interleaved_zero_bubble", "virtual_stages": 2, "dp": 2, "zero_stage": 2},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "dp": 2, "zero_stage": 1, "tie": True},
    {"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 2, "cp": 2, "micro_batch_size": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(PREPARED, 2), ids=str)
def test_preparations_leave_nothing_behind(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    check(gloo_pool, experiment(**layout), "cpu", body=train_prepared_rank, clip_at=CLIP_AT)


def test_the_cases_are_many_and_meet_every_choice() -> None:
    assert len({case.id for case in CASES}) >= 140
    assert len(larger(60, 8, 2)) == 60
    for axis, values in AXES.items():
        for value in values:
            wanted = {name: of for name, of in value.items() if name not in ("rounds", "tie", "num_kv_heads", "dp")}
            found = [case for case in CASES if all(_field(case, name) == of for name, of in wanted.items())]
            assert len(found) >= 10, (axis, value)
    assert all(sum(degree > 1 for degree in (c.dp, c.tp, c.cp, c.pp)) == 4 for c in ON_16_RANKS)


def _field(case: Experiment, name: str) -> Any:
    if name == "latent":
        return None if case.model.mla is None else case.model.mla.q_lora_rank
    return case.model.qk_norm if name == "qk_norm" else getattr(case, name)
