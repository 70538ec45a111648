"""Converts layouts to numbers that measure how similar two of them are."""

from __future__ import annotations

import numpy as np

from sweep.searching.space import Floats, Texts
from workloads.predict.points import Points

LENGTHS = {"dp": 2.0, "tp": 1.2, "pp": 1.2, "vpp": 1.2, "cp": 1.2, "ep": 1.2, "mbs": 1.5}
"""Length scale per axis in doublings: layouts further apart hardly inform each other."""
ZERO, RECOMPUTE = 1.5, 1.0
"""Length scales in steps, for ZeRO stages and for none, selective and full recomputation."""
FAMILY_AXES = ("tp", "pp", "cp", "ep")


def layout_features(points: Points) -> Floats:
    """Features of points, in the form of `SearchSpace.layout`."""
    columns = [np.log2(getattr(points, name)) / length for name, length in LENGTHS.items()]
    return np.stack([*columns, points.zero / ZERO, points.recompute / RECOMPUTE], axis=1)


def families(points: Points) -> Texts:
    """Axes that a layout uses, such as ``tp+pp``; ``dp`` for data parallelism alone."""
    uses = np.stack([getattr(points, name) > 1 for name in FAMILY_AXES], axis=1)
    return np.array(["+".join(n for n, used in zip(FAMILY_AXES, row, strict=True) if used) or "dp" for row in uses])
