"""Recurrent layers, which the engine computes in chunks, equal the recurrence of one token after the other in float64,
in every layout that the engine takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.engine.kind_models import RECURRENT
from tests.workloads.engine.parity import check_on, experiment, on_backends
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
NAMES = tuple(RECURRENT)
LONG = {"seq_len": 84}
"""Tokens in two chunks, of which the second is not full; with eight sequences these are also two segments."""
LAYOUTS: list[dict[str, Any]] = [
    {"recompute": "selective", "global_batch_size": 16, "micro_batch_size": 8},
    {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
    {"dp": 2, "zero_stage": 3, "recompute": "full", "micro_batch_size": 2},
    {"tp": 2, "micro_batch_size": 4},
    {"tp": 2, "recompute": "full", "micro_batch_size": 2},
    {"tp": 2, "sequence_parallel": False, "recompute": "selective", "micro_batch_size": 4},
    {"pp": 2, "pp_schedule": "1f1b", "micro_batch_size": 2},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batch_size": 2, "tie": True},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "dp": 2, "zero_stage": 2, "micro_batch_size": 1},
]


def _layouts(name: str) -> list[dict[str, Any]]:
    """Without sequence parallelism experts must be divided as the rest is."""
    layouts = [layout for layout in LAYOUTS if layout.get("sequence_parallel", True)]
    return [*layouts, *OF_EXPERTS] if name.endswith("of_experts") else LAYOUTS


OF_EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "zero_stage": 1, "recompute": "experts", "routing": "learned", "micro_batch_size": 2},
    {"tp": 2, "etp": 2, "sequence_parallel": False, "recompute": "selective", "micro_batch_size": 4},
]
CASES: list[Experiment] = [experiment(layers=name, **LONG, **layout) for name in NAMES for layout in _layouts(name)]


def kinds_of(case: Experiment) -> list[str]:
    return [case.model.name]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, len(NAMES) + 1, kinds=kinds_of), CASES))
def test_recurrent_layers_equal_the_recurrence(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """What is computed; on gloo also what every rank sends, which is what the closed form says, to the byte."""
    check_on(request, backend, case, CLIP_AT)
