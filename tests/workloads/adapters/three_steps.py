"""A few steps of an engine on CPU processes, or on GPUs: what tests compare between engines."""

from __future__ import annotations

from functools import partial

import torch

from workloads.adapters.seam import engine_of, set_environment
from workloads.contract.measure_spec import MeasureSpec
from workloads.measuring.processes import on_ranks
from workloads.rules.engine_support import refused
from workloads.spec.experiment import Experiment

Told = list[tuple[float, float | None]]
"""Loss and norm of each step."""


def run(experiment: Experiment) -> list[Told]:
    """Of every rank."""
    assert refused(experiment, "cpu") == []
    return on_ranks(partial(steps, experiment), experiment.world_size, "cpu", timeout_s=240)


def steps(experiment: Experiment, rank: int) -> Told:
    engine = engine_of(experiment, rank, torch.device("cpu"))
    engine.build()
    measured, _ = engine.measure(MeasureSpec(warmup_steps=1, timed_steps=2), lambda step, is_warmup: None, None)
    return [(step.loss, step.grad_norm) for step in measured.steps]


def steps_on_gpu(experiment: Experiment, rank: int) -> Told:
    """Four of them, with the variables that the engine asks for."""
    set_environment(experiment)
    torch.cuda.set_device(rank)
    engine = engine_of(experiment, rank, torch.device("cuda", rank))
    engine.build()
    measured, _ = engine.measure(MeasureSpec(warmup_steps=2, timed_steps=2), lambda step, is_warmup: None, None)
    return [(step.loss or 0.0, step.grad_norm) for step in measured.steps]
