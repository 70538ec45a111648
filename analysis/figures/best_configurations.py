"""The pair of heatmaps: the best configuration of each model and number of devices, by utilization and by memory.

`draw` ranks by throughput, with a row per model shape; `draw_published` is the study's pair, ranked by its MFU under
the study's model labels.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures.configuration_heatmaps import draw_pair
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics, winners
from analysis.rows.frame_cache import cache_per_frame
from results.statistics import noise
from results.text.numbers import byte_unit, format_bytes, format_number, format_percent, listed

_MANY_WORKLOADS = 6
_MOST_WORKLOADS = 20
"""Largest number of models in a heatmap: those with the most finished layouts. A single layout is no winner."""
_COLUMNS = {
    "label": "model",
    "node_count": "nodes",
    "rank_by": "rank_by",
    "mfu_percent": "mfu_percent",
    "memory_gb": "memory_gb",
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "num_microbatches": "acc",
    "micro_batch_size": "mbs",
    "zero_stage": "zero",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
}
_BESIDE = (
    *(
        "world_size",
        "seq_len",
        "tokens_per_step",
        "layout",
        "candidates",
        "runner_up",
        "slower_by",
        "tie",
        "tied",
        "tied_layouts",
    ),
    *("tied_slower_by", *noise.COLUMNS),
    *("mfu_palm", "peak_allocated_bytes", "peak_reserved_bytes", "network_regime", "engine_version"),
    *("experiment_id", "attempt_id"),
)


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Both rankings, one row per winner; ``memory_gb`` is reserved memory in GiB, ``shape`` the model by its shape."""
    rows = pd.concat([winners.best_by(frame, rule) for rule in winners.RULES], ignore_index=True)
    beside = [name for name in _BESIDE if name in rows]
    return rows[[*_COLUMNS, "workload", *beside]].rename(columns=_COLUMNS | {"workload": "shape"})


