"""Every figure of the report, in the order of the questions it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from analysis.figures import all_runs, best_heatmaps, memory_stacks, outcomes, overhead, predicted


@dataclass(frozen=True, slots=True)
class FigureSpec:
    name: str
    """File name and anchor."""
    section: str
    """``best``, ``why``, ``failed`` or ``trust``: the part of the report it stands in."""
    title: str
    caption: str
    draw: Callable[[pd.DataFrame], Figure]
    """Raises `analysis.figures.style.NothingToDraw` with the reason when the rows cannot make it."""


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "best_configurations",
        "best",
        "Best configuration of each model and size",
        "Each cell is the configuration with the most tokens/s/GPU among those that finished: parallel degrees with "
        "ZeRO stage, and micro-batch × number of micro-batches. Grey cells have no finished run.",
        best_heatmaps.draw,
    ),
    FigureSpec(
        "all_runs",
        "best",
        "All runs",
        "One mark for each point, fastest first. Area: throughput relative to the best of the row. Grey markers: "
        "failures.",
        all_runs.draw,
    ),
    FigureSpec(
        "memory_by_category",
        "why",
        "Memory by category",
        "The fastest layouts of each model and size, fastest first: memory of the fullest rank at its peak.",
        memory_stacks.draw,
    ),
    FigureSpec(
        "outcomes",
        "failed",
        "Outcomes",
        "What became of the points; a retried point counts by its last attempt.",
        outcomes.draw,
    ),
    FigureSpec(
        "predicted_vs_found",
        "trust",
        "Prediction and finding",
        "The closed-form prediction made before the run against what the run showed; the band is ± 10 %.",
        predicted.draw,
    ),
    FigureSpec(
        "overhead",
        "trust",
        "Overhead",
        "Median wall time of a finished point by phase; white diamonds: the time lost between two points.",
        overhead.draw,
    ),
)
