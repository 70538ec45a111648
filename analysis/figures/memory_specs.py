"""The figures of where memory goes."""

from __future__ import annotations

from analysis.figures.spec import FigureSpec

FIGURES: tuple[FigureSpec, ...] = ()
