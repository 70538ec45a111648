"""The best configuration of each model and number of devices, by two rules: the published MFU and the throughput.

The study ranked by an MFU whose FLOPs count tied embeddings twice once a pipeline splits them, so that it favours
pipelines; throughput per device has no such term. `best_by` ranks by either.
"""

from __future__ import annotations

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text import GIB

RULES = ("published_mfu", "tokens_per_s")
"""Names of the rules, as in the column ``rank_by``."""


def published_mfu(frame: pd.DataFrame) -> pd.Series:
    """The MFU that the study ranks by, a fraction: as published, else by the same formula (``mfu_playbook``)."""
    own = frame["mfu_playbook"]
    return frame["published_mfu"].fillna(own) if "published_mfu" in frame else own


def node_count(frame: pd.DataFrame) -> pd.Series:
    """Number of nodes that the ranks ran on, where recorded. Unknown for rehearsals, which run on one device."""

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
    """Ranked rows, grouped by the study's labels; ``_shape`` is the workload."""
    return metrics.ranked(frame.assign(workload=labels.study_label(frame), _shape=frame["workload"]))


def of_usual_batch(rows: pd.DataFrame) -> pd.DataFrame:
    """Of ranked rows those with the tokens a step that most layouts of their model and number of devices have: a
    throughput at another batch is no answer to the same question. Of batches with equally many the smallest."""
    if rows.empty:
        return rows
    counts = rows.groupby([*metrics.GROUP, "tokens_per_step"]).size().rename("layouts").reset_index()
    counts = counts.sort_values(["layouts", "tokens_per_step"], ascending=[False, True], kind="stable")
    usual = counts.drop_duplicates(metrics.GROUP).set_index(metrics.GROUP)["tokens_per_step"]
    own = usual.reindex(pd.MultiIndex.from_frame(rows[metrics.GROUP])).to_numpy()
    found: pd.DataFrame = rows[rows["tokens_per_step"].to_numpy() == own]
    return found


@cache_per_frame
def best_of_usual_batch(frame: pd.DataFrame) -> pd.DataFrame:
    """Like `metrics.best_configurations`, of the layouts `of_usual_batch`."""
    rows = metrics.ranked(frame)
    rows = of_usual_batch(rows[rows["rank"].notna()])
    return metrics.lead(rows.sort_values("rank", kind="stable"), metrics.RANK_BY)


@cache_per_frame
def best_by(frame: pd.DataFrame, rule: str) -> pd.DataFrame:
    """The best row of each label and number of devices by one of `RULES`, like `metrics.best_configurations`.

    ``label``, ``rank_by``, ``mfu_percent`` (as the study counts it) and ``memory_gb`` (reserved, GiB, as in the study)
    stand beside them. Rows without a value have no rank; nor have rows whose losses contradict the reference.
    """
    rows = _by_study_label(frame)
    rows = rows[rows["rank"].notna()]
    if rule == "published_mfu":
        rows = rows.assign(_value=published_mfu(rows))
    else:
        rows = rows.assign(_value=rows[metrics.RANK_BY])
    rows = rows[rows["_value"].notna()]
    best = metrics.lead(rows.sort_values("_value", ascending=False, kind="stable"), "_value")
    return told(
        labels.in_group_order(best).assign(_label=lambda own: own["workload"], workload=lambda own: own["_shape"]), rule
    )


def told(best: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Winners by a rule with ``label``, ``rank_by``, ``node_count`` and the study's MFU and memory beside them."""
    return best.assign(
        label=best["_label"] if "_label" in best else labels.study_label(best),
        node_count=node_count(best),
        rank_by=rule,
        mfu_percent=100 * published_mfu(best),
        memory_gb=best["peak_reserved_bytes"] / GIB,
    )
