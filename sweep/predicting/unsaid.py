"""What a row leaves open, and the other readings that its interval must cover as well.

A row is predicted with the likeliest reading. Where another one is about as likely, it is predicted too, and the row's
interval reaches from the lowest to the highest end of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workloads.predict.cells.words import text_of, truth_of
from workloads.predict.experts.ratios import routed_rows
from workloads.predict.hardware import is_alternative
from workloads.predict.predictor import Prediction, Predictor
from workloads.predict.profiles import Profile
from workloads.predict.table import Table, read_points
from workloads.spec.cluster import ClusterSpec

MOST_DENSE = 3
"""First layers without experts of DeepSeek-V3, the most of the shipped models; DeepSeek-V2 has one, most have none."""


class Reading(NamedTuple):
    """Another reading of one cell."""

    place: int
    """Index in the table's points."""
    column: str
    value: Any


def other_readings(
    frame: pd.DataFrame, table: Table, clusters: Mapping[str, ClusterSpec], profiles: Mapping[str, Profile]
) -> list[Reading]:
    """Readings that are about as likely as the ones taken, of every point of ``table``, which was read from
    ``frame``."""
    columns = {
        name: frame[name].tolist() if name in frame else [None] * len(frame)
        for name in ("precision", "gated_mlp", "dense_layers", "ffn", "cluster", "gpu")
    }
    readings = []
    for place, row in enumerate(table.rows.tolist()):
        values = {name: column[row] for name, column in columns.items()}
        readings += [Reading(place, *other) for other in _others(values, table, place, clusters, profiles)]
    return readings


def _others(
    values: Mapping[str, Any],
    table: Table,
    place: int,
    clusters: Mapping[str, ClusterSpec],
    profiles: Mapping[str, Profile],
) -> list[tuple[str, Any]]:
    x, experts, cluster = table.points, table.experts[place], table.clusters[place]
    others: list[tuple[str, Any]] = []
    if text_of(values["precision"]).endswith("?"):
        others.append(("precision", "bf16" if x.fp8[place] else "fp8"))
    said = profiles[str(x.codebase[place])].gated is not None or truth_of("gated_mlp", values["gated_mlp"]) is not None
    # Both Llama 3.2 1B, with a gate, and Nemotron-4, without one, have grouped queries and four times the hidden size.
    like_both = not text_of(values["ffn"]) or x.ffn[place] == 4 * x.hidden[place]
    if experts is None and not said and x.kv_heads[place] < x.heads[place] and like_both:
        others.append(("gated_mlp", "false"))
    if experts is not None and text_of(values["ffn"]) and not text_of(values["dense_layers"]):
        others.append(("dense_layers", min(MOST_DENSE, int(x.layers[place]) - 1)))
    named = text_of(values["cluster"]) or text_of(values["gpu"]) in clusters
    if not named and x.gpus[place] > cluster.domain:
        others += [("cluster", one.name) for one in clusters.values() if is_alternative(one, cluster)]
    return others


def cover(
    prediction: Prediction,
    frame: pd.DataFrame,
    table: Table,
    predictor: Predictor,
    clusters: Mapping[str, ClusterSpec],
    general: Profile,
) -> dict[int, str]:
    """Widens the intervals of ``prediction`` in place. Returns what each widened point's interval covers, in words."""
    readings = other_readings(frame, table, clusters, predictor.profiles)
    if not readings:
        return {}
    rows = frame.iloc[[table.rows[one.place] for one in readings]].reset_index(drop=True).astype(object)
    for column in {one.column for one in readings}:
        rows[column] = [
            one.value if one.column == column else before
            for one, before in zip(readings, rows.get(column, [None] * len(rows)), strict=True)
        ]
    other = read_points(rows, clusters, predictor.profiles, general)
    routed = routed_rows(other, predictor.profiles)
    predicted = routed.predict(predictor)
    words: dict[int, list[str]] = defaultdict(list)
    for at, row in enumerate(other.rows.tolist()):
        reading = readings[row]
        if at in routed.refused or not np.isfinite(predicted.step_time_s[at]):
            continue
        place = reading.place
        prediction.low_s[place] = min(prediction.low_s[place], predicted.low_s[at])
        prediction.high_s[place] = max(prediction.high_s[place], predicted.high_s[at])
        words[place].append(f"{reading.column} {reading.value}")
    return {place: f"the interval also covers {', '.join(covered)}" for place, covered in words.items()}
