"""The parts of a step's time: their columns, and the share of the step that each part takes.

Measured rows time forward and backward (including tensor-parallel collectives and ZeRO 3 all-gathers), the gradient
reduction exposed after the last backward, waiting for other pipeline stages, and the optimizer. Each is a mean over
ranks of medians over steps. Rehearsed rows have compute (with bubble and optimizer) and modelled communication. `REST`
is the remainder of the step, a little above or below 0 because the step time is that of the slowest rank.
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
    """Columns that split the steps of these rows, with their names; empty if there are none."""
    for parts in (MEASURED, REHEARSED):
        if frame[list(parts)].notna().all(axis=1).any():
            return parts
    return {}


def names_of(frame: pd.DataFrame) -> list[str]:
    """Names of the parts that `shares` gives for these rows; empty if there are none."""
    parts = parts_of(frame)
    return [*parts.values(), REST] if parts else []


def shares(rows: pd.DataFrame, parts: dict[str, str]) -> pd.DataFrame:
    """Each part as a fraction of the step, by name, and `REST`; the fractions sum to 1."""
    part_shares = pd.DataFrame({name: rows[column] / rows["step_time_s"] for column, name in parts.items()})
    return part_shares.assign(**{REST: 1 - part_shares.sum(axis=1, skipna=False)})
