"""The report's tables: all rows for the files, and short ones for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from analysis.page.draw_figures import Drawn
from analysis.page.export import FileTable
from analysis.rows import labels, metrics
from analysis.rows.cohorts import Cohort
from analysis.rows.load import decided
from results.statistics import noise
from results.tables.schema import ATTEMPTS
from results.text.numbers import format_bytes, format_number, format_percent

_FIRST = ("method", "cluster", "measurement_version", "workload", "model", "seq_len", "world_size", "layout")
_READ_FIRST = ("method", "cluster", "model", "seq_len", "world_size", "layout")
_RANKING = (
    *("rank", "tokens_per_s_per_gpu", "mfu_palm", "peak_allocated_bytes", "repeats", "repeat_spread"),
    *("noise", "noise_from"),
)
_SCALARS = tuple(
    field.name
    for field in ATTEMPTS
    if not pa.types.is_list(field.type) and field.name not in ("config_json", "evidence")
)
_COHORT = ("method", "cluster", "engine", "measurement_version")
_MOST_FAILURES = 20


def all_tables(
    cohorts: Sequence[Cohort], drawn: Sequence[Sequence[Drawn]], claims: pd.DataFrame
) -> Iterator[FileTable]:
    """``claims``, ``ranked``, ``failures`` and the values of every figure, made one after the other; each row names its
    cohort."""
    yield FileTable("claims", claims)
    ranked_columns = _ordered(*_FIRST, *_RANKING)
    if cohorts:
        ranked = _joined([metrics.ranked(cohort.frame)[ranked_columns] for cohort in cohorts])
        yield FileTable("ranked", ranked, (*_READ_FIRST, *_RANKING[:4], "peak_reserved_bytes"))
        del ranked
        failures = _joined([_failures(cohort.frame) for cohort in cohorts])
        yield FileTable("failures", failures, (*_READ_FIRST, "outcome", "phase", "evidence"))
        del failures
    values: dict[str, list[pd.DataFrame]] = {}
    for cohort, figures in zip(cohorts, drawn, strict=True):
        for figure in figures:
            values.setdefault(figure.figure.name, []).append(_of_cohort(figure.data, cohort.frame))
    for name, frames in values.items():
        yield FileTable(name, _joined(frames))


def _failures(frame: pd.DataFrame) -> pd.DataFrame:
    final = decided(frame, dict.fromkeys(_ordered(*_FIRST, "outcome", "evidence")))
    return final.loc[final["outcome"] != "ok", _ordered(*_FIRST, "outcome", "evidence")]


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """All frames as one; an empty table with the columns if none has a row."""
    full = [frame for frame in frames if len(frame)] or frames[:1]
    return full[0].reset_index(drop=True) if len(full) == 1 else pd.concat(full, ignore_index=True)


def _of_cohort(rows: pd.DataFrame, cohort: pd.DataFrame) -> pd.DataFrame:
    """Rows with the columns that identify their cohort added if missing."""
    return rows.assign(**{name: cohort[name].iloc[0] for name in _COHORT if name not in rows})


def best_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[str]], int]:
    """Header and cells of the winners of every model and size, and their number. ``Slower by`` is 1 - runner-up over
    winner."""
    best, memory = metrics.best_configurations(frame), metrics.memory_column(frame)
    noun, unit = labels.device_noun(frame), labels.rate_unit(frame)
    header = ["Model", noun, "Fastest layout", unit, metrics.MFU_NAME, _memory_header(memory)]
    header += ["Of", "Runner-up", "Slower by", "Within the noise"]
    cells = [
        [
            row["workload"],
            f"{int(row['world_size']):,}",
            row["layout"],
            format_number(row[metrics.RANK_BY]),
            format_percent(row[metrics.MFU]),
            format_bytes(row[memory]),
            f"{int(row['candidates']):,}",
            row["runner_up"] if isinstance(row["runner_up"], str) else "–",
            format_percent(row["slower_by"]),
            _tied(row),
        ]
        for row in labels.records(labels.in_group_order(best))
    ]
    return header, cells, len(best)


def _tied(row: dict[str, Any]) -> str:
    """Layouts that may be as fast, and the source of the noise estimate."""
    if pd.isna(row["tie"]):
        return "–" if row["candidates"] == 1 else "not known"
    if not row["tie"]:
        return f"none ({noise.describe(row)})"
    return f"{int(row['tied'])} more ({noise.describe(row)}): {row['tied_layouts']}"


def failure_rows(frame: pd.DataFrame) -> tuple[list[str], list[list[str]], int]:
    """Header and cells of the failures other than out of memory, at most `_MOST_FAILURES`, and their total number."""
    final = decided(frame)
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
    """Every column with scalar values, with ``first`` in front."""
    return [*first, *(name for name in _SCALARS if name not in first)]


def _memory_header(column: str) -> str:
    return "Peak memory" if column == "peak_allocated_bytes" else "Peak reserved"


def _first_line(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        return "–"
    line = text.strip().splitlines()[0]
    return line if len(line) <= 160 else line[:159] + "…"
