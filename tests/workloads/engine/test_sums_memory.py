"""Peaks in closed form beside traced ones where ZeRO 2 and 3 reduce the sums that products make: within 0.1 %."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.engine.test_kinds_memory import wide_case
from tests.workloads.engine.test_memory import alone, total
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.mesh import rank_of

ADDED: list[dict[str, Any]] = [
    {"zero_stage": zero, **more}
    for zero in (2, 3)
    for more in (
        {"rounds": 3},
        {"rounds": 3, "recompute": "full"},
        {"rounds": 1, "recompute": "selective"},
        {"rounds": 4, "pp": 2},
        *(
            {"rounds": 4, "pp": 2, "pp_schedule": schedule, "virtual_stages": 2}
            for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v")
        ),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled([(name, layout) for name in ("windows", "biases", "one_part") for layout in ADDED], 1, seconds=5),
    ids=str,
)
def test_sums_of_every_micro_batch_are_in_the_peak(name: str, layout: dict[str, Any]) -> None:
    """Of the last reduction the sums that it reads exist, and the shards that it has added to earlier ones."""
    case = wide_case(name, dp=2, gradient_accumulation_fusion=True, **layout)
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = total(alone(case, rank_of(case, pp=rank), fake=True))
        assert abs(stage.peak_bytes / traced - 1) < 0.001
