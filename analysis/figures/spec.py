"""What the report knows of one figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class FigureSpec:
    name: str
    """File name and anchor."""
    section: str
    """``best``, ``scaling``, ``why``, ``cost``, ``failed`` or ``trust``: the part of the report it stands in."""
    title: str
    caption: str
    draw: Callable[[pd.DataFrame], Figure]
    """Raises `analysis.figures.style.NothingToDraw` with the reason when the rows cannot make it."""
    data: Callable[[pd.DataFrame], pd.DataFrame]
    """What ``tables/<name>.csv`` holds of these rows."""
