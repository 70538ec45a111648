"""The description of a figure for the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure

Section = Literal["best", "scaling", "why", "cost", "failed", "trust"]
"""Part of the report that shows a figure."""


@dataclass(frozen=True, slots=True)
class FigureSpec:
    name: str
    """File name and anchor."""
    section: Section
    title: str
    caption: str
    draw: Callable[[pd.DataFrame], Figure]
    """Draws the figure; raises `analysis.drawing.style.NothingToDraw` with the reason if the rows cannot make it."""
    data: Callable[[pd.DataFrame], pd.DataFrame]
    """Content of ``tables/<name>.csv`` for these rows."""
    conclude: Callable[[pd.DataFrame], str | None] = lambda frame: None
    """A sentence or two on these rows, with numbers and n, placed before the caption; None if nothing can be said."""
