"""What the report knows of one figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure

Section = Literal["best", "scaling", "why", "cost", "failed", "trust"]
"""The part of the report that a figure stands in."""


@dataclass(frozen=True, slots=True)
class FigureSpec:
    name: str
    """File name and anchor."""
    section: Section
    title: str
    caption: str
    draw: Callable[[pd.DataFrame], Figure]
    """Raises `analysis.figures.style.NothingToDraw` with the reason when the rows cannot make it."""
    data: Callable[[pd.DataFrame], pd.DataFrame]
    """What ``tables/<name>.csv`` holds of these rows."""
    conclude: Callable[[pd.DataFrame], str | None] = lambda frame: None
    """A sentence or two on what these rows show, with numbers and n, put before the caption; None where nothing can be
    said."""
