"""Scores of predictions beside what was measured, as docs/accuracy.md shows them, and its tables.

Predictions stand beside rows of `workloads.predict.table` in columns named ``of_...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

CELL = ["layers", "hidden", "seq", "gpus"]
"""Within which layouts are ranked."""
MANY = 8
"""Rows of a cell whose rank correlation is worth something by itself."""


def in_cells_of(found: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The rows of cells that have at least so many."""
    return found[found.groupby(CELL)["step_time_s"].transform("size") >= rows]


def scores(found: pd.DataFrame) -> dict[str, str]:
    """The line of a table: errors of the step time, ranking within a cell, coverage and reserved memory."""
    error = found["of_step_time_s"] / found["step_time_s"] - 1
    inside = (found["of_step_time_low_s"] <= found["step_time_s"]) & (
        found["step_time_s"] <= found["of_step_time_high_s"]
    )
    ranks, sizes, lost = _ranking(found)
    memory = (found["of_predicted_peak_reserved_bytes"] / 2**30 / found["reserved_gib"] - 1).abs()
    return {
        "rows": f"{len(found):,}",
        "MAPE": percent(error.abs().mean()),
        "median": percent(error.abs().median()),
        "p90": percent(error.abs().quantile(0.9)),
        "bias": f"{error.mean():+.1%}".replace("%", " %"),
        "Spearman": f"{np.mean(ranks):.3f}" if ranks else "–",
        "by rows": f"{np.average(ranks, weights=sizes):.3f}" if ranks else "–",
        "top-5 regret": percent(float(np.mean(lost))) if lost else "–",
        "inside 90 %": percent(float(inside.mean())),
        "reserved memory": percent(memory.mean()) if memory.notna().any() else "–",
    }


def spearman(found: pd.DataFrame) -> float:
    """Mean rank correlation within a cell; NaN where no cell has five rows."""
    ranks, _, _ = _ranking(found)
    return float(np.mean(ranks)) if ranks else float("nan")


def _ranking(found: pd.DataFrame) -> tuple[list[float], list[int], list[float]]:
    """Of each cell of five rows and more: its rank correlation, how many rows it has, and what the best of those five
    loses that are predicted fastest."""
    ranks, sizes, lost = [], [], []
    for _, cell in found.assign(draw=found.get("draw", 0)).groupby([*CELL, "draw"]):
        if len(cell) < 5:
            continue
        time, said = cell["step_time_s"] / cell["gbs_seqs"], cell["of_step_time_s"] / cell["gbs_seqs"]
        ranks.append(float(np.corrcoef(time.rank(), said.rank())[0, 1]))
        sizes.append(len(cell))
        best = time.loc[said.nsmallest(5).index].min()
        lost.append(float(best / time.min() - 1))
    return ranks, sizes, lost


def verdicts(found: pd.DataFrame, cuts: Sequence[float]) -> list[tuple[float, int, int, float]]:
    """For cuts of the reserved memory in GiB: (cut, runs refused, failures let through, share of right verdicts)."""
    load = found["of_predicted_peak_reserved_bytes"]
    ran, failed = found["status"] == "ok", found["status"] == "oom"
    curve = []
    for gib in cuts:
        over = load > gib * 2**30
        right = (ran & ~over).sum() + (failed & over).sum()
        curve.append((float(gib), int((ran & over).sum()), int((failed & ~over).sum()), right / (ran | failed).sum()))
    return curve


def percent(value: Any) -> str:
    return f"{float(value) * 100:.1f} %"


def table(lines: Sequence[tuple[str, dict[str, str]]], first: str) -> str:
    names = list(lines[0][1])
    head = f"| {first} | {' | '.join(names)} |\n|---|{'---:|' * len(names)}"
    return "\n".join([head, *(f"| {name} | {' | '.join(values.values())} |" for name, values in lines)])


def by_value(found: pd.DataFrame, column: str) -> list[tuple[str, dict[str, str]]]:
    keep = ("rows", "MAPE", "p90", "bias", "inside 90 %")
    lines = []
    for value, rows in found.groupby(column, sort=True):
        of = scores(rows)
        name = f"{value:g}" if isinstance(value, float | int) else str(value)
        lines.append((f"{column} {name}", {key: of[key] for key in keep}))
    return lines
