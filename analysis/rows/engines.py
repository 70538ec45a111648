"""Layouts that several training engines ran: the results of each engine, its winners, and where the winners differ.

Rows of different engines are never pooled (`analysis.rows.cohorts`); here they are compared side by side.
"""

from __future__ import annotations

import json
from typing import Any, cast

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.load import decided
from results.statistics.agreement import largest_difference
from workloads.spec.experiment import ENGINE

COLUMNS = (
    *("method", "cluster", "measurement_version", "workload", "world_size", "layout", "engine", "engine_version"),
    *("experiment_id", "outcome", "tokens_per_s_per_gpu", "ratio", "peak_allocated_bytes", "peak_reserved_bytes"),
    *("first_loss", "loss_difference"),
)
"""Columns of `side_by_side`. ``ratio`` is the throughput over that of the layout's first engine. ``loss_difference`` is
the largest relative difference between its first steps' losses and those of the first engine."""
WINNERS = (
    *("method", "cluster", "measurement_version", "workload", "world_size", "engine", "engine_version", "layout"),
    *("tokens_per_s_per_gpu", "peak_allocated_bytes", "candidates", "same"),
)
"""Columns of `winners`. ``same``: whether every engine has this fastest layout."""
_OVER = ["method", "cluster", "measurement_version"]
"""Columns that rows must share to be compared across engines."""
_OF_ENGINE = ("engine", "engine_version")


def side_by_side(attempts: pd.DataFrame) -> pd.DataFrame:
    """One row for each layout and engine, of layouts that were planned for more than one engine; its columns are
    `COLUMNS`.

    A layout is the whole configuration except the engine. Repeats count by their median throughput. This project's
    engine comes first in a layout; the others follow by name.
    """
    table_rows = []
    for rows in _shared(attempts):
        final = decided(rows)
        layouts = [_layout_of(row) for row in labels.records(final)]
        final = final.assign(_layout=pd.Series(layouts, index=final.index, dtype=object))
        final = final[final["_layout"].notna()]
        final = final.drop_duplicates(["_layout", *_OF_ENGINE], keep="last").drop_duplicates(
            ["_layout", "engine"], keep="last"
        )
        several = final.groupby("_layout")["engine"].transform("nunique") > 1
        final = final[several]
        rates = {row["experiment_id"]: row[metrics.RANK_BY] for row in labels.records(metrics.ranked(rows))}
        final = final.assign(**{metrics.RANK_BY: final["experiment_id"].map(rates).astype(float)})
        order = {name: place for place, name in enumerate(_engines(rows))}
        for _, group in final.groupby("_layout", sort=False):
            table_rows += _layout_rows(labels.records(group.assign(_at=group["engine"].map(order)).sort_values("_at")))
    return pd.DataFrame(table_rows, columns=list(COLUMNS))


def winners(attempts: pd.DataFrame) -> pd.DataFrame:
    """Each engine's fastest layout of every model and size that several engines finished; its columns are `WINNERS`."""
    winner_rows: list[dict[str, Any]] = []
    for rows in _shared(attempts):
        best: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for engine in _engines(rows):
            rows_of_engine = rows[rows["engine"] == engine].reset_index(drop=True)
            for row in labels.records(labels.in_group_order(metrics.best_configurations(rows_of_engine))):
                best.setdefault((row["workload"], int(row["world_size"])), []).append(row)
        for group in best.values():
            if len(group) > 1:
                same = len({row["layout"] for row in group}) == 1
                winner_rows += [{name: row.get(name) for name in WINNERS} | {"same": same} for row in group]
    return pd.DataFrame(winner_rows, columns=list(WINNERS))


def _shared(attempts: pd.DataFrame) -> list[pd.DataFrame]:
    """Rows grouped by `_OVER`, with labels that hold over all engines of a group; groups of one engine are left out."""
    if attempts.empty or attempts["engine"].nunique(dropna=False) < 2:
        return []
    keyed = attempts.assign(engine=attempts["engine"].fillna(ENGINE))
    groups = (rows for _, rows in keyed.groupby(_OVER, dropna=False, sort=True))
    return [labels.add_labels(rows.reset_index(drop=True)) for rows in groups if rows["engine"].nunique() > 1]


def _engines(rows: pd.DataFrame) -> list[str]:
    names = sorted(cast("list[str]", rows["engine"].unique().tolist()))
    return sorted(names, key=lambda name: name != ENGINE)


def _layout_of(row: dict[str, Any]) -> str | None:
    """Stored configuration without its engine and what that does by itself, as JSON text; None if it is not stored."""
    config_json = row["config_json"]
    if not isinstance(config_json, str):
        return None
    try:
        fields = json.loads(config_json)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    fields |= labels.usual_ways(row)
    return json.dumps({name: value for name, value in fields.items() if name not in _OF_ENGINE}, sort_keys=True)


def _layout_rows(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one layout; its first engine comes first."""
    table_rows = []
    first = group[0]
    for place, row in enumerate(group):
        losses = _losses(row)
        ratio = row[metrics.RANK_BY] / first[metrics.RANK_BY] if place else None
        table_rows.append(
            {name: row.get(name) for name in COLUMNS}
            | {
                "ratio": None if ratio is None or pd.isna(ratio) else ratio,
                "first_loss": losses[0] if losses else None,
                "loss_difference": largest_difference(losses, _losses(first)) if place else None,
            }
        )
    return table_rows


def _losses(row: dict[str, Any]) -> list[float]:
    values = row.get("losses")
    return [] if values is None or isinstance(values, float) else [float(value) for value in values]
