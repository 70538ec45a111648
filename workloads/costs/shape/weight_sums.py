"""Which products add weight gradients to sums over micro-batches (`workloads.engine.training.gradient_sums`). No torch
here."""

from __future__ import annotations

from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.engine_versions import can_fuse
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.mesh import expert_degrees

WITHOUT_SUMS_OF_EXPERTS = ("1", "2", "3", "4", "5")
"""Versions of this engine whose grouped products left their gradients to be added by FSDP."""
SLOWED_DENSE = 2.0
"""How much longer than memory needs adding a bf16 gradient to an fp32 sum takes: 1.9 to 2.8 TB/s of 4.8 on one H200,
torch 2.11, weights of Llama 1B and 8B after their product of 256 to 8,192 tokens (docs/performance.md)."""
SLOWED_EXPERTS = 1.6
"""The same of the gradients of a layer's experts in one tensor: 3.0 TB/s (same page, the table of experts)."""

SAVED_WITH_SHARDS = 9
"""Bytes that memory could move in the time that one element's gradient takes less when products write what ZeRO 2 and 3
reduce, than when FSDP copies it: 8.3 to 9.6 in four pairs of runs on one H200 (docs/performance.md, ZeRO 2 and 3)."""


def experts_add(experiment: Experiment) -> bool:
    """Whether the grouped products of routed experts add to sums.

    With ZeRO 0 and 1 they do so where dense products do (``gradient_accumulation_fusion``). With ZeRO 2 and 3 they do
    where no two ranks share master weights of an expert, so that its gradients are whole on their rank in every
    micro-batch, unless backwards are split or blocks compiled. Before version 7 a step of one micro-batch had no sums.
    """
    e = experiment
    if e.engine != ENGINE or e.engine_version in WITHOUT_SUMS_OF_EXPERTS or e.model.moe is None:
        return False
    if e.zero_stage <= 1:
        return e.gradient_accumulation_fusion
    adds = can_fuse(engine=e.engine, version=e.engine_version, num_microbatches=e.num_microbatches)
    return adds and e.compile == "none" and e.pp_schedule not in SPLIT_BACKWARD and expert_degrees(e)[1] == 1


def added_bytes(c: int, r: int, *, only: bool = False) -> tuple[int, int]:
    """Bytes that memory could move while one element's gradient is added to its sum by an operation of its own: (of a
    dense weight, of an expert's). ``c``: bytes of the gradient, ``r``: of the sum. ``only``: the gradient of the only
    micro-batch becomes the sum, by a cast unless it is one.

    It reads both and writes the sum. Where their formats differ, torch's kernel converts each element and is slower
    than memory (`SLOWED_DENSE`, `SLOWED_EXPERTS`).
    """
    moved = c + r if only else c + 2 * r
    if c == r:
        return (0, 0) if only else (moved, moved)
    return round(SLOWED_DENSE * moved), round(SLOWED_EXPERTS * moved)
