"""Modules of multi-token prediction compute what the reference does, in every layout that the engine takes, in float64.

The reference follows arXiv:2412.19437, section 2.2. What every rank sends is counted and compared with the closed form.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.engine.parity import check_on, experiment, experts, on_backends
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
ROUTED = experts(balance="aux_loss", balance_coefficient=0.01)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"modules": 2, "recompute": "selective"},
    {"dp": 2, "zero_stage": 1},
    {"dp": 2, "zero_stage": 3, "recompute": "full", "modules": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "tie": True},
    {"tp": 2, "micro_batch_size": 4, "modules": 2},
    {"tp": 2, "sequence_parallel": False, "micro_batch_size": 4, "recompute": "norm+swiglu"},
    {"tp": 4, "zero_stage": 3, "micro_batch_size": 4, "tie": True},
    {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "modules": 2},
    {"cp": 2, "cp_kind": "allgather", "zero_stage": 2, "micro_batch_size": 4},
    {"cp": 2, "cp_kind": "ulysses", "tp": 2, "micro_batch_size": 4, "num_kv_heads": 4},
    {"pp": 2, "pp_schedule": "1f1b", "modules": 2},
    {"pp": 2, "pp_schedule": "1f1b", "tie": True, "dp": 2, "zero_stage": 3},
    {"pp": 2, "pp_schedule": "gpipe", "tp": 2, "recompute": "full"},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "recompute": "selective"},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "tie": True, "zero_stage": 2, "dp": 2},
    {"pp": 2, "pp_schedule": "interleaved_zero_bubble", "virtual_stages": 2, "tp": 2},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "dp": 2, "zero_stage": 2},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "tie": True},
    {"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 2, "modules": 2},
    {"pp": 4, "pp_schedule": "1f1b", "cp": 2, "cp_kind": "ring", "modules": 1},
    {"latent": 16, "tp": 2, "micro_batch_size": 4},
    {"latent": 16, "moe": ROUTED, "dp": 2, "ep": 2, "zero_stage": 1, "routing": "learned", "recompute": "experts"},
    {"moe": ROUTED, "dp": 2, "ep": 2, "zero_stage": 3, "recompute": "full", "modules": 2, "routing": "learned"},
    {"moe": ROUTED, "pp": 2, "pp_schedule": "1f1b", "dp": 2, "ep": 2, "routing": "learned"},
    {"moe": ROUTED, "tp": 2, "etp": 2, "micro_batch_size": 4, "recompute": "selective", "routing": "learned"},
    {"dp": 2, "zero_stage": 1, "gradient_accumulation_fusion": True, "micro_batch_size": 1},
    {"optimizer": "muon", "dp": 2, "zero_stage": 1, "micro_batch_size": 1},
    {"optimizer": "muon", "pp": 2, "pp_schedule": "1f1b", "tp": 2, "modules": 2},
    {"optimizer": "adafactor", "pp": 2, "pp_schedule": "1f1b", "dp": 2, "zero_stage": 1},
    {"optimizer": "sgd", "pp": 2, "pp_schedule": "1f1b", "tie": True},
    {"layers": "scaled_scores", "tp": 2, "micro_batch_size": 4},
    {"layers": "mamba", "dp": 2, "zero_stage": 3, "recompute": "full"},
    {"pp": 2, "pp_schedule": "1f1b", "pp_stages": "Ettttt|mL"},
    {"pp": 2, "pp_schedule": "1f1b", "pp_stages": "Ett|tttmmL", "modules": 2},
    {
        "cp": 2,
        "cp_kind": "allgather",
        "micro_batch_size": 4,
        "modules": 2,
    },
]
CASES: list[Experiment] = [experiment(**{"modules": 1, **layout}) for layout in LAYOUTS]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, len(CASES)), CASES))
def test_modules_equal_the_reference(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    check_on(request, backend, case, CLIP_AT)
