"""The figures of why layouts differ, what they cost and how far to trust them."""

from __future__ import annotations

from analysis.figures.spec import FigureSpec

FIGURES: tuple[FigureSpec, ...] = ()
