"""Bars of one look as a single artist: matplotlib's ``bar`` makes, places and measures an artist for each.

The pixels are the same. In an SVG the bars of a series are one shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.path import Path
from numpy.typing import ArrayLike, NDArray

_CORNERS = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)], dtype=float)
"""Corners of a bar in the order of `Path.unit_rectangle`, as shares of its width and height."""
_MOST = 150
"""Largest number of bars of one series: Agg moves edges to whole pixels only in paths of up to 1,024 vertices."""
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


def upright(ax: Axes, places: ArrayLike, heights: ArrayLike, bottom: ArrayLike, width: ArrayLike, **look: Any) -> None:
    """Add bars to ``ax`` as its ``bar`` does; ``look`` has the properties of a patch."""
    centres, wide, low = (np.asarray(values, dtype=float) for values in (places, width, bottom))
    for series in _added(ax, [centres - wide / 2, low, wide, heights], look):
        series.sticky_edges.y.extend(series.boxes[:, 1])
    ax.autoscale(None)  # type: ignore[arg-type]


def lying(ax: Axes, places: ArrayLike, widths: ArrayLike, left: ArrayLike, height: ArrayLike, **look: Any) -> None:
    """Add bars to ``ax`` as its ``barh`` does; ``look`` has the properties of a patch."""
    centres, high, start = (np.asarray(values, dtype=float) for values in (places, height, left))
    for series in _added(ax, [start, centres - high / 2, widths, high], look):
        series.sticky_edges.x.extend(series.boxes[:, 0])
    ax.autoscale(None)  # type: ignore[arg-type]


def _added(ax: Axes, parts: list[Any], look: dict[str, Any]) -> list[BarSeries]:
    boxes = np.stack(np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in parts)), axis=1)
    added = [BarSeries(boxes[first : first + _MOST], **look) for first in range(0, len(boxes), _MOST)]
    for series in added:
        ax.add_artist(series)
        ax.update_datalim(series.corners()[(series.boxes[:, 2:] != 0).any(axis=1)].reshape(-1, 2))
    return added
