"""Memory of one code base as learned from its rows: from reserved bytes, and from which rows ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workloads.predict.facts import facts_of
from workloads.predict.fit import Fitted, fit
from workloads.predict.memory_terms import peaks, reserved
from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import ResidualKernel, Residuals

KERNEL = ResidualKernel(common=0.02, device=0.02, version=0.02, near=0.1, noise=0.1, reach=2.0, structure=0.0)
FEW = 8
"""Number of rows below which only the closed form is fitted."""
SPREAD = 0.08
"""Standard deviation of a row's log(reserved memory) around the closed form."""
VERDICT_WEIGHT = 2.0
"""Weight of a row on the wrong side of the device's memory, compared with a row whose memory is known: the main
question is whether a layout fits."""


@dataclass(frozen=True, slots=True)
class LearnedMemory:
    fitted: Fitted
    residuals: Residuals | None

    def correction(self, points: Points) -> Floats:
        """Factor of the learned residuals on the closed form's bytes."""
        return np.ones(len(points)) if self.residuals is None else np.exp(self.residuals.at(points)[0])


def learn_memory(
    points: Points,
    reserved_bytes: Floats,
    out_of_memory: Floats,
    of_codebase: Floats,
    profiles: Mapping[str, Profile],
    profile: Profile,
    parameters: Mapping[str, Parameter],
) -> LearnedMemory:
    """Fits the memory form. ``reserved_bytes``, ``out_of_memory``: NaN if unknown. ``of_codebase``: mask of the
    code base's rows.

    A row that ran should not need more than the device has on its fullest stage, and a row that ran out not less. Such
    a row carries no other information.
    """
    with_bytes = of_codebase & np.isfinite(reserved_bytes)
    ran, failed = of_codebase & (out_of_memory == 0), of_codebase & (out_of_memory == 1)
    rows = with_bytes | ran | failed
    part = points.take(rows)
    facts = facts_of(part, profiles)
    with_bytes, ran, failed = with_bytes[rows], ran[rows], failed[rows]
    target = np.concatenate([reserved_bytes[rows][with_bytes], np.ones(int(ran.sum() + failed.sum()))])
    weights = np.concatenate([np.ones(int(with_bytes.sum())), np.full(int(ran.sum() + failed.sum()), VERDICT_WEIGHT)])

    def model(p: Mapping[str, float]) -> Floats:
        first, fullest = peaks(part, facts, p)
        seen = reserved(first if profile.reserved_of == "first" else fullest, p)
        load = reserved(fullest, p) / part.capacity
        return np.concatenate([seen[with_bytes], np.maximum(1.0, load[ran]), np.minimum(1.0, load[failed])])

    fitted = fit(model, target, parameters, SPREAD, weights)
    if with_bytes.sum() < FEW:
        return LearnedMemory(fitted, None)
    left = np.log(reserved_bytes[rows][with_bytes] / model(fitted.values)[: int(with_bytes.sum())])
    return LearnedMemory(fitted, Residuals.learn(part.take(with_bytes), left, KERNEL))
