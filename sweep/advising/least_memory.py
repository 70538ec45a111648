"""The layout that needs least memory, for a number of devices on which nothing fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sweep.advising.axes import KINDS
from sweep.advising.floor import floor_of
from sweep.advising.ranked import Peak
from sweep.advising.space import LayoutSpace, is_v_shaped
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import Experiment

_ASKED_OF = 64
"""Number of rows with the lowest bounds whose exact memory is computed."""


def smallest(
    space: LayoutSpace, size: int, peak: Callable[[Experiment], Peak | None]
) -> tuple[Experiment, Peak] | None:
    """The layout with the lowest memory on ``size`` devices, of those with the lowest bounds; None: there are no
    layouts. ``peak``: the exact memory of a layout; None where it is unknown."""
    of_size = np.flatnonzero(space.size == size)
    floor = floor_of(space).piped[of_size]
    best: tuple[Experiment, Peak] | None = None
    for place in np.argsort(floor, axis=None)[:_ASKED_OF]:
        row, kind = divmod(int(place), len(KINDS))
        for group in space.groups:
            if group.recompute != KINDS[kind] or group.every > 1 or is_v_shaped(group.schedule):
                continue
            one = space.layout(int(of_size[row]), group)
            if one is None or not space.meets(one) or violations(one, space.question.cluster):
                continue
            memory = peak(one)
            if memory is not None and (best is None or memory.peak_bytes < best[1].peak_bytes):
                best = one, memory
    return best
