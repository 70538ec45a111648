"""Layouts that several training engines ran: what each engine made of them, its own winners, and where those differ.

Rows of different engines are never pooled (`analysis.rows.cohorts`); here they stand side by side.
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
"""Of `side_by_side`. ``ratio`` is the throughput over that of the layout's first engine, ``loss_difference`` the
largest relative difference of the first steps' losses from that one's."""
WINNERS = (
    *("method", "cluster", "measurement_version", "workload", "world_size", "engine", "engine_version", "layout"),
    *("tokens_per_s_per_gpu", "peak_allocated_bytes", "candidates", "same"),
)
"""Of `winners`. ``same``: whether every engine's fastest layout is this one."""
_OVER = ["method", "cluster", "measurement_version"]
"""What rows must share to stand side by side; the engine is the rest of a cohort."""
_OF_ENGINE = ("engine", "engine_version")


def side_by_side(attempts: pd.DataFrame) -> pd.DataFrame:
    """One row for each layout and engine, of layouts that more than one engine was asked for: `COLUMNS`.

    A layout is the whole configuration but for the engine. Repeats count by their median throughput. This project's
    engine is the first of a layout, the others follow by name.
    """
    found = []
    for rows in _shared(attempts):
        final = decided(rows)
        final = final.assign(_layout=final["config_json"].map(_layout_of))
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
            found += _layout_rows(labels.records(group.assign(_at=group["engine"].map(order)).sort_values("_at")))
    return pd.DataFrame(found, columns=list(COLUMNS))


def winners(attempts: pd.DataFrame) -> pd.DataFrame:
    """Each engine's fastest layout of every model and size where several engines have one: `WINNERS`."""
    found: list[dict[str, Any]] = []
    for rows in _shared(attempts):
        best: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for engine in _engines(rows):
            own = rows[rows["engine"] == engine].reset_index(drop=True)
            for row in labels.records(labels.in_group_order(metrics.best_configurations(own))):
                best.setdefault((row["workload"], int(row["world_size"])), []).append(row)
        for group in best.values():
            if len(group) > 1:
                same = len({row["layout"] for row in group}) == 1
                found += [{name: row.get(name) for name in WINNERS} | {"same": same} for row in group]
    return pd.DataFrame(found, columns=list(WINNERS))


def _shared(attempts: pd.DataFrame) -> list[pd.DataFrame]:
    """Rows by what they share, with labels that hold over all of their engines; those of one engine are left out."""
    if attempts.empty or attempts["engine"].nunique(dropna=False) < 2:
        return []
    keyed = attempts.assign(engine=attempts["engine"].fillna(ENGINE))
    groups = (rows for _, rows in keyed.groupby(_OVER, dropna=False, sort=True))
    return [labels.add_labels(rows.reset_index(drop=True)) for rows in groups if rows["engine"].nunique() > 1]


def _engines(rows: pd.DataFrame) -> list[str]:
    names = sorted(cast("list[str]", rows["engine"].unique().tolist()))
    return sorted(names, key=lambda name: name != ENGINE)


def _layout_of(config_json: object) -> str | None:
    """A stored configuration without its engine, as text; None where it is not stored."""
    if not isinstance(config_json, str):
        return None
    try:
        fields = json.loads(config_json)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    return json.dumps({name: value for name, value in fields.items() if name not in _OF_ENGINE}, sort_keys=True)


def _layout_rows(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one layout, its first engine first."""
    told = []
    first = group[0]
    for place, row in enumerate(group):
        losses = _losses(row)
        ratio = row[metrics.RANK_BY] / first[metrics.RANK_BY] if place else None
        told.append(
            {name: row.get(name) for name in COLUMNS}
            | {
                "ratio": None if ratio is None or pd.isna(ratio) else ratio,
                "first_loss": losses[0] if losses else None,
                "loss_difference": largest_difference(losses, _losses(first)) if place else None,
            }
        )
    return told


def _losses(row: dict[str, Any]) -> list[float]:
    values = row.get("losses")
    return [] if values is None or isinstance(values, float) else [float(value) for value in values]
