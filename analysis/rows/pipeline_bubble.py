"""The pipeline bubble: the idle share of a schedule with equal ranks, and the waiting measured in runs with a
pipeline."""

from __future__ import annotations

from typing import TypeVar

import pandas as pd

from workloads.costs.shape.schedule import INTERLEAVED, V_SHAPED
from workloads.costs.time.pipeline import pipeline_time_s

Number = TypeVar("Number", float, pd.Series)


def closed_form(depth: Number, micro_batches: Number, virtual_stages: Number) -> Number:
    """Idle time of a pipeline rank over its working time: ``(p − 1) / (v m)`` (Narayanan 2021, arXiv:2104.04473).

    The formula holds for GPipe and 1F1B with v = 1, and for interleaved 1F1B if m is a multiple of p.
    """
    return (depth - 1) / (virtual_stages * micro_batches)


def of_schedule(name: str, depth: int, micro_batches: int, virtual_stages: int) -> float:
    """Idle time of all ranks over their working time for any schedule: `closed_form` where it holds, otherwise by
    simulation.

    Ranks are equal, sending is free, and a backward takes as long as two forwards: one for the input gradient, one for
    the weight gradient.
    """
    if name not in (*INTERLEAVED, *V_SHAPED):
        return closed_form(float(depth), float(micro_batches), 1.0)
    virtual_stages = 2 if name in V_SHAPED else virtual_stages
    total = pipeline_time_s(name, [1.0] * depth, [2.0] * depth, micro_batches, virtual_stages=virtual_stages)
    return total / (3.0 * micro_batches) - 1


def of_rows(rows: pd.DataFrame) -> pd.Series:
    """`of_schedule` of each row with ``pp`` and ``num_microbatches``; an unknown schedule counts as 1F1B."""
    asked = pd.DataFrame(
        {
            "name": rows["pp_schedule"].fillna("1f1b").astype(str),
            "p": rows["pp"].astype(int),
            "m": rows["num_microbatches"].astype(int),
            "v": rows["virtual_stages"].fillna(1).astype(int),
        }
    )
    bubbles = {key: of_schedule(*key) for key in asked.drop_duplicates().itertuples(index=False, name=None)}
    return pd.Series([bubbles[key] for key in asked.itertuples(index=False, name=None)], index=rows.index, dtype=float)


def waited(frame: pd.DataFrame) -> pd.DataFrame:
    """Finished runs with a pipeline whose waiting was timed.

    ``bubble`` is the idle share of the schedule with equal ranks. ``measured`` is idle over busy time; it includes all
    waiting for other ranks, so also waiting caused by stages of unequal length.
    """
    rows = frame[(frame["outcome"] == "ok") & (frame["pp"] > 1) & frame["pipeline_idle_s"].notna()]
    return pd.DataFrame(
        {
            "workload": rows["workload"],
            "layout": rows["layout"],
            "p": rows["pp"],
            "m": rows["num_microbatches"],
            "v": rows["virtual_stages"].fillna(1),
            "bubble": of_rows(rows),
            "measured": rows["pipeline_idle_s"] / (rows["step_time_s"] - rows["pipeline_idle_s"]),
            "schedule": rows["pp_schedule"],
            "attempt_id": rows["attempt_id"],
        }
    ).reset_index(drop=True)
