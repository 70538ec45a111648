"""Compares predictions with measurements: makes pairs of both from rows, and a table of their errors.

A *pair* is one measured point with one prediction of it. Its ``depth`` says how the prediction was made:

closed_form   when the sweep was planned, from formulas
rehearsed     from single ranks on one device, communication modelled
traced        from single ranks without a device; memory only, because nothing is timed
calibrated    from a file of predictions (``python -m sweep predict``)

A *cell* is one model and sequence length on one number of devices of one cluster. Layouts are ranked within a cell.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from results.errors import InvalidResults
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

DEPTHS = ("closed_form", "rehearsed", "traced", "calibrated")
QUANTITIES = ("step_time", "peak_memory", "reserved_memory")
CELL = ["cluster", "model", "seq_len", "world_size"]
AXES = (
    *("model", "world_size", "seq_len", "dp", "tp", "pp", "cp", "ep", "zero_stage", "pp_schedule"),
    *("micro_batch_size", "num_microbatches", "recompute", "precision", "compile"),
)
"""Columns by whose values errors are grouped."""
_POINT = ["experiment_id", "cluster", "measurement_version"]
PAIR_COLUMNS = (
    *("depth", "quantity", "experiment_id", "cell", "predicted", "measured", "low", "high", "tokens_per_step"),
    *AXES,
)


def measured_points(attempts: pd.DataFrame) -> pd.DataFrame:
    """One row for each experiment and cluster that ran: its last finished attempt, or if there is none, its last
    attempt that ran out of memory. The step time is the median over all finished attempts, the peak memory their
    maximum."""
    rows = attempts[(attempts["method"] == "measured") & attempts["outcome"].isin(["ok", "oom"])]
    rows = rows.assign(_ok=rows["outcome"].eq("ok")).sort_values(["_ok", "started_at"], kind="stable")
    last = rows.drop_duplicates(_POINT, keep="last").drop(columns="_ok").set_index(_POINT)
    ran = rows[rows["outcome"] == "ok"].groupby(_POINT, dropna=False)
    last["step_time_s"] = ran["step_time_s"].median().reindex(last.index)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        last[name] = ran[name].max().reindex(last.index)
    return last.reset_index()


def with_rehearsals(attempts: pd.DataFrame) -> pd.DataFrame:
    """Adds the columns ``rehearsed_step_time_s``, ``rehearsed_peak_bytes`` and ``traced_peak_bytes``: values of the
    last finished rehearsal (or trace) of the same experiment on the same cluster; null if there is none."""
    joined = attempts
    for method, columns in (
        ("rehearsed", {"step_time_s": "rehearsed_step_time_s", "peak_allocated_bytes": "rehearsed_peak_bytes"}),
        ("rehearsed_fake", {"peak_allocated_bytes": "traced_peak_bytes"}),
    ):
        rows = attempts[(attempts["method"] == method) & (attempts["outcome"] == "ok")]
        rows = rows.sort_values("started_at", kind="stable").drop_duplicates(_POINT, keep="last")
        keyed = rows.set_index(_POINT)
        keys = pd.MultiIndex.from_frame(joined[_POINT])
        for column, name in columns.items():
            joined = joined.assign(**{name: pd.to_numeric(keyed[column]).reindex(keys).to_numpy()})
    return joined


INTERVAL = ("predicted_step_time_low_s", "predicted_step_time_high_s")
"""Columns of a row: the ends of the interval that its plan gave with ``predicted_step_time_s``."""
_PREDICTIONS = (
    ("closed_form", "step_time", "predicted_step_time_s", "step_time_s"),
    ("closed_form", "peak_memory", "predicted_peak_bytes", "peak_allocated_bytes"),
    ("rehearsed", "step_time", "rehearsed_step_time_s", "step_time_s"),
    ("rehearsed", "peak_memory", "rehearsed_peak_bytes", "peak_allocated_bytes"),
    ("traced", "peak_memory", "traced_peak_bytes", "peak_allocated_bytes"),
)
READ_BY_PAIRS = tuple(
    dict.fromkeys(
        [
            *(*_POINT, *CELL, *AXES, *INTERVAL, "method", "outcome", "started_at", "tokens_per_step"),
            *(column for _, _, predicted, measured in _PREDICTIONS for column in (predicted, measured)),
            "peak_reserved_bytes",
        ]
    )
)
"""Columns of rows that `measured_points` and `pairs_of_rows` read."""
CALIBRATED = (
    ("step_time", "step_time_s", "step_time_s"),
    ("peak_memory", "predicted_peak_allocated_bytes", "peak_allocated_bytes"),
    ("reserved_memory", "predicted_peak_reserved_bytes", "peak_reserved_bytes"),
)


def pairs_of_rows(points: pd.DataFrame, only: str | None = None) -> pd.DataFrame:
    """Makes the table of pairs (`PAIR_COLUMNS`) from `measured_points` with the columns of `with_rehearsals`, of every
    quantity or ``only`` of one.

    Closed-form step times have the interval that was recorded; rows of schema 9 and older have none.
    """
    tables = []
    for depth, quantity, predicted, measured in _PREDICTIONS:
        if predicted in points and only in (None, quantity):
            one = _pairs(points, depth, quantity, points[predicted], points[measured])
            tables.append(_with_interval(one, points, *INTERVAL) if predicted == "predicted_step_time_s" else one)
    return _together(tables)


def pairs_of_predictions(
    predictions: pd.DataFrame, measured: pd.DataFrame, *, in_its_order: bool = False
) -> pd.DataFrame:
    """Makes the table of pairs from a file of predictions and ``measured``, which is either `measured_points` or a
    table as ``python -m sweep predict`` reads it, with ``status``, ``step_time_s`` and ``reserved_gib``.

    Predictions with an ``experiment_id`` are matched by it; if an id is repeated, its last prediction counts.
    Predictions without ids are matched row by row, if ``measured`` has no ids or is ``in_its_order``. Raises
    `InvalidResults` if the rows cannot be matched.
    """
    if "experiment_id" in predictions and "experiment_id" in measured:
        predictions = predictions.drop_duplicates("experiment_id", keep="last")
        both = measured.merge(predictions, on="experiment_id", how="inner", suffixes=("", "_of_prediction"))
        names = {name: f"{name}_of_prediction" if name in measured else name for name in predictions.columns}
    else:
        if len(predictions) != len(measured) or ("experiment_id" in measured and not in_its_order):
            raise InvalidResults(
                f"{len(predictions):,} predictions have no experiment_id and cannot be matched with {len(measured):,} "
                "measured rows; give --against the table that was predicted, with the same rows in the same order (not "
                "attempts.parquet), or predict a table that has experiment_id"
            )
        both = measured.reset_index(drop=True)
        names = {name: f"{name}_of_prediction" for name in predictions.columns}
        both = both.join(predictions.reset_index(drop=True).rename(columns=names))
    tables = []
    for quantity, predicted, real in CALIBRATED:
        if predicted in names and real in both:
            one = _pairs(both, "calibrated", quantity, both[names[predicted]], both[real])
            if quantity == "step_time":
                one = _with_interval(one, both, *(names.get(f"step_time_{end}_s", "") for end in ("low", "high")))
            tables.append(one)
    return _together(tables)


def _pairs(rows: pd.DataFrame, depth: str, quantity: str, predicted: pd.Series, measured: pd.Series) -> pd.DataFrame:
    one, two = pd.to_numeric(predicted, errors="coerce"), pd.to_numeric(measured, errors="coerce")
    known = rows["outcome"].eq("ok") & (one > 0) & (two > 0)
    rows = rows[known]
    named = [rows[name].to_list() if name in rows else [""] * len(rows) for name in CELL]
    cell = [" | ".join(map(str, values)) for values in zip(*named, strict=True)]
    fixed = {"depth": depth, "quantity": quantity, "predicted": one[known], "measured": two[known], "cell": cell}
    kept = {name: rows[name] for name in ("experiment_id", "tokens_per_step", *AXES) if name in rows}
    return pd.DataFrame({**fixed, **kept}, index=rows.index)


def _with_interval(pairs: pd.DataFrame, rows: pd.DataFrame, low: str, high: str) -> pd.DataFrame:
    """Adds the ends of each prediction's interval to ``pairs``, from the columns ``low`` and ``high`` of ``rows`` if
    they exist."""
    ends = {end: rows.loc[pairs.index, name] for end, name in (("low", low), ("high", high)) if name in rows}
    return pairs.assign(**ends)


def _together(tables: list[pd.DataFrame]) -> pd.DataFrame:
    full = [one for one in tables if len(one)]
    if not full:
        return pd.DataFrame(columns=list(PAIR_COLUMNS))
    return pd.concat(full, ignore_index=True).reindex(columns=list(PAIR_COLUMNS))


def grades(pairs: pd.DataFrame) -> pd.DataFrame:
    """One row for each depth and quantity, then one for each value of each axis: the values of `grade_of` with their
    keys.

    ``axis`` and ``value`` are null in the rows over all values. Values with fewer than two pairs have no row.
    """
    rows: list[dict[str, Any]] = []
    for (depth, quantity), whole in pairs.groupby(["depth", "quantity"], sort=False):
        fixed = {"depth": depth, "quantity": quantity}
        rows.append({**fixed, "axis": None, "value": None, **grade_of(whole)})
        for axis in AXES:
            values = whole[axis]
            if values.nunique() < 2:
                continue
            for value, part in whole.groupby(values):
                if len(part) > 1:
                    rows.append({**fixed, "axis": axis, "value": format_setting(value), **grade_of(part)})
    return pd.DataFrame(rows, columns=["depth", "quantity", "axis", "value", *_GRADE])


_GRADE = (
    *("n", "mape", "median", "p90", "bias", "cells", "spearman", "top1_regret", "top5_regret", "intervals"),
    "coverage",
)


def grade_of(pairs: pd.DataFrame) -> dict[str, Any]:
    """Error statistics over all pairs. For step times also rank correlation and regret, averaged over cells with at
    least `FEWEST_IN_A_CELL` layouts, the number of intervals, and the share of intervals that contain the measurement.
    Regrets are averaged over cells with more layouts than tries."""
    errors = summary(relative_errors(pairs["predicted"], pairs["measured"]))
    assert errors is not None
    row: dict[str, Any] = dict.fromkeys(_GRADE)
    row |= {name: getattr(errors, name) for name in ("n", "mape", "median", "p90", "bias")}
    if (pairs["quantity"] != "step_time").any():
        return row
    tokens = pairs["tokens_per_step"].fillna(1.0)
    predicted, measured = tokens / pairs["predicted"], tokens / pairs["measured"]
    orders, first, five, cells = [], [], [], 0
    for _, cell in pairs.groupby("cell"):
        if len(cell) < FEWEST_IN_A_CELL:
            continue
        cells += 1
        one, two = predicted[cell.index], measured[cell.index]
        orders.append(rank_correlation(one, two))
        first.append(regret(one, two, 1))
        five.append(regret(one, two, 5))
    row |= {"cells": cells, "spearman": _mean(orders), "top1_regret": _mean(first), "top5_regret": _mean(five)}
    row["intervals"] = int((pairs["low"].notna() & pairs["high"].notna()).sum())
    row["coverage"] = coverage(pairs["low"], pairs["high"], pairs["measured"])
    return row


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def oom_curve(points: pd.DataFrame) -> pd.DataFrame:
    """Table of `refusals` by the ratio of the closed-form peak to the device's memory, of `measured_points`.

    A run that ended before a rank could report its device's memory gets the median of its cluster.
    """
    limits = pd.to_numeric(points["device_memory_bytes"])
    limits = limits.fillna(limits.groupby(points["cluster"]).transform("median"))
    known = points["predicted_peak_bytes"].notna() & limits.notna()
    ratio = pd.to_numeric(points["predicted_peak_bytes"])[known] / limits[known]
    return refusals(ratio, points["outcome"].eq("oom")[known])
