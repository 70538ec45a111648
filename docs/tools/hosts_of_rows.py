"""Identifies the host of each row and its launch time, for the tables of docs/accuracy_details.md."""

from __future__ import annotations

import pandas as pd


def host_of(rows: pd.DataFrame) -> pd.Series[str]:
    """Host of each row, identified by the id of its first device."""
    return rows["device_ids"].map(lambda ids: str(ids[0]))


def launch_s(rows: pd.DataFrame) -> float | None:
    """Median seconds per launch of one host's rows, without rows whose allocator had to free its cache; None:
    unknown."""
    median_s = rows.loc[~(rows["allocator_retries"] > 0), "host_launch_s"].median()
    return None if pd.isna(median_s) else float(median_s)
