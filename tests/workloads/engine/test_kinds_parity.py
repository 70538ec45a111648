"""Layers that differ by kind compute what the reference does, in every layout that the engine takes, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.engine.kind_models import MODELS
from tests.workloads.engine.parity import check_on, experiment, on_backends
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
LAYOUTS: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"dp": 2, "zero_stage": 3, "recompute": "full", "micro_batch_size": 2},
    {"tp": 2, "micro_batch_size": 4},
    {"tp": 2, "sequence_parallel": False, "recompute": "rope+swiglu", "micro_batch_size": 4},
    {"pp": 2, "pp_schedule": "1f1b", "micro_batch_size": 2},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batch_size": 2, "tie": True},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "dp": 2, "zero_stage": 2, "micro_batch_size": 1},
    {"cp": 2, "cp_kind": "ulysses", "micro_batch_size": 4, "zero_stage": 1},
]
"""What every kind runs with."""
RINGS: list[dict[str, Any]] = [
    {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "seq_len": 20},
    {"cp": 3, "cp_kind": "allgather", "micro_batch_size": 4, "seq_len": 42, "zero_stage": 2},
    {"cp": 2, "cp_kind": "ring", "tp": 2, "micro_batch_size": 4, "seq_len": 20, "recompute": "full"},
]
"""With parts of at least 5 tokens, as many as the windows reach. Chunks and caps are not exchanged."""
WITHOUT_RINGS = ("chunked", "chunked_unevenly", "soft_cap", "weighted_inputs")
WITH_EXPERTS = (
    *("dense_between_experts", "gate_of_shared_experts", "weighted_inputs"),
    *("clamped_experts", "experts_of_squared_relu", "experts_of_gelu", "dense_beside_experts"),
    *("latent_experts", "latent_experts_with_gates"),
)
OF_EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "zero_stage": 1, "recompute": "experts", "routing": "learned", "micro_batch_size": 2},
    {"tp": 2, "etp": 2, "sequence_parallel": False, "recompute": "selective", "micro_batch_size": 4},
    {"dp": 2, "tp": 2, "ep": 4, "zero_stage": 3, "recompute": "full", "micro_batch_size": 2},
    {"dp": 2, "ep": 2, "zero_stage": 1, "gradient_accumulation_fusion": True, "micro_batch_size": 1},
    {"dp": 2, "ep": 2, "routing": "learned", "capacity_factor": 1.0, "micro_batch_size": 2},
]


def _layouts(name: str) -> list[dict[str, Any]]:
    """Without sequence parallelism experts must be divided as the rest is."""
    rings = [] if name in WITHOUT_RINGS else RINGS
    if name not in WITH_EXPERTS:
        return LAYOUTS + rings
    return rings + [layout for layout in LAYOUTS if layout.get("sequence_parallel", True)] + OF_EXPERTS


CASES: list[Experiment] = [experiment(layers=name, **layout) for name in MODELS for layout in _layouts(name)]


def kinds_of(case: Experiment) -> list[str]:
    return [case.model.name]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, len(MODELS) + 2, kinds=kinds_of), CASES))
def test_kinds_of_layers_equal_the_reference(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """What is computed; on gloo also what every rank sends, which is what the closed form says, to the byte."""
    check_on(request, backend, case, CLIP_AT)
