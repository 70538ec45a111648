"""The closed form where routed experts decide the peak, against the real engine on FakeTensors: within 0.1 %."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.test_memory_traced import ROUTED, routed
from tests.workloads.costs.memory.traced import shortened, traced
from tests.workloads.costs.shapes import QWEN3_30B
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

pytestmark = pytest.mark.slow

QWEN = shortened(QWEN3_30B)
SHARED = shortened(ROUTED["shared, full"].model)


def again(model: ModelSpec, **fields: Any) -> Experiment:
    """Layers that compute everything again, with so many tokens that activations decide the peak."""
    formats = {"grad_reduce": "bf16", "optimizer_states": "bf16", "master_weights": "bf16"}
    return routed(model, micro_batch_size=16, recompute="full", **formats, **fields)


AGAIN = {
    "one rank": again(QWEN),
    "ep 2, ZeRO 2": again(QWEN, dp=2, zero_stage=2, ep=2),
    "etp 2": again(QWEN, tp=2, etp=2),
    "fp8": again(QWEN, precision="fp8_tensorwise"),
    "shared": again(SHARED),
    "shared, etp 2": again(SHARED, tp=2, etp=2),
}


@pytest.mark.parametrize("name", sampled(list(AGAIN), 2, seconds=3))
def test_second_forwards_end_at_the_traced_peak(name: str) -> None:
    """The outputs of the experts' last products exist beside the received gradients."""
    case = AGAIN[name]
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=0.001)
