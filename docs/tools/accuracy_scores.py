"""The lines and tables of docs/accuracy.md: predictions beside measurements, by the statistics of every grade.

Rows are those of `workloads.predict.table`, with a prediction beside each in columns named ``of_...``. The statistics
are those of `results.statistics.errors_of_predictions`, so that this page and ``python -m sweep grade`` agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from results.statistics.errors_of_predictions import (
    FEWEST_IN_A_CELL,
    coverage,
    rank_correlation,
    refusals,
    regret,
    relative_errors,
    summary,
)
from results.text.numbers import format_setting

CELL = ["layers", "hidden", "seq", "gpus"]
"""Columns that name a cell: the layouts of one cell are ranked against each other."""
TRIES = 5
"""Layouts that a user would run: those predicted fastest. Regret is what the fastest of them loses against the best."""
GIB = 2**30


def scores(rows: pd.DataFrame) -> dict[str, str]:
    """One line of a table: errors of the step time, ranking within cells, coverage of the
    interval, median half of its width (by how much of the middle its upper end is longer) and reserved memory."""
    times = summary(relative_errors(rows["of_step_time_s"], rows["step_time_s"]))
    assert times is not None
    inside = coverage(rows["of_step_time_low_s"], rows["of_step_time_high_s"], rows["step_time_s"])
    memory = summary(relative_errors(rows["of_predicted_peak_reserved_bytes"], rows["reserved_gib"] * GIB))
    width = np.sqrt((rows["of_step_time_high_s"] / rows["of_step_time_low_s"]).median()) - 1
    correlations, sizes, regrets = _ranking(rows)
    return {
        "rows": f"{len(rows):,}",
        "MAPE": percent(times.mape),
        "median": percent(times.median_size),
        "p90": percent(times.p90),
        "bias": f"{times.bias:+.1%}".replace("%", " %"),
        "Spearman": f"{np.mean(correlations):.3f}" if correlations else "–",
        "by rows": f"{np.average(correlations, weights=sizes):.3f}" if correlations else "–",
        f"top-{TRIES} regret": percent(float(np.mean(regrets))) if regrets else "–",
        "inside 90 %": percent(inside) if inside is not None else "–",
        "half-width": percent(width),
        "reserved memory": percent(memory.mape) if memory is not None else "–",
    }


def spearman(rows: pd.DataFrame) -> float:
    """Mean rank correlation within cells; NaN where no cell has `FEWEST_IN_A_CELL` rows of different times."""
    correlations, _, _ = _ranking(rows)
    return float(np.mean(correlations)) if correlations else float("nan")


def _ranking(rows: pd.DataFrame) -> tuple[list[float], list[int], list[float]]:
    """Rank correlation and number of rows of each cell that has `FEWEST_IN_A_CELL`; regret of each that has more than
    `TRIES`."""
    correlations, sizes, regrets = [], [], []
    for _, cell in rows.assign(draw=rows.get("draw", 0)).groupby([*CELL, "draw"]):
        if len(cell) < FEWEST_IN_A_CELL:
            continue
        predicted, measured = cell["gbs_seqs"] / cell["of_step_time_s"], cell["gbs_seqs"] / cell["step_time_s"]
        correlation, lost = rank_correlation(predicted, measured), regret(predicted, measured, TRIES)
        if correlation is not None:
            correlations.append(correlation)
            sizes.append(len(cell))
        if lost is not None:
            regrets.append(lost)
    return correlations, sizes, regrets


def verdicts(rows: pd.DataFrame, cuts: Iterable[float]) -> list[tuple[float, int, int, float]]:
    """For cuts of the reserved memory in GiB: (cut, runs refused, failures let through, share of right verdicts)."""
    ended = rows[rows["status"].isin(["ok", "oom"])]
    curve = refusals(ended["of_predicted_peak_reserved_bytes"] / GIB, ended["status"] == "oom", cuts)
    return list(curve[["cut", "fitting_refused", "oom_kept", "right"]].itertuples(index=False, name=None))


def percent(value: Any) -> str:
    return f"{float(value) * 100:.1f} %"


def table(lines: Sequence[tuple[str, dict[str, str]]], first: str) -> str:
    names = list(lines[0][1])
    head = f"| {first} | {' | '.join(names)} |\n|---|{'---:|' * len(names)}"
    return "\n".join([head, *(f"| {name} | {' | '.join(values.values())} |" for name, values in lines)])


def by_value(found: pd.DataFrame, column: str) -> list[tuple[str, dict[str, str]]]:
    """A line for each value of a column that has predicted rows: a table has no word for some, such as ``full:21``."""
    found = found[found["of_step_time_s"].notna()]
    keep = ("rows", "MAPE", "p90", "bias", "inside 90 %", "half-width")
    lines = []
    for value, rows in found.groupby(column, sort=True):
        of = scores(rows)
        name = format_setting(value)
        lines.append((f"{column} {name}", {key: of[key] for key in keep}))
    return lines
