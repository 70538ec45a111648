"""The bars of a drawn figure, for tests of what they show."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from analysis.drawing.bar_series import BarSeries


def bars_of(ax: Axes) -> list[tuple[NDArray[np.float64], Any]]:
    """The boxes [bars, 4] (x, y, width, height) and the colour of each series of bars."""
    return [(series.boxes, series.get_facecolor()) for series in ax.patches if isinstance(series, BarSeries)]


def boxes(ax: Axes) -> NDArray[np.float64]:
    """The boxes of all series."""
    return np.concatenate([of_series for of_series, _ in bars_of(ax)])
