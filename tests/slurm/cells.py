"""Cells of the study's raw table as a grid of one point a layout, and what a stand-in says of each (see `standin`).

The rows are those that ``search --replay`` takes (`sweep.searching.recorded`): one network regime, one row a layout. A
layout that failed for another reason than memory has no place here: the table does not say what it would have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from sweep.searching.recorded import read_recorded, recorded_space
from tests.slurm.standin import layout_key

HIDDEN = {"llama1.34b": 2048, "llama3.57b": 3072, "llama8.86b": 4096, "llama80b": 8192, "llama469b": 16384}
"""By model of this program: the hidden size by which its rows are found."""
AXES = ("model", "world_size", "tp", "pp", "dp", "micro_batch_size", "zero_stage")
GRID = """
cluster: h100_efa
zip:
  rows: {rows}
axes: {{cp: 1, global_batch_size: 256, seq_len: 4096, pp_schedule: 1f1b}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A row of the table."""

    model: str
    world_size: int
    dp: int
    tp: int
    pp: int
    micro_batch_size: int
    zero_stage: int
    step_time_s: float | None
    """None: it ran out of memory."""

    @property
    def key(self) -> str:
        return layout_key(self, self.model)


def read_cells(table: Path, cells: Sequence[tuple[str, int]]) -> list[Layout]:
    """All layouts of these cells, each a model and a number of GPUs, that ran or ran out of memory."""
    frame = read_recorded(table)
    found = []
    for model, gpus in cells:
        own = frame[(frame["hidden"] == HIDDEN[model]) & (frame["gpus"] == gpus)].reset_index(drop=True)
        recorded = recorded_space(own, calibrated=False)
        for place, outcome in enumerate(recorded.outcome):
            if outcome != "other":
                x, seconds = recorded.points, float(recorded.step_time_s[place])
                layout = Layout(
                    model=model,
                    world_size=gpus,
                    dp=int(x.dp[place]),
                    tp=int(x.tp[place]),
                    pp=int(x.pp[place]),
                    micro_batch_size=int(x.mbs[place]),
                    zero_stage=int(x.zero[place]) if x.dp[place] > 1 else 0,
                    step_time_s=seconds if isfinite(seconds) else None,
                )
                assert (outcome == "ok") == (layout.step_time_s is not None)
                found.append(layout)
    assert len({one.key for one in found}) == len(found), "a layout has two rows"
    return found


def grid_of(layouts: Sequence[Layout]) -> str:
    """A grid file of exactly these layouts."""
    rows: dict[str, list[Any]] = {axis: [getattr(one, axis) for one in layouts] for axis in AXES}
    return GRID.format(rows=rows)


def answers_of(layouts: Sequence[Layout]) -> dict[str, float | None]:
    """The step time that a stand-in of each layout says, in seconds; None: it runs out of memory."""
    return {one.key: one.step_time_s for one in layouts}


def fastest(layouts: Sequence[Layout], model: str, world_size: int) -> Layout:
    """What running every layout of a cell would find: the one with the smallest step time."""
    ran = [one for one in layouts if (one.model, one.world_size) == (model, world_size) and one.step_time_s]
    return min(ran, key=lambda one: one.step_time_s or 0.0)
