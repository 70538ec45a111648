"""The pair of heatmaps: the fastest configuration of each model and number of devices, by utilization and by memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import labels, metrics
from analysis.figures import style

_CELL_IN = (1.62, 0.82)
_SIDE_BY_SIDE = 2
"""Up to so many columns the two heatmaps stand beside each other, else one above the other."""


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Fastest configuration by tokens/s/GPU in each cell, coloured by MFU (left) and by peak memory (right).

    Where no peak rate is known for the device, the left one is coloured by throughput instead. ``frame`` is labelled.
    """
    best = metrics.best_configurations(frame)
    counts = metrics.group_counts(frame)
    workloads, sizes = labels.workload_order(frame), labels.world_sizes(frame)
    if not workloads or not sizes:
        raise style.NothingToDraw("no row names its model and number of devices")
    if best.empty:
        raise style.NothingToDraw("no run has finished with a throughput")
    noun = labels.device_noun(frame)
    left = _by_mfu(best) if best[metrics.MFU].notna().any() else _by_throughput(best, labels.rate_unit(frame))
    stacked = len(sizes) > _SIDE_BY_SIDE
    rows, columns = (2, 1) if stacked else (1, 2)
    width = max(len(sizes) * _CELL_IN[0], 2.4) + 2.4
    height = max(len(workloads) * _CELL_IN[1], 1.6) + 1.0
    figure = style.new_figure(columns * width, rows * height)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, shown in zip(axes, (left, _by_memory(best)), strict=True):
        _heatmap(ax, best.assign(**shown["columns"]), counts, workloads, sizes, shown)
        ax.set_xlabel(f"Number of {noun}")
    return figure


def _by_mfu(best: pd.DataFrame) -> dict[str, Any]:
    value = 100 * best[metrics.MFU]
    text = [labels.percent(mfu) for mfu in best[metrics.MFU]]
    return {
        "columns": {"_value": value, "_text": text},
        "title": f"Fastest configuration: {metrics.MFU_NAME}",
        "label": f"{metrics.MFU_NAME}, % of peak",
        "colours": "viridis",
    }


def _by_throughput(best: pd.DataFrame, unit: str) -> dict[str, Any]:
    text = [labels.number(value) for value in best[metrics.RANK_BY]]
    return {
        "columns": {"_value": best[metrics.RANK_BY], "_text": text},
        "title": "Fastest configuration: throughput",
        "label": unit,
        "colours": "viridis",
    }


def _by_memory(best: pd.DataFrame) -> dict[str, Any]:
    text = [labels.gib(value) for value in best["peak_allocated_bytes"]]
    unit, name = labels.memory_unit(best["peak_allocated_bytes"].max())
    return {
        "columns": {"_value": best["peak_allocated_bytes"] / unit, "_text": text},
        "title": "Fastest configuration: peak memory",
        "label": f"Peak allocated memory, {name}",
        "colours": "YlOrBr",
    }


def _heatmap(
    ax: Axes, best: pd.DataFrame, counts: pd.DataFrame, workloads: list[str], sizes: list[int], shown: dict[str, Any]
) -> None:
    norm, colours = style.norm_of(best["_value"]), style.sequential(shown["colours"])
    cells = {(row["workload"], int(row["world_size"])): row for row in labels.records(best)}
    for y, workload in enumerate(workloads):
        for x, size in enumerate(sizes):
            row = cells.get((workload, size))
            if row is None:
                _empty_cell(ax, x, y, _why_empty(counts, workload, size))
                continue
            unknown = np.isnan(row["_value"])
            face = (0.93, 0.93, 0.93, 1.0) if unknown else colours(norm(row["_value"]))
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5))
            ink = style.ink_on(face)
            ax.text(x, y - 0.24, row["_text"], ha="center", va="center", color=ink, fontsize=11, fontweight="bold")
            ax.text(x, y + 0.05, row["degrees"], ha="center", va="center", color=ink, fontsize=8)
            ax.text(
                x,
                y + 0.28,
                row["batching"].replace(", ", "\n", 1),
                ha="center",
                va="center",
                color=ink,
                fontsize=7.5,
                linespacing=1.0,
            )
    ax.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(workloads) - 0.5, -0.5))
    ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    ax.set_yticks(range(len(workloads)), workloads)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(shown["title"])
    if best["_value"].notna().any():
        bar = ax.figure.colorbar(ScalarMappable(norm, colours), ax=ax, pad=0.01, aspect=25, fraction=0.05)
        bar.set_label(shown["label"])
        bar.outline.set_visible(False)


def _why_empty(counts: pd.DataFrame, workload: str, size: int) -> str:
    if (workload, size) not in counts.index:
        return "not run"
    row = counts.loc[[(workload, size)]].iloc[0]
    tried = int(row.sum())
    return f"none of {tried} fits" if row.get("oom", 0) == tried else f"none of {tried}\nfinished"


def _empty_cell(ax: Axes, x: int, y: int, text: str) -> None:
    ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="#f4f4f4", edgecolor="white", linewidth=1.5))
    ax.text(x, y, text, ha="center", va="center", color="#666666", fontsize=8, style="italic")