def data_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `data` from the study's ranking."""
    rows = data(frame)
    return rows[rows["rank_by"] == "published_mfu"].reset_index(drop=True)


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Fastest configuration by tokens/s/GPU in each cell, coloured by MFU (left) and by peak memory (right).

    Each cell uses the batch that most of its layouts have. Colours start at 0. If no peak rate is known for the device,
    the left heatmap is coloured by throughput. ``frame`` is labelled.
    """
    best = _with_batch(metrics.best_configurations(frame))
    counts = metrics.group_counts(frame)
    workloads, sizes = labels.workload_order(frame), labels.world_sizes(frame)
    if len(workloads) > _MANY_WORKLOADS:  # then only models with something to show
        workloads = [name for name in workloads if (best["workload"] == name).any()] or workloads
    workloads, left_out = _shown_workloads(best, workloads)
    best = best[best["workload"].isin(workloads)]
    if not workloads or not sizes:
        raise style.NothingToDraw("no row names its model and number of devices")
    if best.empty:
        raise style.NothingToDraw("no run has finished with a throughput")
    left = _by_mfu(best) if best[metrics.MFU].notna().any() else _by_throughput(best, labels.rate_unit(frame))
    right = _by_memory(best, metrics.memory_column(frame), "Fastest")
    right["most"] = frame["device_memory_bytes"].max()
    figure = draw_pair(best, counts, (workloads, sizes), (left, right), labels.device_noun(frame))
    apart = "cells of one model with different tp are not comparable: rehearsed steps with tp are too short"
    _note(
        figure,
        [
            apart if "rehearsed" in set(frame["method"].unique()) and frame["tp"].nunique() > 1 else None,
            left_out,
            _batch_note(best),
            _tie_note(best),
        ],
    )
    if title := conclude(frame):
        figure.suptitle(title.removesuffix("."), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _with_batch(best: pd.DataFrame) -> pd.DataFrame:
    """Add a line with the tokens per step of each cell, if cells differ in it."""
    several = best["tokens_per_step"].nunique() > 1
    lines = [f"\n{int(tokens):,} tokens per step" if several else "" for tokens in best["tokens_per_step"]]
    return best.assign(batch=lines)


def _shown_workloads(best: pd.DataFrame, workloads: list[str]) -> tuple[list[str], str | None]:
    """At most `_MOST_WORKLOADS` of ``workloads``, and a note on those left out."""
    if len(workloads) <= _MOST_WORKLOADS:
        return workloads, None
    layouts = best.groupby("workload")["candidates"].sum()
    ordered = sorted(workloads, key=lambda name: -int(layouts.get(name, 0)))
    shown = set(ordered[:_MOST_WORKLOADS])
    note = f"{len(workloads) - len(shown)} more models, which have fewer finished layouts: see the table"
    return [name for name in workloads if name in shown], note


def _batch_note(best: pd.DataFrame) -> str:
    """Note on the batch of each cell."""
    batches = best["tokens_per_step"].unique()
    if len(batches) == 1:
        return f"All cells at {int(batches[0]):,} tokens per step, the batch of most layouts"
    return (
        "Each cell at the tokens per step that most of its layouts have: cells with different batches are not "
        "comparable"
    )


def conclude(frame: pd.DataFrame) -> str | None:
    """Up to which model data parallelism alone is fastest, otherwise how many winners use which axis.

    A winner with several axes counts for each, as on the page. Measured rows only; None with fewer than two cells of
    several devices.
    """
    best = metrics.best_configurations(frame)
    best = best[best["world_size"] > 1] if len(best) else best
    if len(best) < 2 or set(frame["method"].unique()) != {"measured"}:
        return None
    uses = pd.DataFrame({name: best[axis].fillna(1) > 1 for axis, name in _AXIS_NAMES.items()})
    pure = ~uses.any(axis=1)
    order = [name for name in labels.workload_order(best) if (best["workload"] == name).any()]
    alone = [bool(pure[best["workload"] == name].all()) for name in order]
    none = [not pure[best["workload"] == name].any() for name in order]
    up_to = sum(alone)
    divided = 0 < up_to < len(order) and all(alone[:up_to]) and all(none[up_to:])
    if divided:
        sentence, counted = f"{_ALONE} is fastest up to {order[up_to - 1]}", pure
        sentence += f" ({int(counted.sum())} of {len(best)} cells)"
    elif pure.sum() >= uses.sum().max():
        sentence, counted = f"{_ALONE} is fastest in {int(pure.sum())} of {len(best)} cells", pure
    else:
        counted = uses[uses.sum().idxmax()]
        sentence = f"{int(counted.sum())} of {len(best)} fastest configurations use {counted.name} parallelism"
    if not divided and counted.mean() < _MAJORITY:
        if counted is not pure:
            alone_in = int(pure.sum())
            return (
                f"{sentence}, {alone_in or 'none'} {'is' if alone_in == 1 else 'are'} {_ALONE[0].lower()}{_ALONE[1:]}."
            )
        count, second = int(uses.sum().max()), uses.sum().idxmax()
        return f"{sentence}, {count} {'uses' if count == 1 else 'use'} {second} parallelism."
    ties = int(best.loc[counted, "tie"].eq(True).sum())
    return sentence + (f", in {ties} of them tied with other layouts" if ties else "") + "."


_MAJORITY = 0.6
"""Share of cells below which the most frequent kind of winner is not enough, so the second kind is named too."""
_ALONE = "Data parallelism alone"
_AXIS_NAMES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}


@style.styled
def draw_published(frame: pd.DataFrame) -> Figure:
    """The study's pair: best configuration by its MFU (left) and the reserved memory of that configuration (right).

    The study's labels name the rows: a cell won by a run of another shape under the same label is marked.
    """
    best = winners.best_by(frame, "published_mfu")
    if best.empty:
        raise style.NothingToDraw("no finished run has an MFU as the study counts it")
    grouped = frame.assign(workload=labels.study_label(frame))
    other = best["workload"] != best["label"]
    shapes = listed(sorted(set(best.loc[other, "workload"])))
    best = best.assign(batch="", degrees=best["degrees"] + other.map({True: " †", False: ""}), workload=best["label"])
    left = {
        "columns": {"_value": best["mfu_percent"], "_text": [f"{value:.2f} %" for value in best["mfu_percent"]]},
        "title": "Best configuration by the study's MFU",
        "label": "MFU as in the study, %",
        "colours": "viridis",
    }
    right = _by_memory(best, "peak_reserved_bytes", "The same configuration")
    workloads, left_out = _shown_workloads(best, labels.workload_order(grouped))
    places = (workloads, labels.world_sizes(grouped))
    figure = draw_pair(best, metrics.group_counts(grouped), places, (left, right), labels.device_noun(frame))
    marked = f"† a different model from the rest of its row: {shapes}" if other.any() else None
    _note(figure, [marked, left_out, _tie_note(best)])
    return figure


def _note(figure: Figure, notes: list[str | None]) -> None:
    lines = [note for note in notes if note]
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=9, x=0.02, ha="left")


def _tie_note(best: pd.DataFrame) -> str | None:
    """Note on the mark of a tie, and on cells with unknown noise."""
    several = best["candidates"] > 1
    unknown = int((best["tie"].isna() & several).sum())
    notes = []
    if best["tie"].eq(True).any():
        notes.append("≈ 2 more: two other layouts are slower by no more than noise; the table names them")
    if unknown:
        where = "" if unknown == int(several.sum()) else f" in {unknown} of {int(several.sum())} cells"
        notes.append(f"noise not known{where}: without a spread of steps or repeats any lead may be chance")
    return "\n".join(notes) or None


def _by_mfu(best: pd.DataFrame) -> dict[str, Any]:
    value = 100 * best[metrics.MFU]
    text = [format_percent(mfu) for mfu in best[metrics.MFU]]
    return {
        "columns": {"_value": value, "_text": text},
        "title": f"Fastest configuration: {metrics.MFU_NAME}",
        "label": f"{metrics.MFU_NAME}, % of peak",
        "colours": "viridis",
    }


def _by_throughput(best: pd.DataFrame, unit: str) -> dict[str, Any]:
    text = [format_number(value) for value in best[metrics.RANK_BY]]
    return {
        "columns": {"_value": best[metrics.RANK_BY], "_text": text},
        "title": "Fastest configuration: throughput",
        "label": unit,
        "colours": "viridis",
    }


def _by_memory(best: pd.DataFrame, column: str, which: str) -> dict[str, Any]:
    unit, name = byte_unit(best[column].max())
    what = metrics.MEMORY_NAMES[column]
    return {
        "columns": {"_value": best[column] / unit, "_text": [format_bytes(value) for value in best[column]]},
        "title": f"{which} configuration: peak memory" if which == "Fastest" else f"{which}: {what}",
        "label": f"{what[0].upper()}{what[1:]}, {name}",
        "colours": "YlOrBr",
        "unit": unit,
    }


FIGURES = (
    FigureSpec(
        name="best_configurations",
        section="best",
        title="Best configuration of each model and size",
        caption=(
            "Each cell is the configuration with the most tokens/s/GPU among those that finished with the tokens a "
            "step that most of its layouts have: parallel degrees with ZeRO stage, and micro-batch × number of "
            "micro-batches. Colours start at 0. Repeats of a layout count once, by their "
            "median. ≈: other layouts are within its noise, so the winner is the set of them. Grey cells have no "
            f"finished run. {metrics.MFU_PEAKS}"
        ),
        draw=draw,
        data=data,
        conclude=conclude,
    ),
    FigureSpec(
        name="best_by_published_mfu",
        section="best",
        title="Best configuration as the Ultra-Scale Playbook ranks it",
        caption=(
            "The study's pair: best by its MFU, which counts tied embeddings twice if a pipeline splits them, "
            "and the reserved memory of that configuration. Models under the study's labels. Both rankings are in "
            "best_configurations.csv."
        ),
        draw=draw_published,
        data=data_published,
    ),
)
