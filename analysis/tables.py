"""The report's tables: as CSV files with full values, and as short rows for the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from analysis import labels, metrics
from analysis.cohorts import Cohort
from analysis.load import last_attempts
from results.schema import ATTEMPTS

_FIRST = ("method", "cluster", "measurement_version", "model", "seq_len", "world_size", "layout")
_RANKING = ("rank", "tokens_per_s_per_gpu", "mfu_palm", "peak_allocated_bytes", "repeats", "repeat_spread")
_SCALARS = tuple(
    field.name
    for field in ATTEMPTS
    if not pa.types.is_list(field.type) and field.name not in ("config_json", "evidence")
)
_MOST_FAILURES = 20


def write_csv(cohorts: Sequence[Cohort], folder: Path) -> list[Path]:
    """``ranked.csv``, ``best_configurations.csv``, ``outcomes.csv`` and ``failures.csv``, the method in every row."""
    tables: dict[str, list[pd.DataFrame]] = {"ranked": [], "best_configurations": [], "outcomes": [], "failures": []}
    for cohort in cohorts:
        ranked_columns = _ordered(*_FIRST, *_RANKING)
        tables["ranked"].append(metrics.ranked(cohort.frame)[ranked_columns])
        best = metrics.best_configurations(cohort.frame)
        tables["best_configurations"].append(best[[*ranked_columns, "candidates", "runner_up", "margin", "tie"]])
        final = last_attempts(cohort.frame)
        keys = ["method", "cluster", "model", "seq_len", "world_size", "outcome"]
        tables["outcomes"].append(final.groupby(keys, dropna=False).size().rename("points").reset_index())
        tables["failures"].append(final.loc[final["outcome"] != "ok", _ordered(*_FIRST, "outcome", "evidence")])
    paths = []
    for name, frames in tables.items():
        path = folder / f"{name}.csv"
        filled = [frame for frame in frames if len(frame)] or frames[:1]
        if filled:
            pd.concat(filled, ignore_index=True).to_csv(path, index=False)
            paths.append(path)
    return paths


def ranked_rows(frame: pd.DataFrame, most: int) -> tuple[list[str], list[list[str]], int]:
    """Header and text cells of the ranked table for the page, at most ``most`` rows, and how many there are in all."""
    rows = metrics.ranked(frame)
    noun, unit = labels.device_noun(frame), labels.rate_unit(frame)
    header = ["Rank", "Model", noun, "Layout", unit, metrics.MFU_NAME, "Step, s", "Spread", "Peak memory", "Losses"]
    cells = [
        [
            "–" if pd.isna(row["rank"]) else f"{int(row['rank'])}",
            row["workload"],
            f"{int(row['world_size']):,}",
            row["layout"],
            labels.number(row[metrics.RANK_BY]),
            labels.percent(row[metrics.MFU]),
            labels.number(row["step_time_s"]),
            labels.percent(row["step_time_max_s"] / row["step_time_min_s"] - 1),
            labels.gib(row["peak_allocated_bytes"]),
            _loss_word(row["loss_agrees"]),
        ]
        for row in labels.records(_fair_share(rows, most))
    ]
    return header, cells, len(rows)


def best_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[str]], int]:
    """Header and cells of the winners of every model and size."""
    best = metrics.best_configurations(frame)
    noun, unit = labels.device_noun(frame), labels.rate_unit(frame)
    header = ["Model", noun, "Fastest layout", unit, metrics.MFU_NAME, "Peak memory", "Of", "Runner-up", "Behind by"]
    cells = [
        [
            row["workload"],
            f"{int(row['world_size']):,}",
            row["layout"],
            labels.number(row[metrics.RANK_BY]),
            labels.percent(row[metrics.MFU]),
            labels.gib(row["peak_allocated_bytes"]),
            f"{int(row['candidates']):,}",
            row["runner_up"] if isinstance(row["runner_up"], str) else "–",
            labels.percent(row["margin"]) + (" (tie)" if row["tie"] else ""),
        ]
        for row in labels.records(labels.in_group_order(best))
    ]
    return header, cells, len(best)


def failure_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[str]], int]:
    """Header and cells of the failures that memory does not explain, and how many of those there are in all."""
    final = last_attempts(frame)
    odd = final[~final["outcome"].isin(["ok", "oom"])]
    header = ["Outcome", "Model", labels.device_noun(frame), "Layout", "Phase", "Rank", "Evidence"]
    cells = [
        [
            labels.OUTCOME_NAMES.get(row["outcome"], row["outcome"]),
            row["workload"],
            f"{int(row['world_size']):,}",
            row["layout"],
            row["phase"] if isinstance(row["phase"], str) else "–",
            "–" if pd.isna(row["failed_rank"]) else f"{int(row['failed_rank'])}",
            _first_line(row["evidence"]),
        ]
        for row in labels.records(odd.head(_MOST_FAILURES))
    ]
    return header, cells, len(odd)


def _ordered(*first: str) -> list[str]:
    """Every column of one value, those named coming first."""
    return [*first, *(name for name in _SCALARS if name not in first)]


def _fair_share(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """The best rows of every group alike, when there is no room for all."""
    if len(rows) <= most:
        return rows
    each = max(most // max(rows.groupby(metrics.GROUP).ngroups, 1), 1)
    return rows.groupby(metrics.GROUP, sort=False).head(each)


def _loss_word(agrees: Any) -> str:
    if agrees is None or pd.isna(agrees):
        return "–"
    return "agree" if agrees else "differ"


def _first_line(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        return "–"
    line = text.strip().splitlines()[0]
    return line if len(line) <= 160 else line[:159] + "…"
