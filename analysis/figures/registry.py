"""Every figure of the report, in the order of the questions that it answers on the page.

How to add a figure
-------------------
A figure is one file of this folder. Its name is the figure's name, or what several figures share that are made of the
same rows (`scaling`, `cost`). The file has three parts:

1. ``data(frame)`` gives the table behind the figure, which the report writes as ``tables/<name>.csv``. The frame holds
   the attempts of one cohort (`analysis.rows.cohorts`): rows that may be compared, with the columns of
   `results.tables.schema` and those of `analysis.rows.labels.add_labels`. Start from
   `analysis.rows.metrics.ranked` (finished runs, repeats counted once) or `analysis.rows.load.last_attempts` (every
   point, failed ones too). What is unknown stays null. Without rows it gives an empty table with all its columns.
   `analysis.rows.frame_cache.cache_per_frame`
   keeps the result for ``draw``. What claims or other figures need as well belongs in `analysis.rows`.
2. ``draw(frame)`` draws that table with `analysis.drawing.style.new_figure`, decorated with
   `analysis.drawing.style.styled`. It raises `analysis.drawing.style.NothingToDraw` with a short reason when the rows
   cannot make the figure; the page then shows the reason. A legend goes below the axes (`style.bottom_legend`). Colours
   and hatches come from `analysis.drawing.style`, so that the figure can be read in grey too. Every axis has its unit.
3. ``FIGURE = FigureSpec(...)`` describes it: name, section of the page, title, and a caption that says what is shown,
   what was left out and what not to conclude.

Then put it into `FIGURES` below, give it a row in the table of ``docs/report.md``, and test its table on rows written
by hand (``tests/analysis``).
"""

from __future__ import annotations

from analysis.figures import (
    all_runs,
    bandwidth,
    best_configurations,
    breakdown,
    breakdown_by_kind,
    bubble,
    cost,
    drift,
    effects,
    efficiency,
    failures_by_phase,
    memory_by_axis,
    memory_by_category,
    memory_timeline,
    outcomes,
    overhead,
    parallel_coordinates,
    pareto,
    predicted_vs_found,
    prediction_depths,
    scaling,
    schedules,
)
from analysis.figures.spec import FigureSpec

FIGURES: tuple[FigureSpec, ...] = (
    *best_configurations.FIGURES,
    all_runs.FIGURE,
    parallel_coordinates.FIGURE,
    *scaling.FIGURES,
    bubble.FIGURE,
    bandwidth.FIGURE,
    memory_by_category.FIGURE,
    outcomes.FIGURE,
    predicted_vs_found.FIGURE,
    prediction_depths.FIGURE,
    overhead.FIGURE,
    memory_timeline.FIGURE,
    *memory_by_axis.FIGURES,
    pareto.FIGURE,
    *breakdown.FIGURES,
    breakdown_by_kind.FIGURE,
    schedules.FIGURE,
    effects.FIGURE,
    efficiency.FIGURE,
    *cost.FIGURES,
    failures_by_phase.FIGURE,
    drift.FIGURE,
)


def priced(price: float | None) -> tuple[FigureSpec, ...]:
    """`FIGURES` with prices in those of cost; ``price`` is that of one device-hour in any currency."""
    of_cost = {spec.name: spec for spec in cost.figures(price)}
    return tuple(of_cost.get(spec.name, spec) for spec in FIGURES)
