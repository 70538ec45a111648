"""Memory of the fullest rank along one axis, and from one device to all axes: one panel per model, one bar per
value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures.memory_bars import draw_bars, handles, limits_of
from analysis.figures.spec import FigureSpec
from analysis.memory import axis_panels
from analysis.memory.axis_panels import Panel
from analysis.memory.families import AXES
from analysis.memory.peak_split import PREDICTED, UNSPLIT
from results.text.numbers import byte_unit, format_bytes, format_percent

_PANEL_IN = (3.4, 3.4)


def data(frame: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Bars of one axis of `AXES`, or of ``5d``, as in `analysis.memory.axis_panels.table`."""
    return axis_panels.table(_panels(frame, axis))


@style.styled
def draw(frame: pd.DataFrame, axis: str) -> Figure:
    """One panel per model (two for tensor parallelism), one bar per value of the axis."""
    panels = _panels(frame, axis)
    if not panels:
        raise style.NothingToDraw("no finished run's shape and layout are known")
    columns = 2 if any(panel.variant for panel in panels) else len(panels)
    lines = -(-len(panels) // columns)
    figure = style.new_figure(
        max(_PANEL_IN[0] * columns + 0.5, 6.8), (_PANEL_IN[1] if lines == 1 else 2.7) * lines + 1.4
    )
    axes = figure.subplots(lines, columns, squeeze=False)
    bars = [bar for panel in panels for bar in panel.bars]
    limits = limits_of(frame, bars)
    held_lines = max(1 + panel.held.count("\n") for panel in panels)
    unit, unit_name = byte_unit(max(bar.stack.total for bar in bars))
    for ax, panel in zip(axes.ravel(), panels, strict=False):
        draw_bars(ax, panel.bars, limits, unit)
        ax.set_title("\n".join(name for name in (panel.model, panel.variant) if name), pad=8 + 11 * held_lines)
        ax.annotate(
            panel.held,
            (0, 1),
            (0, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8,
            color="#444444",
        )
    for ax in axes[-1]:
        ax.set_xlabel(AXES[axis].label if axis in AXES else "Layout, each with all axes to its left")
    for ax in axes[:, 0]:
        ax.set_ylabel(f"Memory of the fullest rank, {unit_name}")
    style.bottom_legend(figure, handles(bars, limits, frame), _note(panels))
    return figure


def _panels(frame: pd.DataFrame, axis: str) -> list[Panel]:
    return axis_panels.along(frame, AXES[axis]) if axis in AXES else axis_panels.together(frame)


def _note(panels: Sequence[Panel]) -> str | None:
    """Note that no rows are shown; None if some are."""
    if all(panel.basis == axis_panels.CLOSED_FORM for panel in panels):
        return "Closed form: no rows differ only in this"
    return None


_HOW = (
    " Runs that differ in nothing else, those with the most values of the axis; full-colour bars are measured (grey: "
    "the whole peak of another engine), pale ones (narrow beside a measured one) the planner's closed form of the same "
    "layout in this project's engine. If "
    "no runs differ only in this, the closed form for the fastest run of each of the largest models with the axis "
    "changed."
)


def conclude(frame: pd.DataFrame, axis: str) -> str | None:
    """Sentence on the last panel's first and last bar, with their values and the source of the bytes."""
    panels = _panels(frame, axis)
    if not panels:
        return None
    panel = panels[-1]
    first, last = panel.bars[0], panel.bars[-1]
    change = last.stack.total / first.stack.total - 1
    sources = {bar.stack.source for bar in (first, last)}
    whose = (
        "measured"
        if sources <= {"measured", UNSPLIT}
        else "by the closed form"
        if sources == {PREDICTED}
        else "in part measured"
    )
    name = AXES[axis].name.replace("_", " ") if axis in AXES else ""
    values = [bar.label.replace("\n", " ") for bar in (first, last)]
    of = f"{panel.model}{f', {panel.variant}' if panel.variant else ''}"
    return (
        f"{of}: {name} {values[0]} → {values[1]} takes the fullest rank from {format_bytes(first.stack.total)} to "
        f"{format_bytes(last.stack.total)} ({'+' if change > 0 else '−' if change < 0 else '±'}"
        f"{format_percent(abs(change), 0)}, {whose}; n = {len(panel.bars)} bars)."
    ).replace(":  ", ": ")


def _spec(axis: str, title: str, caption: str) -> FigureSpec:
    """Figure of ``axis``, a name of `AXES` or `ALL_AXES`."""
    return FigureSpec(
        name=f"memory_{axis}" if axis == axis_panels.ALL_AXES else f"memory_by_{axis}",
        section="why",
        title=title,
        caption=caption,
        draw=partial(draw, axis=axis),
        data=partial(data, axis=axis),
        conclude=partial(conclude, axis=axis),
    )


FIGURES = (
    _spec(
        "seq_len",
        "Memory against sequence length",
        "Activations grow with the sequence, everything else stays." + _HOW,
    ),
    _spec(
        "recompute",
        "Memory against recomputation",
        "Selective recomputation recomputes norms, rotated queries and keys and the SwiGLU product; full "
        "recomputation keeps the input of each block only." + _HOW,
    ),
    _spec(
        "dp",
        "Memory against data parallelism",
        "More data-parallel ranks save memory only if ZeRO shards something over them." + _HOW,
    ),
    _spec(
        "zero",
        "Memory against ZeRO stage",
        "Stage 1 shards the optimizer's state over the data-parallel ranks, 2 the gradients too, 3 the parameters. The "
        "engine keeps master weights sharded from stage 1 on." + _HOW,
    ),
    _spec(
        "tp",
        "Memory against tensor parallelism, without and with sequence parallelism",
        "With it, the engine's default, activations between the tensor-parallel matrices are "
        "divided over the ranks as well." + _HOW,
    ),
    _spec(
        "cp",
        "Memory against context parallelism",
        "Context parallelism divides the tokens of each sequence, and so the activations. ZeRO shards over its ranks "
        "as well as over the data-parallel ones: the optimizer's state and the master weights shrink from stage 1 "
        "on, gradients from stage 2 on, parameters at stage 3. Without ZeRO only activations shrink." + _HOW,
    ),
    _spec(
        "pp",
        "Memory against pipeline parallelism",
        "A stage holds 1/p of the layers, but under 1F1B the first one holds p micro-batches at a time: parameters "
        "shrink, activations hardly do if there are enough micro-batches." + _HOW,
    ),
    _spec(
        axis_panels.ALL_AXES,
        "Memory from one device to all axes",
        "Each bar adds one axis to those on its left. The last is the finished run of the model with the most axes in "
        "use; axes that it lacks have degree 2 (ZeRO: stage 3). Full-colour bars are measured, pale ones (narrow "
        "beside a measured one) the planner's closed form. Totals are written on bars that are cut off.",
    ),
)
