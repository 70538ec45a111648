"""The page's part on several training engines: winners of each, and the layouts that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.drawing import style
from analysis.figures import engines_side_by_side
from analysis.page.export import FileTable
from analysis.page.render import PageTable, SideBySide
from analysis.rows import engines, labels
from analysis.rows.cohorts import engine_limits
from results.text.numbers import format_bytes, format_number, listed, plural

_MOST_LAYOUTS = 40
_NAME = "engines_side_by_side"


def side_by_side(attempts: pd.DataFrame, figures: Path, formats: tuple[str, ...]) -> SideBySide | None:
    """The page's part, with its figure drawn into ``figures``; None if no two engines share a layout or a model and
    size."""
    rows, best = engines.side_by_side(attempts), engines.winners(attempts)
    if rows.empty and best.empty:
        return None
    unit = labels.rate_unit(attempts)
    return SideBySide(
        _sentences(rows, best), _winners(best, unit), _layouts(rows, unit), _draw(rows, unit, figures, formats)
    )


def tables(attempts: pd.DataFrame) -> list[FileTable]:
    """Full tables ``engines`` and ``engine_winners``; an empty list if there is only one engine."""
    tables_by_name = [("engines", engines.side_by_side(attempts)), ("engine_winners", engines.winners(attempts))]
    return [FileTable(name, frame) for name, frame in tables_by_name if len(frame)]


def records(attempts: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The tables as records for ``report.json``; empty if there is only one engine."""
    return {table.name: [_plain(row) for row in labels.records(table.frame)] for table in tables(attempts)}


def _sentences(rows: pd.DataFrame, best: pd.DataFrame) -> list[str]:
    sentences = []
    names = list(dict.fromkeys([*rows["engine"], *best["engine"]]))
    if len(rows):
        count = int((rows["engine"] == rows["engine"].iloc[0]).sum())
        first = rows["ratio"].isna() & rows["loss_difference"].isna()
        finished = rows[rows["ratio"].notna()]
        limits = {name: engine_limits(rows[rows["engine"] == name]) for name in names}
        engine_names = listed([f"{name} {limits[name]}".strip() for name in names])
        sentences.append(f"{engine_names}: {plural(count, 'layout')} planned for more than one engine.")
        for name, run in finished.groupby("engine"):
            sentences.append(
                f"{name} runs at {run['ratio'].median():.2f} times the first engine's throughput (median of "
                f"{plural(len(run), 'layout')}, {run['ratio'].min():.2f} to {run['ratio'].max():.2f})."
            )
        apart = rows.loc[~first, "loss_difference"].dropna().astype(float)
        if len(apart):
            far = f"at most {apart.max():.1e} apart (relative)" if apart.max() else "equal"
            sentences.append(f"Losses of the first steps of {plural(len(apart), 'row')} are {far}.")
    cells = best.drop_duplicates(["cluster", "measurement_version", "workload", "world_size"])
    if len(cells):
        other = int((~cells["same"].astype(bool)).sum())
        sentences.append(
            f"The engines' winners differ in {other:,} of {plural(len(cells), 'model and size', 'models and sizes')}."
        )
    return sentences


def _winners(best: pd.DataFrame, unit: str) -> PageTable:
    header = ["Model", "Devices", "Engine", "Fastest layout", unit, "Peak memory", "Of", "Same winner"]
    cells = [
        [
            row["workload"],
            f"{int(row['world_size']):,}",
            f"{row['engine']} {row['engine_version']}",
            row["layout"],
            format_number(row["tokens_per_s_per_gpu"]),
            format_bytes(row["peak_allocated_bytes"]),
            f"{int(row['candidates']):,}",
            "yes" if row["same"] else "no",
        ]
        for row in labels.records(best)
    ]
    return PageTable(header, cells, len(cells), "Winner of each engine")


def _layouts(rows: pd.DataFrame, unit: str) -> PageTable:
    header = [
        "Model",
        "Devices",
        "Layout",
        "Engine",
        unit,
        "Relative to first",
        "Peak memory",
        "First loss",
        "Loss difference",
    ]
    cells = [
        [
            row["workload"],
            f"{int(row['world_size']):,}",
            row["layout"],
            f"{row['engine']} {row['engine_version']}",
            format_number(row["tokens_per_s_per_gpu"])
            if row["outcome"] == "ok"
            else labels.OUTCOME_NAMES.get(row["outcome"], row["outcome"]),
            "–" if pd.isna(row["ratio"]) else f"{row['ratio']:.3f}",
            format_bytes(row["peak_allocated_bytes"]),
            "–" if pd.isna(row["first_loss"]) else f"{row['first_loss']:.5f}",
            "–" if pd.isna(row["loss_difference"]) else f"{row['loss_difference']:.1e}",
        ]
        for row in labels.records(rows)
    ]
    return PageTable(header, cells[:_MOST_LAYOUTS], len(cells), "Layouts that several engines ran")


def _draw(rows: pd.DataFrame, unit: str, folder: Path, formats: tuple[str, ...]) -> tuple[str, ...]:
    kinds = [kind for kind in formats if kind in ("png", "svg")]
    if not kinds:
        return ()
    try:
        figure = engines_side_by_side.draw(rows, unit)
    except style.NothingToDraw:
        return ()
    with style.in_style():
        style.lay_out(figure)
        drawn = style.pictures(figure, set(kinds))
    for kind in kinds:
        (folder / f"{_NAME}.{kind}").write_bytes(drawn[kind])
    return tuple(f"{_NAME}.{kind}" for kind in kinds)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if pd.isna(value) else value for name, value in row.items()}
