"""Memory of one code base as learned from its rows: from what was reserved, and from which rows ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workloads.predict.fit import Fitted, fit
from workloads.predict.memory_terms import peaks, reserved
from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import Kernel, Residuals
from workloads.predict.time_terms import facts_of

KERNEL = Kernel(common=0.02, device=0.02, version=0.02, near=0.1, noise=0.1, reach=2.0)
FEW = 8
"""Rows below which nothing beside the closed form is learned."""
SPREAD = 0.08
"""Of a row's logarithm of reserved memory around the closed form."""
VERDICT_WEIGHT = 2.0
"""Of a row on the wrong side of the device's memory, beside one whose memory is known: what is asked is mostly whether
a layout fits."""


@dataclass(frozen=True, slots=True)
class LearnedMemory:
    fitted: Fitted
    residuals: Residuals | None

    def correction(self, points: Points) -> Floats:
        """Factor of what the closed form says."""
        return np.ones(len(points)) if self.residuals is None else np.exp(self.residuals.at(points)[0])


def learn_memory(
    points: Points,
    reserved_bytes: Floats,
    out_of_memory: Floats,
    own: Floats,
    profiles: Mapping[str, Profile],
    profile: Profile,
    parameters: Mapping[str, Parameter],
) -> LearnedMemory:
    """``reserved_bytes``, ``out_of_memory``: NaN where they are not known. ``own``: the rows of the code base.

    A row that ran shall not need more than the device has on its fullest stage, and one that ran out not less: on which
    side it is, is all that such a row says.
    """
    told = own & np.isfinite(reserved_bytes)
    ran, failed = own & (out_of_memory == 0), own & (out_of_memory == 1)
    rows = told | ran | failed
    part = points.take(rows)
    facts = facts_of(part, profiles)
    told, ran, failed = told[rows], ran[rows], failed[rows]
    target = np.concatenate([reserved_bytes[rows][told], np.ones(int(ran.sum() + failed.sum()))])
    weights = np.concatenate([np.ones(int(told.sum())), np.full(int(ran.sum() + failed.sum()), VERDICT_WEIGHT)])

    def model(p: Mapping[str, float]) -> Floats:
        first, fullest = peaks(part, facts, p)
        seen = reserved(first if profile.reserved_of == "first" else fullest, p)
        load = reserved(fullest, p) / part.capacity
        return np.concatenate([seen[told], np.maximum(1.0, load[ran]), np.minimum(1.0, load[failed])])

    fitted = fit(model, target, parameters, SPREAD, weights)
    if told.sum() < FEW:
        return LearnedMemory(fitted, None)
    left = np.log(reserved_bytes[rows][told] / model(fitted.values)[: int(told.sum())])
    return LearnedMemory(fitted, Residuals.learn(part.take(told), left, KERNEL))
