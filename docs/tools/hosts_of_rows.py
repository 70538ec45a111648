"""Which rows are of one host, and how long it took to launch an operation: for the tables of docs/accuracy.md."""

from __future__ import annotations

import pandas as pd


def host_of(rows: pd.DataFrame) -> pd.Series[str]:
    """A host is told by the first of a row's devices."""
    return rows["device_ids"].map(lambda ids: str(ids[0]))


def launch_s(rows: pd.DataFrame) -> float | None:
    """Seconds of a launch, the middle of those rows of one host that tell of it and whose allocator did not stop to
    free its cache; None: there are none."""
    found = rows.loc[~(rows["allocator_retries"] > 0), "host_launch_s"].median()
    return None if pd.isna(found) else float(found)
