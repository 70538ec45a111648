"""A recurrence of some of a rank's heads: those that it computes for all context-parallel ranks.

Parameters are passed whole, as every rank holds them, and the rank's rows of them are taken inside the recurrence. So
what is saved for the backward are the parameters themselves, and their gradients are whole, with zeros for the heads
of other ranks: the sum over data- and context-parallel ranks has every head's gradient once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workloads.engine.kind_ops.delta_steps import GatedDeltaStep, KimiDeltaStep
from workloads.engine.kind_ops.mamba_scan import MambaStep

AnyStep = GatedDeltaStep | KimiDeltaStep | MambaStep


@dataclass(frozen=True, slots=True)
class ShareOfHeads:
    """Share ``rank`` of ``ranks`` equal shares of the heads and groups, in their order. A
    `workloads.engine.kind_ops.segments.Step`."""

    whole: AnyStep
    """Of all heads, whose parameters are passed."""
    rank: int
    ranks: int

    @property
    def step(self) -> AnyStep:
        """The operation of the share's heads."""
        return _divided(self.whole, self.ranks)

    @property
    def chunk(self) -> int:
        return self.whole.chunk

    @property
    def outputs(self) -> int:
        return self.whole.outputs // self.ranks

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.step.start(like)

    def __call__(
        self, sequences: Sequence[Tensor], parameters: Sequence[Tensor], state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.step(sequences, self.own(parameters), state)

    def own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The share's rows of the parameters; one that all heads have alike is whole."""
        found = []
        for parameter, rows in zip(parameters, _rows(self.whole), strict=True):
            parts = [part.chunk(self.ranks)[self.rank] for part in parameter.split(rows)] if rows else [parameter]
            found.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        return found


def _divided(step: AnyStep, ranks: int) -> AnyStep:
    if isinstance(step, GatedDeltaStep):
        return replace(step, key_heads=step.key_heads // ranks, value_heads=step.value_heads // ranks)
    if isinstance(step, KimiDeltaStep):
        return replace(step, heads=step.heads // ranks)
    return replace(step, heads=step.heads // ranks, groups=step.groups // ranks)


def _rows(step: AnyStep) -> list[list[int]]:
    """Rows of the parts of each parameter that heads or groups divide; none of one that all heads have alike."""
    if isinstance(step, GatedDeltaStep):
        return [[step.keys, step.keys, step.outputs], [step.value_heads] * 2, []]
    if isinstance(step, KimiDeltaStep):
        return [[step.outputs] * 3, [step.outputs, step.heads], []]
    channels = [step.outputs, *[step.groups * step.state] * 2]
    return [channels, *([channels] if step.bias else []), [step.heads] * 3, [step.outputs]]
