"""The best configuration of each model and number of devices, by two rules: the published MFU and the throughput.

The FLOPs of the study's MFU count tied embeddings twice if a pipeline splits them, which favours pipelines. Throughput
per device has no such term. `best_by` ranks by either.
"""

from __future__ import annotations

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.statistics import ranking
from results.text.numbers import GIB

RULES = ("published_mfu", "tokens_per_s")
"""Names of the rules, as in the column ``rank_by``."""


def published_mfu(frame: pd.DataFrame) -> pd.Series:
    """The MFU that the study ranks by, a fraction: as published, otherwise by the same formula (``mfu_playbook``)."""
    playbook_mfu = frame["mfu_playbook"]
    return frame["published_mfu"].fillna(playbook_mfu) if "published_mfu" in frame else playbook_mfu


def node_count(frame: pd.DataFrame) -> pd.Series:
    """Number of nodes that the ranks ran on, if recorded. Unknown for rehearsals, which run on one device."""

    def several(value: object) -> float:
        return float(len(set(value))) if isinstance(value, (list, tuple)) or hasattr(value, "tolist") else float("nan")  # type: ignore[call-overload]

    counts = pd.Series(float("nan"), index=frame.index)
    for column in ("nodes", "hosts"):
        counts = counts.fillna(frame[column].map(several).replace(0, float("nan")))
    counts = counts.where(frame["method"] == "measured")
    if "node_count" in frame:
        counts = frame["node_count"].fillna(counts)
    return counts.astype("Int64")


@cache_per_frame
def _by_study_label(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows grouped by the study's labels; ``_shape`` is the workload."""
    label, shape = labels.study_label(frame), frame["workload"]
    if label.equals(shape):  # not ranked again
        rows = metrics.ranked(frame)
        return rows.assign(_shape=rows["workload"])
    return metrics.ranked(frame.assign(workload=label, _shape=shape))


@cache_per_frame
def best_by(frame: pd.DataFrame, rule: str) -> pd.DataFrame:
    """The best row of each label and number of devices by one of `RULES`, like `metrics.best_configurations`.

    Added columns: ``label``, ``rank_by``, ``mfu_percent`` (as the study counts it) and ``memory_gb`` (reserved, GiB, as
    in the study). Rows without a value, and rows whose losses contradict the reference, have no rank. By throughput
    only rows at the usual batch are ranked (`results.statistics.ranking.of_usual_batch`).
    """
    rows = metrics.with_rank(_by_study_label(frame))
    if rule == "published_mfu":
        rows = rows.assign(_value=published_mfu(rows))
    else:
        rows = ranking.of_usual_batch(rows, metrics.GROUP).assign(_value=lambda own: own[metrics.RANK_BY])
    rows = rows[rows["_value"].notna()]
    best = metrics.lead(rows.sort_values("_value", ascending=False, kind="stable"), "_value")
    best = labels.in_group_order(best)
    return best.assign(
        label=best["workload"],
        workload=best["_shape"],
        node_count=node_count(best),
        rank_by=rule,
        mfu_percent=100 * published_mfu(best),
        memory_gb=best["peak_reserved_bytes"] / GIB,
    )
