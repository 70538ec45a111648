"""Sentences that captions begin with: what the table behind a figure shows, with numbers and n; None without them."""

from __future__ import annotations

import pandas as pd

from results.text import format_percent, plural

_NEXT_TO_NOTHING = 0.01


def of_degrees(rows: pd.DataFrame, axis: str, where: str = "") -> str | None:
    """Of a table of `analysis.rows.by_degree`: the step from one degree to the next that costs most, of the steps that
    most workloads have; the median of their losses, the lowest and the highest."""
    if rows.empty:
        return None
    rows = rows.sort_values(["workload", "series", "degree"], kind="stable")
    before = rows.groupby(["workload", "series"], dropna=False)["degree"].shift()
    rows = rows.assign(before=before)[rows["lost_share"].notna() & before.notna()]
    if rows.empty:
        return None
    steps = rows.groupby(["before", "degree"]).agg(
        models=("workload", "nunique"), n=("workload", "size"), lost=("lost_share", "median")
    )
    worst = steps.sort_values(["models", "lost"], kind="stable").iloc[-1]
    degrees = f"{axis} {int(worst.name[0])} → {int(worst.name[1])}"
    own = rows[(rows["before"] == worst.name[0]) & (rows["degree"] == worst.name[1])]["lost_share"]
    verb = "costs" if worst["lost"] >= 0 else "gains"
    spread = f", {_signed(own.max())} to {_signed(own.min())}" if len(own) > 1 else ""
    changes = f"{verb} {format_percent(abs(worst['lost']), 0)} of the throughput of a device"
    if abs(worst["lost"]) < _NEXT_TO_NOTHING:
        changes = f"changes the throughput of a device by less than {format_percent(_NEXT_TO_NOTHING, 0)}"
    return f"{degrees}{where} {changes} ({'median, ' * (len(own) > 1)}n = {plural(len(own), 'model')}{spread})."


def _signed(lost: float) -> str:
    """A loss as a change: ``−12 %``."""
    percent = round(-100 * lost)
    return f"{'+' if percent > 0 else '−' if percent < 0 else '±'}{abs(percent)} %"
