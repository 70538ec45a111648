"""Draws bars that look alike and do not touch as one path: a renderer makes the pattern of a hatch anew for each path.

The pixels are the same as of separate paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.backend_bases import GraphicsContextBase
from matplotlib.path import Path
from matplotlib.transforms import IdentityTransform
from numpy.typing import NDArray

_MOST = 150
"""Largest number of bars of one path: Agg moves edges to whole pixels only in paths of up to 1,024 vertices."""
_CORNERS = 5


class Bars:
    """Rectangles that wait to be drawn into ``pixels``, a renderer of Agg.

    Anything else that is drawn must be preceded by `draw`, so that the order of what overlaps stays.
    """

    def __init__(self, pixels: Any) -> None:
        self._pixels = pixels
        self._look: tuple[Any, ...] | None = None
        self._gc: GraphicsContextBase | None = None
        self._face: Any = None
        self._corners: list[NDArray[np.float64]] = []
        self._boxes: list[NDArray[np.float64]] = []
        self._codes: NDArray[Any] = np.zeros(0, np.uint8)

    def take(self, gc: Any, path: Path, transform: Any, face: Any) -> bool:
        """Whether the path is a rectangle, which waits from now on; bars that it does not fit to are drawn first."""
        codes = np.zeros(0, np.uint8) if path.codes is None or face is None else np.asarray(path.codes)
        if len(codes) != _CORNERS or codes[-1] != Path.CLOSEPOLY:
            return False
        if gc.get_sketch_params() is not None or gc.get_clip_path()[0] is not None:
            return False
        corners = np.asarray(transform.transform(path.vertices))
        sides = np.abs(np.diff(corners, axis=0)).min(axis=1)
        if not np.isfinite(corners).all() or (sides > 1e-6).any():
            return False
        margin = gc.get_linewidth() + 2
        box = np.concatenate([corners.min(axis=0) - margin, corners.max(axis=0) + margin])
        look = _look(gc, face)
        if look != self._look or len(self._boxes) == _MOST or self._touches(box):
            self.draw()
            self._look, self._face, self._codes = look, face, codes
            self._gc = GraphicsContextBase()
            self._gc.copy_properties(gc)
        self._corners.append(corners)
        self._boxes.append(box)
        return True

    def draw(self) -> None:
        """Draw the bars that wait."""
        if not self._boxes:
            return
        path = Path(np.concatenate(self._corners), np.tile(self._codes, len(self._boxes)))
        self._pixels.draw_path(self._gc, path, IdentityTransform(), self._face)
        self._look, self._corners, self._boxes = None, [], []

    def _touches(self, box: NDArray[np.float64]) -> bool:
        others = np.array(self._boxes).reshape(-1, 4)
        apart = (others[:, :2] > box[2:]).any(axis=1) | (others[:, 2:] < box[:2]).any(axis=1)
        return not apart.all()


def _look(gc: Any, face: Any) -> tuple[Any, ...]:
    """Everything that a rectangle's pixels depend on except its shape."""
    offset, dashes = gc.get_dashes()
    clip, hatch = gc.get_clip_rectangle(), gc.get_hatch()
    return (
        *(tuple(face), tuple(gc.get_rgb()), gc.get_alpha(), gc.get_forced_alpha(), gc.get_linewidth()),
        *(gc.get_antialiased(), gc.get_capstyle(), gc.get_joinstyle(), gc.get_snap()),
        *(offset, None if dashes is None else tuple(dashes), None if clip is None else clip.bounds),
        *((hatch, tuple(gc.get_hatch_color()), gc.get_hatch_linewidth()) if hatch else ()),
    )
