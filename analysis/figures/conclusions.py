"""Sentences at the beginning of captions: what the table behind a figure shows, with numbers and n; None without
rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.rows import labels, metrics
from results.statistics import ranking
from results.text.numbers import format_percent, format_setting, listed, plural

_NEXT_TO_NOTHING = 0.01
_NEAR = 0.1
"""Largest loss relative to the fastest run of a run that counts as near it."""

_AXES = {
    "micro_batch_size": "micro-batch",
    "zero_stage": "ZeRO",
    "recompute_every": "recompute one layer in",
    "activation_offload": "offloaded activations",
    "cuda_graph": "CUDA graph",
    "pp_schedule": "schedule",
    "cp_kind": "cp kind",
    "grad_reduce": "gradients reduced in",
    "optimizer_states": "states in",
    "master_weights": "master weights in",
    "optimizer_offload": "offloaded states",
}
"""Names of axes whose column's name is no word."""


def of_degrees(rows: pd.DataFrame, axis: str, where: str = "") -> str | None:
    """Sentence on a table of `analysis.rows.by_degree`: the step between degrees over which the fastest run loses most,
    among the steps that most workloads have, with the median, lowest and highest of their losses."""
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
    worst = steps.reset_index().sort_values(["models", "lost"], kind="stable").iloc[-1]
    degrees = f"{axis} {int(worst['before'])} → {int(worst['degree'])}"
    losses = rows[(rows["before"] == worst["before"]) & (rows["degree"] == worst["degree"])]["lost_share"]
    spread = f", {_signed(losses.max())} to {_signed(losses.min())}" if len(losses) > 1 else ""
    changes = f"{format_percent(abs(worst['lost']), 0)} {'slower' if worst['lost'] >= 0 else 'faster'}"
    if abs(worst["lost"]) < _NEXT_TO_NOTHING:
        changes = f"as fast within {format_percent(_NEXT_TO_NOTHING, 0)}"
    found = f"{'median, ' * (len(losses) > 1)}n = {plural(len(losses), 'model')}{spread}"
    return f"{degrees}{where}: the fastest run is {changes} on each device ({found})."


def of_choices(table: pd.DataFrame) -> str | None:
    """Sentence on `analysis.rows.choice_costs.table`: the choices that cost and gain most throughput."""
    # Only certain costs and gains: the interval excludes 1.
    known = table[(table["interval_high"] < 1) | (table["interval_low"] > 1)] if len(table) else table
    if known.empty:
        return None
    clauses = []
    for row in labels.records(known.sort_values("median").iloc[[0, -1]].drop_duplicates(["axis", "value"])):
        change = float(row["median"]) - 1
        if abs(change) >= _NEXT_TO_NOTHING:
            interval = f"{row['interval_low']:.2f} to {row['interval_high']:.2f}"
            share = f"costs {format_percent(-change, 0)}" if change < 0 else f"gains {format_percent(change, 0)}"
            clauses.append(f"{choice(row)} {share} ({interval}, n = {row['pairs']:,} pairs)")
    return f"By itself {listed(clauses)}." if clauses else None


def choice(row: Mapping[str, Any]) -> str:
    """A row of `analysis.rows.choice_costs.table` in words: ``tp 1 → 2``."""
    first, value = (format_setting(row[name]).replace("_", " ") for name in ("first", "value"))
    return f"{_AXES.get(row['axis'], row['axis'])} {first} → {value}"


def of_front(table: pd.DataFrame, frame: pd.DataFrame) -> str | None:
    """Sentence on `pareto.data`: what the leanest run within a tenth of the fastest saves, in the group with the most
    runs at the batch that most of them have."""
    usual = ranking.of_usual_batch(metrics.ranked(frame), metrics.GROUP)
    table = table[table["attempt_id"].isin(set(usual["attempt_id"]))]
    if table.empty:
        return None
    sizes = table.groupby(metrics.GROUP)["attempt_id"].transform("size")
    group = table[sizes == sizes.max()]
    workload, size = group["workload"].iloc[0], group["world_size"].iloc[0]
    group = group[(group["workload"] == workload) & (group["world_size"] == size)]
    fastest = group.sort_values(metrics.RANK_BY).iloc[-1]
    near = group[group[metrics.RANK_BY] >= (1 - _NEAR) * fastest[metrics.RANK_BY]]
    lean = near.sort_values("memory_bytes").iloc[0]
    saved = 1 - lean["memory_bytes"] / fastest["memory_bytes"]
    if saved < _NEXT_TO_NOTHING:
        return None
    slower = 1 - lean[metrics.RANK_BY] / fastest[metrics.RANK_BY]
    return (
        f"{workload} on {int(size)} devices: {format_percent(saved, 0)} less memory than the fastest run costs "
        f"{format_percent(slower)} of the throughput (n = {plural(len(group), 'run')})."
    )


def of_predictions(frame: pd.DataFrame) -> str | None:
    """Sentence on the median errors of the planner's memory and step times, and on how many step times lie in the
    interval recorded with them."""
    errors_in_words = []
    for name, predicted, measured in (
        ("memory", "predicted_peak_bytes", "peak_allocated_bytes"),
        ("step time", "predicted_step_time_s", "step_time_s"),
    ):
        errors = metrics.prediction_errors(frame, predicted, measured).abs()
        if len(errors):
            errors_in_words.append(f"{format_percent(errors.median())} of {name} (n = {len(errors):,})")
    if not errors_in_words:
        return None
    inside, known = metrics.inside_interval(frame)
    covered = f" Inside their predicted interval: {inside:,} of {plural(known, 'step time')}." if known else ""
    return f"Predictions were off by {listed(errors_in_words)}: medians of the size of the error.{covered}"


def of_overhead(rows: pd.DataFrame) -> str | None:
    """Sentence on `overhead.data`: the share of timed steps in a point's time, and the longest other phase."""
    known = rows.dropna(subset=list(metrics.OVERHEAD))
    if known.empty:
        return None
    phases = known[list(metrics.OVERHEAD)].rename(columns=metrics.OVERHEAD)
    shares = phases.div(phases.sum(axis=1), axis=0).median()
    timed = metrics.OVERHEAD["timed_s"]
    rest = shares.drop(timed)
    return (
        f"Timed steps are {format_percent(shares[timed], 0)} of a point's time, {rest.idxmax()} "
        f"{format_percent(rest.max(), 0)} (medians, n = {plural(len(known), 'point')})."
    )


def of_failures(table: pd.DataFrame) -> str | None:
    """Sentence on `failures_by_phase.data`: the most frequent failure and its phase."""
    if table.empty:
        return None
    most = table.sort_values("points", kind="stable").iloc[-1]
    return (
        f"{int(most['points']):,} of {plural(int(table['points'].sum()), 'failure')}: "
        f"{labels.OUTCOME_NAMES[str(most['outcome'])]}, phase {most['phase']}."
    )


def _signed(lost: float) -> str:
    """A loss as a signed change: ``−12 %``."""
    percent = round(-100 * lost)
    return f"{'+' if percent > 0 else '−' if percent < 0 else '±'}{abs(percent)} %"
