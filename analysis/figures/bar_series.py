"""Bars of one look as a single artist: matplotlib's ``bar`` makes, places and measures an artist for each.

The pixels are the same, and a bar stays a shape of its own in an SVG.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import allow_rasterization
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.path import Path
from numpy.typing import ArrayLike, NDArray

_CORNERS = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)], dtype=float)
"""Corners of a bar in the order of `Path.unit_rectangle`, as shares of its width and height."""
_CODES = np.array([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], dtype=np.uint8)


class BarSeries(Patch):
    """Rectangles in data coordinates; ``boxes`` [bars, 4] holds the x, y, width and height of each."""

    def __init__(self, boxes: NDArray[np.float64], **look: Any) -> None:
        super().__init__(**look)
        self.boxes = boxes

    def corners(self) -> NDArray[np.float64]:
        """Corners [bars, 5, 2] of each bar, the first one twice."""
        return self.boxes[:, None, :2] + _CORNERS * self.boxes[:, None, 2:]

    def get_path(self) -> Path:
        return Path(self.corners().reshape(-1, 2), np.tile(_CODES, len(self.boxes)))

    @allow_rasterization  # type: ignore[untyped-decorator]
    def draw(self, renderer: Any) -> None:
        if not self.get_visible():
            return
        transform = self.get_transform()
        affine = transform.get_affine()
        corners = np.asarray(transform.transform_non_affine(self.corners().reshape(-1, 2)))
        face: Any = self.get_facecolor()
        face = face if face[3] else None
        paths = [Path(bar, _CODES) for bar in corners.reshape(-1, *_CORNERS.shape)]
        drawn = [(path, affine, face) for path in paths]
        self._draw_paths_with_artist_properties(renderer, drawn)  # type: ignore[attr-defined]
        self.stale = False


def upright(ax: Axes, places: ArrayLike, heights: ArrayLike, bottom: ArrayLike, width: ArrayLike, **look: Any) -> None:
    """Add bars to ``ax`` as its ``bar`` does; ``look`` has the properties of a patch."""
    centres, wide, low = (np.asarray(values, dtype=float) for values in (places, width, bottom))
    series = _added(ax, [centres - wide / 2, low, wide, heights], look)
    series.sticky_edges.y.extend(series.boxes[:, 1])
    ax.autoscale(None)  # type: ignore[arg-type]


def lying(ax: Axes, places: ArrayLike, widths: ArrayLike, left: ArrayLike, height: ArrayLike, **look: Any) -> None:
    """Add bars to ``ax`` as its ``barh`` does; ``look`` has the properties of a patch."""
    centres, high, start = (np.asarray(values, dtype=float) for values in (places, height, left))
    series = _added(ax, [start, centres - high / 2, widths, high], look)
    series.sticky_edges.x.extend(series.boxes[:, 0])
    ax.autoscale(None)  # type: ignore[arg-type]


def _added(ax: Axes, parts: list[Any], look: dict[str, Any]) -> BarSeries:
    boxes = np.stack(np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in parts)), axis=1)
    series = BarSeries(boxes, **look)
    ax.add_artist(series)
    seen = series.corners()[(boxes[:, 2:] != 0).any(axis=1)].reshape(-1, 2)
    ax.update_datalim(seen)
    return series
