"""Ranking, winners and failures: from the attempts of one cohort to the tables behind figures and sentences."""

from __future__ import annotations

import pandas as pd

from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import DECIDING, decided, last_attempts
from results.statistics import noise, ranking
from results.statistics.errors_of_predictions import relative_errors
from results.statistics.grade import INTERVAL

RANK_BY = "tokens_per_s_per_gpu"
MFU = "mfu_palm"
"""MFU shown where there is room for one: PaLM's (arXiv:2204.02311, appendix B), as in most published tables. The tables
have all definitions."""
MFU_NAME = "MFU (PaLM)"
MFU_PEAKS = (
    "An MFU is relative to the device's peak in the precision of the run. The FP8 peak is twice the BF16 peak, so "
    "at the same speed a run in FP8 has half the MFU."
)
GROUP = ["workload", "world_size"]
"""Columns within which layouts are ranked: one model (and sequence length) on one number of devices."""
_RATES = (RANK_BY, "tokens_per_s", "mfu_palm", "mfu_causal", "mfu_playbook", "hfu", "published_mfu")
"""Columns proportional to the throughput."""
OVERHEAD = {
    "spawn_s": "spawn",
    "rendezvous_s": "rendezvous",
    "build_s": "build",
    "warmup_s": "warm-up",
    "timed_s": "timed steps",
    "teardown_s": "teardown",
}


losses_differ = ranking.losses_differ


@cache_per_frame
def ranked(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each layout that has a throughput, best first within each group
    (`results.statistics.ranking.of_layouts`).

    The row is that of the middle run by throughput, with the median rates (`_RATES`) and step times of all repeats,
    ``repeats``, ``repeat_spread``, ``rank``, and `results.statistics.noise.COLUMNS`.
    """
    # A frame has some 150 columns: rank on the few that count, then take the rows once.
    rows = ranking.of_layouts(frame[(frame["outcome"] == "ok") & frame[RANK_BY].notna()], GROUP, RANK_BY)
    representative = frame.loc[rows.index].reset_index(drop=True)
    pooled = rows["median"].array / representative[RANK_BY].array
    even = {name: representative[name] * pooled for name in _RATES if name in representative}
    return representative.assign(
        **even,
        step_time_s=representative["step_time_s"] / pooled,
        **{name: rows[name].array for name in (*noise.COLUMNS, "repeat_spread", "rank")},
    )


def with_rank(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ranked` that have a rank; the same frame if all have, since a copy of all columns costs much."""
    has_rank = rows["rank"].notna()
    return rows if has_rank.all() else rows[has_rank]


@cache_per_frame
def best_configurations(frame: pd.DataFrame) -> pd.DataFrame:
    """Fastest row of each group at the batch of most of its layouts (`results.statistics.ranking.of_usual_batch`), with
    the layouts that may be as fast and the gap to the next one; see `lead`."""
    rows = ranking.of_usual_batch(with_rank(ranked(frame)), GROUP)
    return lead(rows.sort_values("rank", kind="stable"), RANK_BY)


def lead(rows: pd.DataFrame, value: str, candidates: pd.Series | None = None) -> pd.DataFrame:
    """First row of each group of ``rows``, which must be sorted best first by ``value``; see
    `results.statistics.ranking.lead`."""
    return ranking.lead(rows, value, GROUP, "layout", candidates)


def is_tie(tie: object) -> bool:
    """Whether a value of the column ``tie`` is true; an unknown value is no tie."""
    return tie is not pd.NA and tie is not None and bool(tie)


def memory_column(frame: pd.DataFrame) -> str:
    """Column with the peak memory of these rows: allocated memory, or reserved memory if only that was recorded."""
    known = frame["peak_allocated_bytes"].notna().any() or frame["peak_reserved_bytes"].isna().all()
    return "peak_allocated_bytes" if known else "peak_reserved_bytes"


MEMORY_NAMES = {"peak_allocated_bytes": "peak allocated memory", "peak_reserved_bytes": "peak reserved memory"}


def group_counts(frame: pd.DataFrame) -> pd.DataFrame:
    """Number of points of each group by outcome of the deciding attempt: index `GROUP`, one column for each outcome.
    Points that have not run yet are left out."""
    return decided(frame, [*GROUP, "outcome"]).groupby([*GROUP, "outcome"]).size().unstack("outcome", fill_value=0)


def device_hours(frame: pd.DataFrame) -> pd.Series:
    """Device-hours that the attempts of each outcome held, see `held_hours`."""
    return held_hours(frame).groupby(frame["outcome"]).sum()


def held_hours(frame: pd.DataFrame) -> pd.Series:
    """Device-hours of each attempt, NaN if its duration is unknown. A rehearsal holds one device."""
    devices = frame["world_size"].where(frame["method"] == "measured", 1)
    return frame["duration_s"] * devices / 3600


def prediction_errors(frame: pd.DataFrame, predicted: str, found: str) -> pd.Series:
    """``predicted / found - 1`` of the finished runs that have both.

    The step time of a row traced without a device is itself a prediction, so such rows are left out of step times.
    """
    rows = frame[["outcome", "method", predicted, found]]
    rows = rows[(rows["outcome"] == "ok") & rows[predicted].notna() & (rows[found] > 0)]
    if found == "step_time_s":
        rows = rows[rows["method"] != "rehearsed_fake"]
    return pd.Series(relative_errors(rows[predicted], rows[found]), dtype=float)


def inside_interval(frame: pd.DataFrame) -> tuple[int, int]:
    """How many measured step times lie in the interval predicted before the run (ends included), and of how many: rows
    without a recorded interval do not count."""
    rows = frame.loc[(frame["outcome"] == "ok") & (frame["method"] == "measured"), [*INTERVAL, "step_time_s"]]
    rows = rows.dropna(subset=[*INTERVAL, "step_time_s"])
    low, high = (rows[name] for name in INTERVAL)
    return int(rows["step_time_s"].between(low, high).sum()), len(rows)


def rehearsed_beside_measured(attempts: pd.DataFrame) -> pd.DataFrame:
    """Peaks and step times of experiments that were both rehearsed on a device and measured on the same cluster.

    Only rows of one measurement version are joined. Relative differences are rehearsed over measured, minus 1.
    """
    keys = ["experiment_id", "cluster", "measurement_version"]
    columns = [*keys, "model", "world_size", "tp", "cp", "peak_allocated_bytes", "step_time_s"]
    final = last_attempts(attempts[[name for name in dict.fromkeys([*DECIDING, *columns]) if name in attempts]])
    final = final[final["outcome"] == "ok"]
    measured = final.loc[final["method"] == "measured", columns].drop_duplicates(keys, keep="last")
    rehearsed = final.loc[final["method"] == "rehearsed", [*keys, "peak_allocated_bytes", "step_time_s"]]
    both = measured.merge(
        rehearsed.drop_duplicates(keys, keep="last"), on=keys, suffixes=("_measured", "_rehearsed"), how="inner"
    )
    both["peak_difference"] = both["peak_allocated_bytes_rehearsed"] / both["peak_allocated_bytes_measured"] - 1
    both["step_time_difference"] = both["step_time_s_rehearsed"] / both["step_time_s_measured"] - 1
    return both.dropna(subset=["peak_difference", "step_time_difference"], how="all").reset_index(drop=True)


def step_spread(frame: pd.DataFrame) -> pd.Series:
    """Slowest over fastest timed step of each finished run, minus 1."""
    ok = frame.loc[frame["outcome"] == "ok", ["step_time_max_s", "step_time_min_s"]]
    return (ok["step_time_max_s"] / ok["step_time_min_s"] - 1).dropna()
