"""Throughput over one degree of parallelism: one run for each degree, and the loss relative to the degree before.

Each degree is represented by its fastest run, as in the study: runs of two degrees may also differ in micro-batch,
accumulation and ZeRO stage. All runs of a workload have the same tokens per step and the same precision: those that
most of its rows have. Repeats count once (`analysis.rows.metrics.ranked`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.rows import labels, metrics, pairs, pipeline_bubble
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import GIB

_KEPT = (
    *("workload", "axis", "degree", "series", "world_size", "tokens_per_s_per_gpu", "lost", "lost_share"),
    *("memory_gib", "memory_kind", "largest_micro_batch", "candidates", "layout", "dp", "tp", "pp", "zero_stage"),
    *("micro_batch_size", "num_microbatches", "global_batch_size", "bubble", "mfu_palm", "network_regime"),
    *("experiment_id", "attempt_id"),
)
PLACE = ["workload", "world_size", "network_regime"]
"""Columns that identify the devices and the network regime of a run."""
PP_SERIES = ("m = p − 1", "m = p", "m = 32")


@cache_per_frame
def data_parallel(frame: pd.DataFrame) -> pd.DataFrame:
    """Pure data parallelism: the fastest run of each degree, with one ZeRO stage for each workload.

    The stage is the one that reaches the most degrees; the lowest of several.
    """
    rows = _comparable(frame)
    rows = rows[(rows["tp"] == 1) & (rows["pp"] == 1) & rows["zero_stage"].notna()]
    if rows.empty:
        return _table(rows)
    # One rank has nothing to shard, so its run starts every stage's series.
    sizes = rows.groupby(["workload", "zero_stage"])["dp"].nunique().reset_index()
    sizes = sizes.sort_values(["workload", "dp", "zero_stage"], ascending=[True, False, True])
    stage = sizes.drop_duplicates("workload").set_index("workload")["zero_stage"]
    rows = rows[(rows["zero_stage"] == rows["workload"].map(stage)) | (rows["dp"] == 1)]
    series = "ZeRO " + rows["workload"].map(stage).astype(int).astype(str)
    return _table(_fastest(rows.assign(axis="dp", degree=rows["dp"], series=series)))


@cache_per_frame
def tensor_parallel(frame: pd.DataFrame) -> pd.DataFrame:
    """Tensor parallelism without a pipeline, each degree on the smallest number of devices that ran it.

    ``largest_micro_batch`` is the largest one that finished: larger ones may fit but were not run.
    """
    rows = _comparable(frame)
    rows = rows[rows["pp"] == 1]
    rows = rows.assign(axis="tp", degree=rows["tp"], series="sequence parallel")
    rows = rows[rows["sequence_parallel"].fillna(True).astype(bool)]
    return _table(_fastest(_fewest_devices(rows)))


@cache_per_frame
def pipeline_parallel(frame: pd.DataFrame) -> pd.DataFrame:
    """Pipelines without tensor parallelism, with few micro-batches and with 32.

    Each number of devices and network regime is separate: a deeper pipeline on more devices would show the network, not
    the pipeline. ``m = p − 1`` is the study's short schedule; sweeps whose micro-batch counts are powers of two have
    ``m = p`` instead. The study's runs before its pipeline communication was rewritten are left out. ``bubble`` is the
    idle share of the schedule with equal ranks.
    """
    return _table(_fastest(pipelines(frame), PLACE), PLACE)


def pipelines(frame: pd.DataFrame) -> pd.DataFrame:
    """Every run that `pipeline_parallel` chooses from, once for each ``series`` it belongs to."""
    rows = _comparable(frame)
    rows = rows[(rows["tp"] == 1) & (rows["pp"] > 1)]
    # before the rewrite of its pipeline communication the study's engine was a different one
    if "after_pp_fix" in rows:
        rows = rows[rows["after_pp_fix"].fillna(True).astype(bool)]
    rows = rows.assign(axis="pp", degree=rows["pp"], bubble=pipeline_bubble.of_rows(rows))
    asked = {PP_SERIES[0]: rows["pp"] - 1, PP_SERIES[1]: rows["pp"], PP_SERIES[2]: 32}
    parts = [rows[rows["num_microbatches"] == count].assign(series=name) for name, count in asked.items()]
    return pd.concat(parts)


def _comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows without context parallelism, at the precision and the tokens per step that most rows of the workload
    have."""
    rows = pairs.candidates(frame)
    rows = pairs.of_usual_precision(rows) if len(rows) else rows
    return rows[rows["cp"].fillna(1) == 1]


def _fewest_devices(rows: pd.DataFrame) -> pd.DataFrame:
    fewest = rows.groupby(["workload", "series", "degree"])["world_size"].transform("min")
    return rows[rows["world_size"] == fewest]


def _fastest(rows: pd.DataFrame, within: Sequence[str] = ("workload",)) -> pd.DataFrame:
    keys = [*within, "series", "degree"]
    ordered = rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    groups = ordered.groupby(keys, dropna=False)
    ordered = ordered.assign(
        candidates=groups["attempt_id"].transform("size"),
        largest_micro_batch=groups["micro_batch_size"].transform("max"),
    )
    return ordered.drop_duplicates(keys)


def _table(rows: pd.DataFrame, within: Sequence[str] = ("workload",)) -> pd.DataFrame:
    """Table with the columns of a scaling figure; ``lost`` is how much slower a degree is than the previous one of its
    series."""
    if rows.empty:
        return pd.DataFrame(columns=list(_KEPT))
    order = {workload: i for i, workload in enumerate(labels.workload_order(rows))}
    rows = rows.assign(_order=rows["workload"].map(order))
    rows = rows.sort_values(["_order", *within[1:], "series", "degree"], kind="stable")
    before = rows.groupby([*within, "series"], dropna=False)[metrics.RANK_BY].shift()
    memory = metrics.memory_column(rows)
    rows = rows.assign(
        lost=before - rows[metrics.RANK_BY],
        lost_share=1 - rows[metrics.RANK_BY] / before,
        memory_gib=rows[memory] / GIB,
        memory_kind=metrics.MEMORY_NAMES[memory],
    )
    return rows[[name for name in _KEPT if name in rows]].reset_index(drop=True)
