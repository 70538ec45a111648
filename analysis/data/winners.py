"""The best configuration of each model and number of devices, by two rules: the published MFU and the throughput.

The study ranked by an MFU whose FLOPs count tied embeddings twice once a pipeline splits them, so that it favours
pipelines; throughput per device has no such term. `best_by` ranks by either, and `table` puts both side by side.
"""

from __future__ import annotations

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame

RULES = ("published_mfu", "tokens_per_s")
"""Values of the table's ``rank_by``."""
_COLUMNS = {
    "label": "model",
    "node_count": "nodes",
    "rank_by": "rank_by",
    "mfu_percent": "mfu_percent",
    "memory_gb": "memory_gb",
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "num_microbatches": "acc",
    "micro_batch_size": "mbs",
    "zero_stage": "zero",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
}
_BESIDE = (
    *("world_size", "seq_len", "layout", "candidates", "runner_up", "margin", "tie"),
    *("mfu_palm", "peak_allocated_bytes", "peak_reserved_bytes", "network_regime", "engine_version"),
    *("experiment_id", "attempt_id"),
)


def published_mfu(frame: pd.DataFrame) -> pd.Series:
    """The MFU that the study ranks by, a fraction: as published, else by the same formula (``mfu_playbook``)."""
    own = frame["mfu_playbook"]
    return frame["published_mfu"].fillna(own) if "published_mfu" in frame else own


def node_count(frame: pd.DataFrame) -> pd.Series:
    """Nodes that the ranks ran on, where it is recorded; of rehearsals, which take one device, it is unknown."""

    def several(value: object) -> float:
        return float(len(set(value))) if isinstance(value, (list, tuple)) or hasattr(value, "tolist") else float("nan")  # type: ignore[call-overload]

    counts = pd.Series(float("nan"), index=frame.index)
    for column in ("nodes", "hosts"):
        counts = counts.fillna(frame[column].map(several).replace(0, float("nan")))
    counts = counts.where(frame["method"] == "measured")
    if "node_count" in frame:
        counts = frame["node_count"].fillna(counts)
    return counts.astype("Int64")


def best_by(frame: pd.DataFrame, rule: str) -> pd.DataFrame:
    """The best row of each label and number of devices by one of `RULES`, like `metrics.best_configurations`.

    ``label``, ``rank_by``, ``mfu_percent`` (as the study counts it) and ``memory_gb`` (reserved, GiB, as in the study)
    stand beside them. Rows without a value have no rank; nor have rows whose losses contradict the reference.
    """
    rows = metrics.ranked(frame.assign(workload=labels.study_label(frame), _shape=frame["workload"]))
    rows = rows[rows["rank"].notna()]
    if rule == "published_mfu":
        rows = rows.assign(_value=published_mfu(rows))
    else:
        rows = rows.assign(_value=rows[metrics.RANK_BY])
    rows = rows[rows["_value"].notna()]
    best = metrics.lead(rows.sort_values("_value", ascending=False, kind="stable"), "_value")
    best = labels.in_group_order(best)
    return best.assign(
        label=best["workload"],
        workload=best["_shape"],
        node_count=node_count(best),
        rank_by=rule,
        mfu_percent=100 * published_mfu(best),
        memory_gb=best["peak_reserved_bytes"] / labels.GIB,
    )


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Both rankings, one row a winner; ``memory_gb`` is reserved memory in GiB, ``shape`` the model by its shape."""
    rows = pd.concat([best_by(frame, rule) for rule in RULES], ignore_index=True)
    beside = [name for name in _BESIDE if name in rows]
    return rows[[*_COLUMNS, "workload", *beside]].rename(columns=_COLUMNS | {"workload": "shape"})


def published_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Those rows of `table` that the study's own ranking gives."""
    rows = table(frame)
    return rows[rows["rank_by"] == "published_mfu"].reset_index(drop=True)
