"""Which products add weight gradients to sums over micro-batches (`workloads.engine.training.gradient_sums`). No torch
here."""

from __future__ import annotations

from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.mesh import expert_degrees

WITHOUT_SUMS_OF_EXPERTS = ("1", "2", "3", "4", "5")
"""Versions of this engine whose grouped products left their gradients to be added by FSDP."""


def experts_add(experiment: Experiment) -> bool:
    """Whether the grouped products of routed experts add to sums.

    With ZeRO 0 and 1 they do so where dense products do (``gradient_accumulation_fusion``). With ZeRO 2 and 3 they do
    where no two ranks share master weights of an expert, so that its gradients are whole on their rank in every
    micro-batch, unless backwards are split or blocks compiled.
    """
    e = experiment
    if e.engine != ENGINE or e.engine_version in WITHOUT_SUMS_OF_EXPERTS or e.model.moe is None:
        return False
    if e.zero_stage <= 1:
        return e.gradient_accumulation_fusion
    plain = e.compile == "none" and e.pp_schedule not in SPLIT_BACKWARD and e.num_microbatches > 1
    return plain and expert_degrees(e)[1] == 1
