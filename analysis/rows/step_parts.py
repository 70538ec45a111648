"""The parts of a step's time: which columns hold them, and what share of the step each part takes.

Measured rows time forward and backward (with the collectives inside them: tensor parallelism's, ZeRO 3's gathers), the
gradient reduction that is left exposed after the last backward, waiting for other pipeline stages, and the optimizer.
Each is a mean over ranks of medians over steps. Rehearsed rows have compute (with bubble and optimizer) and the
modelled communication. What those leave of the step is `REST`: a little above or below 0, as the step is the slowest
rank's.
"""

from __future__ import annotations

import pandas as pd

MEASURED = {
    "forward_backward_s": "forward and backward",
    "reduce_exposed_s": "exposed reduction",
    "pipeline_idle_s": "pipeline bubble",
    "optimizer_s": "optimizer",
}
REHEARSED = {
    "compute_time_s": "compute, bubble and optimizer",
    "communication_time_s": "modelled communication",
}
REST = "rest"


def parts_of(frame: pd.DataFrame) -> dict[str, str]:
    """The columns that these rows split their steps by, with their names; empty when they have none."""
    for parts in (MEASURED, REHEARSED):
        if frame[list(parts)].notna().all(axis=1).any():
            return parts
    return {}


def names_of(frame: pd.DataFrame) -> list[str]:
    """The names of the parts that `shares` gives for these rows; empty when they have none."""
    parts = parts_of(frame)
    return [*parts.values(), REST] if parts else []


def shares(rows: pd.DataFrame, parts: dict[str, str]) -> pd.DataFrame:
    """Each part of the step as a fraction of it, by name, and `REST`; they sum to 1."""
    found = pd.DataFrame({name: rows[column] / rows["step_time_s"] for column, name in parts.items()})
    return found.assign(**{REST: 1 - found.sum(axis=1, skipna=False)})
