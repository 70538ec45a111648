"""Labels beside points of a plot with logarithmic axes, placed where there is room; a label without room is left
out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge in inches from the corner of the axes."""
_MARGINS_IN = (1.0, 0.95)
"""Approximate width and height that tick labels, axis labels and a note take from a figure."""
_POINT_IN = 0.045
_STEPS = 12
_GAP_IN = 0.06
_SIZE = 8.0
_CHARACTER = 0.63
"""Width of a character over the font size."""


class Labels:
    """Labels for the points of ``ax``, in a figure of ``size_in`` inches; the limits of ``ax`` must be set already."""

    def __init__(self, ax: Axes, size_in: tuple[float, float]) -> None:
        self._ax = ax
        self._inches = [size - margin for size, margin in zip(size_in, _MARGINS_IN, strict=True)]
        self._limits = [[math.log(value) for value in limits] for limits in (ax.get_xlim(), ax.get_ylim())]
        self._taken: list[Box] = []

    def keep_clear(self, xs: Iterable[float], ys: Iterable[float]) -> None:
        """Keep labels off these points."""
        for x, y in zip(xs, ys, strict=True):
            across, up = self._place(x, y)
            self._taken.append((across - _POINT_IN, up - _POINT_IN, across + _POINT_IN, up + _POINT_IN))

    def keep_line_clear(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Keep labels off the line through these points."""
        for a, b, c, d in zip(xs, ys, xs[1:], ys[1:], strict=False):
            between = [k / _STEPS for k in range(1, _STEPS)]
            self.keep_clear([a ** (1 - t) * c**t for t in between], [b ** (1 - t) * d**t for t in between])

    def write(self, text: str, x: float, y: float, colour: str) -> bool:
        """Write ``text`` right of, left of, above or below the point; returns whether there was room."""
        across, up = self._place(x, y)
        width, height = _CHARACTER * _SIZE / 72 * len(text), 1.25 * _SIZE / 72
        for side, lift in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            at = (across + side * (_GAP_IN + width / 2), up + lift * (_GAP_IN + height / 2))
            box = (at[0] - width / 2, at[1] - height / 2, at[0] + width / 2, at[1] + height / 2)
            if self._is_free(box):
                self._taken.append(box)
                self._ax.annotate(
                    text,
                    (x, y),
                    (72 * (at[0] - across), 72 * (at[1] - up)),
                    textcoords="offset points",
                    ha="center",
                    va="center",
                    fontsize=_SIZE,
                    color=colour,
                )
                return True
        return False

    def _place(self, x: float, y: float) -> tuple[float, float]:
        position = [
            (math.log(value) - low) / (high - low) * inches
            for value, (low, high), inches in zip((x, y), self._limits, self._inches, strict=True)
        ]
        return position[0], position[1]

    def _is_free(self, box: Box) -> bool:
        inside = box[0] >= 0 and box[1] >= 0 and box[2] <= self._inches[0] and box[3] <= self._inches[1]
        return inside and not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in self._taken
        )
