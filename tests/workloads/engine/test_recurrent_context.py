"""Recurrent layers of sequences that context-parallel ranks share equal the recurrence of one token after the other in
float64, with every other axis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.kind_models import DIVIDED, RECURRENT
from tests.workloads.engine.parity import check, check_on, experiment, on_backends, train_compiled_rank
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
LONG = {"seq_len": 84}
"""Tokens in two chunks of the recurrence; a rank's parts of 21 are no multiple of a chunk."""
LAYOUTS: list[dict[str, Any]] = [
    {"cp": 2, "cp_kind": "ulysses", "micro_batch_size": 4, "zero_stage": 1},
    {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "zero_stage": 2, "recompute": "selective"},
    {"cp": 2, "cp_kind": "allgather", "dp": 2, "zero_stage": 3, "micro_batch_size": 2, "recompute": "full"},
    {"cp": 2, "cp_kind": "ring", "pp": 2, "pp_schedule": "1f1b", "micro_batch_size": 2, "recompute": "full"},
    {
        "cp": 2,
        "cp_kind": "ulysses",
        "pp": 2,
        "pp_schedule": "zero_bubble_v",
        "virtual_stages": 2,
        "micro_batch_size": 2,
        "tie": True,
    },
]
"""What every kind runs with."""
OF_EXPERTS: list[dict[str, Any]] = [
    {"cp": 2, "ep": 2, "zero_stage": 1, "recompute": "experts", "routing": "learned", "micro_batch_size": 2},
    {"cp": 2, "dp": 2, "ep": 4, "zero_stage": 3, "recompute": "full", "micro_batch_size": 2},
]
OF_FOUR: list[dict[str, Any]] = [
    {"cp": 4, "cp_kind": "allgather", "micro_batch_size": 4, "seq_len": 88},
    {"cp": 2, "cp_kind": "ring", "tp": 2, "micro_batch_size": 4, "recompute": "full"},
    {"cp": 2, "cp_kind": "allgather", "tp": 2, "sequence_parallel": False, "micro_batch_size": 4},
    {"cp": 2, "cp_kind": "ring", "tp": 2, "dp": 2, "zero_stage": 3, "micro_batch_size": 2},
    {"cp": 2, "cp_kind": "ring", "pp": 2, "pp_schedule": "gpipe", "micro_batch_size": 2},
]
"""With a quarter of the heads and groups on each rank."""


def _cases() -> list[Experiment]:
    cases = [(name, layout) for name in RECURRENT for layout in LAYOUTS]
    cases += [(name, layout) for name in RECURRENT if name.endswith("of_experts") for layout in OF_EXPERTS]
    cases += [(name, layout) for name in DIVIDED for layout in OF_FOUR]
    return [experiment(layers=name, **{**LONG, **layout}) for name, layout in cases]


CASES = _cases()


def kinds_of(case: Experiment) -> list[str]:
    return [case.model.name]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, len(RECURRENT), kinds=kinds_of), CASES))
def test_shared_sequences_equal_the_recurrence(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """What is computed; on gloo also what every rank sends, which is what the closed form says, to the byte."""
    check_on(request, backend, case, CLIP_AT)


COMPILED = [
    experiment(layers=name, **LONG, cp=2, cp_kind="allgather", micro_batch_size=4, compile="block")
    for name in ("mamba", "gated_delta", "kimi_delta")
]


@pytest.mark.exhaustive(seconds=40)
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.id)
def test_compiled_blocks(case: Experiment, gloo_pool: Pool) -> None:
    """Blocks are traced and differentiated ahead of time on both sides of exchange and recurrence."""
    check(gloo_pool, case, body=train_compiled_rank, clip_at=CLIP_AT, counts=True)
