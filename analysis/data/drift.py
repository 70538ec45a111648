"""Whether nodes and network stayed the same over a sweep: what each run reached against what it should, in order.

A run that is repeated is compared with the median of its own experiment. Any other is compared with its prediction,
scaled by how far the prediction is off for the runs of the same model and degrees (median of `FEWEST_ALIKE` or more):
a grid runs in its own order, and a prediction that suits one layout better than the next would look like drift.
"""

from __future__ import annotations

import pandas as pd

from analysis.rows import metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MedianInterval, chance_of_rank_correlation, rank_correlation, supported_median

FEWEST_ALIKE = 3
FEWEST_RUNS = 20
SHORTEST_S = 3600.0
"""A sweep of fewer runs, or all started within less than this, is too short to tell drift from chance."""
COLUMNS = (
    *("order", "sweep", "started_at", "job_id", "node", "workload", "layout", "relative", "compared_with"),
    *("sm_clock_mhz", "temperature_c", "throttle_reasons", "all_reduce_bytes_per_s", "network_regime", "node_count"),
    "attempt_id",
)


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Every attempt whose place in time is known, `COLUMNS`, in order of start (of job id where no start is known).

    ``relative`` is throughput over what was expected, of finished runs that have an expectation; ``compared_with``
    says which: ``repeats`` or ``prediction``. ``node`` names all nodes of the run, null where they are not known.
    """
    rows = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *COLUMNS])))
    by = "started_at" if rows["started_at"].notna().any() else "job_id"
    rows = rows[rows[by].notna()].sort_values(by, kind="stable").reset_index(drop=True)
    relative, compared = _relative(rows)
    rows = rows.assign(order=range(1, len(rows) + 1), node=_node(rows), relative=relative, compared_with=compared)
    return rows[[*COLUMNS]]


def too_short(rows: pd.DataFrame) -> str | None:
    """Why the runs of `table` cannot tell drift from chance; None when they can."""
    known = rows[rows["relative"].notna()]
    span = (known["started_at"].max() - known["started_at"].min()).total_seconds() if len(known) else 0.0
    if len(known) < FEWEST_RUNS:
        return f"{len(known)} comparable runs, fewer than {FEWEST_RUNS}: too few to tell drift from chance"
    if span < SHORTEST_S:
        return f"{len(known)} comparable runs within {span / 60:.0f} minutes: too short a time to tell drift"
    return None


def trend(rows: pd.DataFrame) -> tuple[float, float] | None:
    """Rank correlation of ``relative`` with the order of start, and its chance without any drift; None where a trend
    cannot be told (`too_short`)."""
    known = rows[rows["relative"].notna()]
    if too_short(rows) is not None:
        return None
    found = rank_correlation(known["order"], known["relative"])
    chance = chance_of_rank_correlation(known["order"], known["relative"])
    return None if found is None or chance is None else (found, chance)


def by_node(rows: pd.DataFrame) -> dict[str, tuple[int, MedianInterval | None]]:
    """Comparable runs of each node (or set of nodes) and the median of ``relative``; None of it where they are few."""
    known = rows[rows["relative"].notna() & rows["node"].notna()]
    return {str(node): (len(own), supported_median(own["relative"])) for node, own in known.groupby("node")}


def _relative(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    ok = rows[(rows["outcome"] == "ok") & rows[metrics.RANK_BY].notna()]
    repeats = ok.groupby([ok["experiment_id"], ok["engine_version"].fillna("–")])[metrics.RANK_BY]
    repeated = (ok[metrics.RANK_BY] / repeats.transform("median")).where(repeats.transform("size") > 1)
    ratio = ok["predicted_step_time_s"].astype(float) / ok["step_time_s"]
    # A time traced without a device is the prediction itself.
    ratio = ratio.where(ok["method"] != "rehearsed_fake")
    alike = ratio.groupby([ok["workload"], ok["world_size"], ok["degrees"]])
    predicted = (ratio / alike.transform("median")).where(alike.transform("count") >= FEWEST_ALIKE)
    relative = repeated.fillna(predicted)
    compared = pd.Series("prediction", index=ok.index).where(repeated.isna(), "repeats").where(relative.notna())
    return relative.reindex(rows.index), compared.reindex(rows.index)


def _node(rows: pd.DataFrame) -> pd.Series:
    def named(value: object) -> str | None:
        names = sorted({str(name) for name in value}) if hasattr(value, "__iter__") and len(list(value)) else []
        return "+".join(names) or None

    nodes = rows["nodes"].map(named)
    return nodes.where(nodes.notna(), rows["hosts"].map(named))
