"""Cells of the study's raw table as a grid with one point per layout, and the step times that a stand-in reports (see
`standin`).

The rows are those that ``search --replay`` uses (`sweep.searching.recorded`): one network regime, one row per layout. A
layout that failed for another reason than memory is left out: the table does not tell its step time.
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
"""Hidden size that identifies the rows of a model of this program."""
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
    """Seconds; None: the layout ran out of memory."""

    @property
    def key(self) -> str:
        return layout_key(self, self.model)


def read_cells(table: Path, cells: Sequence[tuple[str, int]]) -> list[Layout]:
    """All layouts of these cells, each a model and a number of GPUs, that ran or ran out of memory."""
    frame = read_recorded(table)
    layouts = []
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
                layouts.append(layout)
    assert len({one.key for one in layouts}) == len(layouts), "a layout has two rows"
    return layouts


def grid_of(layouts: Sequence[Layout]) -> str:
    """A grid file of exactly these layouts."""
    rows: dict[str, list[Any]] = {axis: [getattr(one, axis) for one in layouts] for axis in AXES}
    return GRID.format(rows=rows)


def answers_of(layouts: Sequence[Layout]) -> dict[str, float | None]:
    """The step time that the stand-in of each layout reports, in seconds; None: it runs out of memory."""
    return {one.key: one.step_time_s for one in layouts}


def fastest(layouts: Sequence[Layout], model: str, world_size: int) -> Layout:
    """The layout with the smallest step time of a cell, as a run of every layout would find it."""
    ran = [one for one in layouts if (one.model, one.world_size) == (model, world_size) and one.step_time_s]
    return min(ran, key=lambda one: one.step_time_s or 0.0)
