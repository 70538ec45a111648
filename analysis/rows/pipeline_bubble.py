"""The pipeline bubble: its closed form, and what runs with a pipeline really waited."""

from __future__ import annotations

from typing import TypeVar

import pandas as pd

Number = TypeVar("Number", float, pd.Series)


def closed_form(depth: Number, micro_batches: Number, virtual_stages: Number) -> Number:
    """Idle time of a pipeline rank over its working time: ``(p − 1) / (v m)`` (Narayanan 2021, arXiv:2104.04473)."""
    return (depth - 1) / (virtual_stages * micro_batches)


def waited(frame: pd.DataFrame) -> pd.DataFrame:
    """Finished runs with a pipeline whose waiting was timed.

    ``bubble`` is the closed form. ``measured`` is idle over busy time: it holds all waiting for another stage, so
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
            "bubble": closed_form(rows["pp"], rows["num_microbatches"], virtual),
            "measured": rows["pipeline_idle_s"] / (rows["step_time_s"] - rows["pipeline_idle_s"]),
            "schedule": rows["pp_schedule"],
            "attempt_id": rows["attempt_id"],
        }
    ).reset_index(drop=True)
