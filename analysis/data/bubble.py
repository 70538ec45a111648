"""The pipeline bubble: its closed form over micro-batches and virtual stages, and what runs really waited."""

from __future__ import annotations

import itertools

import pandas as pd

from analysis.rows import labels
from analysis.rows.frame_cache import cache_per_frame

DEPTH = 8
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
VIRTUAL_STAGES = (1, 2, 4, 8)


def closed_form(depth: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle time of a pipeline rank over its working time: ``(p − 1) / (v m)`` (Narayanan 2021, arXiv:2104.04473)."""
    return (depth - 1) / (virtual_stages * micro_batches)


def sizes(depth: int = DEPTH) -> pd.DataFrame:
    """The closed form at one depth, smallest first: columns ``p``, ``m``, ``v``, ``bubble``."""
    rows = [
        {"p": depth, "m": m, "v": v, "bubble": closed_form(depth, m, v)}
        for m, v in itertools.product(MICRO_BATCHES, VIRTUAL_STAGES)
    ]
    return pd.DataFrame(rows).sort_values(["bubble", "v", "m"], ascending=[True, False, True], ignore_index=True)


def waited(frame: pd.DataFrame) -> pd.DataFrame:
    """Finished runs with a pipeline whose waiting was timed.

    ``bubble`` is the closed form and ``measured`` idle over busy time, which holds all waiting for another stage, so
    also that for stages of unequal length.
    """
    rows = frame[(frame["outcome"] == "ok") & (frame["pp"] > 1) & frame["pipeline_idle_s"].notna()]
    virtual = rows["virtual_stages"].fillna(1)
    return pd.DataFrame(
        {
            "workload": rows["workload"],
            "layout": rows["layout"],
            "p": rows["pp"],
            "m": rows["num_microbatches"],
            "v": virtual,
            "bubble": (rows["pp"] - 1) / (virtual * rows["num_microbatches"]),
            "measured": rows["pipeline_idle_s"] / (rows["step_time_s"] - rows["pipeline_idle_s"]),
            "schedule": rows["pp_schedule"],
            "attempt_id": rows["attempt_id"],
        }
    ).reset_index(drop=True)


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """`sizes` and `waited` in one table, told apart by ``source``: ``closed form`` or ``measured``."""
    parts = [sizes().assign(source="closed form")]
    measured = waited(frame)
    if len(measured):
        parts.append(measured.assign(source="measured"))
    return pd.concat(parts, ignore_index=True)


def order(frame: pd.DataFrame) -> list[str]:
    """Workloads that have a timed pipeline, smallest first."""
    have = set(waited(frame)["workload"])
    return [name for name in labels.workload_order(frame) if name in have]
