"""Peaks in closed form beside those traced, for layouts that peak where activations are few: at reductions and gathers.

Weights are not tied: on FakeTensors autograd does not add the two gradients of one weight in place, as it does on a
device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.shapes import WIDE
from tests.workloads.engine.test_memory import alone, total
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of

LAYOUTS: list[dict[str, Any]] = [
    {"vocab_size": 32768, "dp": 2, "pp": 2, "zero_stage": 3, "rounds": 4, "recompute": "full"},
    {"vocab_size": 32768, "dp": 2, "zero_stage": 1, "rounds": 3},
    {"vocab_size": 32768, "dp": 2, "pp": 2, "zero_stage": 3, "rounds": 2},
    {"seq_len": 128, "dp": 4, "zero_stage": 1, "rounds": 3, "recompute": "full"},
    {"seq_len": 128, "cp": 2, "rounds": 3, "recompute": "full"},
    {"seq_len": 128, "dp": 2, "rounds": 4, "recompute": "selective", "recompute_every": 2},
    {"pp": 2, "rounds": 4, "pp_schedule": "zero_bubble_v", "recompute": "selective", "precision": "fp8_blockwise"},
]


def _case(vocab_size: int = 1024, rounds: int = 1, seq_len: int = 512, **layout: Any) -> Experiment:
    model = dataclasses.replace(WIDE, vocab_size=vocab_size)
    sequences = 2 * layout.get("dp", 1) * rounds
    return Experiment.canonical(model=model, seq_len=seq_len, micro_batch_size=2, global_batch_size=sequences, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 1, seconds=8), ids=str)
def test_predicted_peaks_are_the_traced_ones(layout: dict[str, Any]) -> None:
    case = _case(**layout)
    predicted = estimate_memory(case)
    for rank, stage in enumerate(predicted.stages):
        traced = alone(case, rank_of(case, pp=rank), fake=True)
        assert stage.peak_bytes == pytest.approx(total(traced), rel=0.005)
