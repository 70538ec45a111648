"""From layouts to the numbers by which a search tells how alike two of them are."""

from __future__ import annotations

import numpy as np

from sweep.searching.space import Floats, Texts
from workloads.predict.points import Points

LENGTHS = {"dp": 2.0, "tp": 1.2, "pp": 1.2, "vpp": 1.2, "cp": 1.2, "ep": 1.2, "mbs": 1.5}
"""Doublings of an axis over which two layouts stop being alike."""
ZERO, RECOMPUTE = 1.5, 1.0
"""The same for ZeRO's stages and for none, selective and full recomputation, in steps."""
FAMILY_AXES = ("tp", "pp", "cp", "ep")


def layout_features(points: Points) -> Floats:
    """`Space.layout` of points."""
    columns = [np.log2(getattr(points, name)) / length for name, length in LENGTHS.items()]
    return np.stack([*columns, points.zero / ZERO, points.recompute / RECOMPUTE], axis=1)


def families(points: Points) -> Texts:
    """Which axes a layout uses: ``tp+pp``; ``dp`` where it is data parallelism alone."""
    uses = np.stack([getattr(points, name) > 1 for name in FAMILY_AXES], axis=1)
    return np.array(["+".join(n for n, used in zip(FAMILY_AXES, row, strict=True) if used) or "dp" for row in uses])
