"""The device's update of a parameter: bytes at the pace of AdamW in fp32."""

from __future__ import annotations

import pytest

from tests.workloads.costs.shapes import H200, LLAMA_1B, LLAMA_8B, QWEN3_30B
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.time.step_times import StepTimes
from workloads.costs.time.update_pace import ADAFACTOR_ROW_S, paced_bytes, rows_of_operations_s
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import optimizer_of

BF16 = {"optimizer_states": "bf16", "master_weights": "bf16"}


@pytest.mark.parametrize(
    ("fields", "milliseconds"),
    [
        ({}, 10.18),
        ({"optimizer": "adafactor"}, 24.0e-9 * 1.2358e9),
        ({"master_weights": "bf16"}, 11.04),
        ({"optimizer_states": "bf16"}, 13.06),
        (BF16, 13.12),
    ],
    ids=str,
)
def test_measured_updates(fields: dict[str, str], milliseconds: float) -> None:
    """Of the 1.236 billion parameters of Llama 1B on one H200, to a byte a parameter."""
    found = paced_bytes(Experiment.canonical(model=LLAMA_8B, global_batch_size=1, **fields))
    assert found == pytest.approx(milliseconds / 10.18 * 40, abs=1)


def test_nothing_takes_less_than_its_bytes() -> None:
    for optimizer in ("adamw", "muon", "adafactor"):
        e = Experiment.canonical(model=LLAMA_8B, global_batch_size=1, optimizer=optimizer)
        assert paced_bytes(e) >= optimizer_of(e).traffic_bytes


def test_sgd_clips_in_its_own_pass_before_version_7() -> None:
    """50.3 and 46.3 ms of SGD and AdamW on one H200, DeepSeek-V2-Lite with 10 layers."""
    sgd = Experiment.canonical(model=LLAMA_8B, global_batch_size=1, optimizer="sgd")
    before = sgd.replace(engine_version="6")
    assert paced_bytes(before) / paced_bytes(sgd.replace(optimizer="adamw")) == pytest.approx(50.3 / 46.3, rel=0.02)
    assert paced_bytes(sgd) < paced_bytes(before)


def test_adafactor_has_a_row_of_operations_for_equal_matrices_of_a_layer() -> None:
    """Six of a dense layer (q, k, v, o, gate and up, down) and the tied embedding, on every rank, and seven of a layer
    of experts, whose router is one; AdamW has none."""
    dense = Experiment.canonical(model=LLAMA_1B, global_batch_size=2, optimizer="adafactor", dp_shard=2, zero_stage=3)
    assert rows_of_operations_s(dense, experiment_stages(dense)[0]) == pytest.approx((16 * 6 + 1) * ADAFACTOR_ROW_S)
    routed = dense.replace(model=QWEN3_30B, ep=2)
    assert rows_of_operations_s(routed, experiment_stages(routed)[0]) == pytest.approx((48 * 7 + 2) * ADAFACTOR_ROW_S)
    assert rows_of_operations_s(dense.replace(optimizer="adamw"), experiment_stages(dense)[0]) == 0


def test_a_step_has_them_once() -> None:
    """Per rank of two stages, half of what one rank has, and the embedding twice."""
    e = Experiment.canonical(model=LLAMA_1B, global_batch_size=2, optimizer="adafactor")
    halves = e.replace(pp=2, pp_schedule="1f1b")
    added = []
    for one in (e, halves):
        parts = StepTimes(H200).parts([one])
        seconds = [rows_of_operations_s(one, stage) for stage in experiment_stages(one)]
        assert float(parts.steps.optimizer_s[0]) > max(seconds)
        added.append(sum(seconds))
    assert added[1] == pytest.approx(added[0] + ADAFACTOR_ROW_S)
