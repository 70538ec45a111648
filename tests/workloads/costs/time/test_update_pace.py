"""The device's update of a parameter: bytes at the pace of AdamW in fp32."""

from __future__ import annotations

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.time.update_pace import paced_bytes
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import optimizer_of

BF16 = {"optimizer_states": "bf16", "master_weights": "bf16"}


@pytest.mark.parametrize(
    ("fields", "milliseconds"),
    [
        ({}, 10.18),
        ({"optimizer": "adafactor"}, 38.43),
        ({"master_weights": "bf16"}, 11.04),
        ({"optimizer_states": "bf16"}, 13.06),
        (BF16, 13.12),
    ],
    ids=str,
)
def test_measured_updates(fields: dict[str, str], milliseconds: float) -> None:
    """Of the 1.236 billion parameters of Llama 1B on one H200, to a byte a parameter."""
    found = paced_bytes(optimizer_of(Experiment.canonical(model=LLAMA_8B, global_batch_size=1, **fields)))
    assert found == pytest.approx(milliseconds / 10.18 * 40, abs=1)


def test_nothing_takes_less_than_its_bytes() -> None:
    for optimizer in ("adamw", "muon", "sgd", "adafactor"):
        spec = optimizer_of(Experiment.canonical(model=LLAMA_8B, global_batch_size=1, optimizer=optimizer))
        assert paced_bytes(spec) >= spec.traffic_bytes
