"""Scaling efficiency: throughput per device on more devices relative to the fewest, and where the loss went.

Strong scaling keeps the tokens of a step, weak scaling those of a rank. Device time a token is 1 / (tokens/s/GPU); it
is the sum of the step's parts a token (`breakdown`). With t0 of the smallest size and t of a larger one the
efficiency is t0 / t, and the loss 1 - t0 / t = sum over parts of (part - part0) / t. A part that takes less than
before has a negative share. Where either run lacks its parts, the whole loss is not attributed.
"""

from __future__ import annotations

import pandas as pd

from analysis.data import breakdown
from analysis.rows import labels, metrics, pairs
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MIN_FOR_INTERVAL

LAYOUTS = ("best layout", "pure data parallelism")
KINDS = ("strong", "weak")
UNATTRIBUTED = "not attributed"
FEWEST = MIN_FOR_INTERVAL
"""A size of fewer finished layouts of one batch has no best one that could stand for it; pure data parallelism needs
only itself."""
_BESIDE = ("layout", "tokens_per_step", metrics.RANK_BY, "efficiency", "lost", "tie", "candidates", "network_regime")

_NEEDED = (
    *(*metrics.GROUP, "layout", "attempt_id", metrics.RANK_BY, "tokens_per_step", "tp", "cp", "pp", "ep"),
    *("step_time_s", "step_time_min_s", "step_time_max_s", "network_regime", "num_params", "seq_len"),
)


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each workload, ``kind`` of scaling, ``layouts`` and number of devices, where there are two sizes.

    ``lost`` is 1 - ``efficiency``; ``lost to <part>`` sum to it, ``lost to not attributed`` among them. ``tie`` says
    that another layout's steps overlap the chosen one's.
    """
    parts = breakdown.parts_of(frame)
    rows = pairs.comparable(frame)[[*_NEEDED, *parts]]
    names = [*parts.values(), breakdown.REST] if parts else []
    lost = [f"lost to {name}" for name in (*names, UNATTRIBUTED)]
    columns = ["workload", "kind", "layouts", "world_size", *_BESIDE, *lost, "attempt_id"]
    if rows.empty:
        return pd.DataFrame(columns=columns)
    if parts:
        rows = rows.assign(**breakdown.shares(rows, parts))
    pure = rows[rows[["tp", "cp", "pp", "ep"]].fillna(1).eq(1).all(axis=1)]
    found = []
    for layouts, candidates, fewest in zip(LAYOUTS, (rows, pure), (FEWEST, 1), strict=True):
        for kind in KINDS:
            series = _series(candidates, kind, fewest)
            if len(series):
                found.append(_attributed(series, names).assign(kind=kind, layouts=layouts))
    if not found:
        return pd.DataFrame(columns=columns)
    return labels.in_group_order(pd.concat(found, ignore_index=True))[columns].reset_index(drop=True)


def _series(rows: pd.DataFrame, kind: str, fewest: int) -> pd.DataFrame:
    """The fastest run of each size with ``fewest`` runs, of the batch that reaches the most sizes in each workload."""
    batch = rows["tokens_per_step"] if kind == "strong" else rows["tokens_per_step"] / rows["world_size"]
    rows = rows.assign(_batch=batch)
    rows = rows[rows.groupby(["workload", "world_size", "_batch"])["attempt_id"].transform("size") >= fewest]
    sizes = rows.groupby(["workload", "_batch"])["world_size"].agg(["nunique", "size"]).reset_index()
    sizes = sizes.sort_values(["nunique", "size"], ascending=False, kind="stable").drop_duplicates("workload")
    sizes = sizes[sizes["nunique"] > 1]
    rows = rows.merge(sizes[["workload", "_batch"]], on=["workload", "_batch"])
    return metrics.lead(rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable"), metrics.RANK_BY)


def _attributed(series: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    series = series.sort_values(["workload", "world_size"], kind="stable").reset_index(drop=True)
    first = series.drop_duplicates("workload").set_index("workload")[[metrics.RANK_BY, *names]]
    first = first.reindex(series["workload"]).set_axis(series.index)
    efficiency = series[metrics.RANK_BY] / first[metrics.RANK_BY]
    # A part's time a token over the run's own: its share of the step now, less its share then times t0 / t.
    lost = {f"lost to {name}": series[name] - first[name] * efficiency for name in names}
    attributed = pd.Series(0.0, index=series.index)
    for share in lost.values():
        attributed = attributed + share
    whole = 1 - efficiency
    lost[f"lost to {UNATTRIBUTED}"] = (whole.where(attributed.isna(), 0.0)) if names else whole
    return series.assign(efficiency=efficiency, lost=whole, **lost)
