"""What memory copies beside the messages of data parallelism, by hand: weights as they are gathered, gradients that
nothing scatters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.costs.shapes import H200, LLAMA_8B, QWEN3_30B
from workloads.costs.shape.params import num_params
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.shape.weight_sums import added_bytes
from workloads.costs.time.step_bounds import updates_s
from workloads.costs.time.step_times import StepTimes
from workloads.spec.experiment import Experiment

NUMBERS, MEMORY = num_params(LLAMA_8B), H200.device.memory_bandwidth
assert MEMORY is not None


def case(**fields: Any) -> Experiment:
    usual: dict[str, Any] = {"model": LLAMA_8B, "seq_len": 4096, "gradient_accumulation_fusion": False}
    return Experiment.canonical(**{**usual, "global_batch_size": 8, **fields})


def parts(**fields: Any) -> tuple[float, float, float]:
    """Seconds of (forward, backward) of one micro-batch, and of what memory does once a step."""
    found = StepTimes(H200).parts([case(**fields)])
    return float(found.times.forward_s[0]), float(found.times.backward_s[0]), float(updates_s(found.steps)[0])


def bytes_of(seconds: float) -> float:
    return seconds * MEMORY / NUMBERS


def test_gathered_weights_are_copied_in_every_pass_of_zero_3_and_else_once_a_step() -> None:
    """A rank of eight casts an eighth from 4 bytes to 2, and reads and writes the whole message of 2 bytes. AdamW moves
    40 bytes of its eighth."""
    once, always = parts(dp=8, zero_stage=2), parts(dp=8, zero_stage=3)
    copied = 6 / 8 + 4
    assert bytes_of(always[0] - once[0]) == pytest.approx(copied, rel=1e-4)
    assert bytes_of(always[1] - once[1]) == pytest.approx(copied, rel=1e-4)
    assert bytes_of(once[2]) == pytest.approx(40 / 8 + copied, rel=1e-4)
    assert bytes_of(always[2]) == pytest.approx(40 / 8, rel=1e-4)


def test_weights_in_fp8_are_read_once_more_for_their_scales() -> None:
    """Of an eighth 4 bytes are read for the scales, 4 read and 1 written; of the message 1 byte is read and written."""
    once, always = (parts(dp=8, zero_stage=zero, precision="fp8_tensorwise") for zero in (2, 3))
    assert bytes_of(always[0] - once[0]) == pytest.approx(9 / 8 + 2, rel=1e-4)


def test_gradients_that_nothing_scatters_are_divided_and_copied() -> None:
    """Two operations read and write 4 bytes each, or 2 with reductions in bf16; none where products add to the sums
    themselves, which are then reduced as they are."""
    usual = 40 + 6 + 4
    assert bytes_of(parts()[2]) == pytest.approx(usual + 16, rel=1e-4)
    assert bytes_of(parts(grad_reduce="bf16")[2]) == pytest.approx(usual + 8, rel=1e-4)
    assert bytes_of(parts(gradient_accumulation_fusion=True)[2]) == pytest.approx(usual, rel=1e-4)


def test_grouped_products_add_to_sums_as_dense_ones_do() -> None:
    """In each micro-batch 6 bytes of an expert's weight are moved, and as many as `added_bytes` says by version 5,
    where its gradient was added apart."""
    layout: dict[str, Any] = {"model": QWEN3_30B, "ep": 8, "dp": 8, "gradient_accumulation_fusion": True}
    layout |= {"global_batch_size": 16}
    now, before = (parts(engine_version=version, **layout)[1] for version in ("6", "5"))
    experts = experiment_stages(case(**layout))[0].layers.experts // 8
    assert (before - now) * MEMORY == pytest.approx((added_bytes(2, 4)[1] - 6) * experts, rel=1e-4)
