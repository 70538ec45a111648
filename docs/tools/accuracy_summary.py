"""The first table of docs/accuracy.md: lines of its other tables, and the error of the closed form of peak memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from docs.tools.accuracy_of_plans import points_of, recorded_attempts
from docs.tools.accuracy_scores import percent
from results.statistics.errors_of_predictions import relative_errors, summary
from sweep.predicting.codebases import read_clusters
from workloads.costs.memory.estimate import peak_stage

HEAD = """| what is predicted, from what | runs | mean error | median | bias | inside 90 % |
|---|---:|---:|---:|---:|---:|"""


class Line(NamedTuple):
    """A line of another table: its section, its first cell, and what it is called here."""

    section: str
    first: str
    name: str


LINES = (
    Line("plans", "h200, as recorded, when each was run", "step time on H200, predicted before each run"),
    Line("plans", "h200, now, nothing measured before", "the same runs, today's form, nothing measured"),
    Line("captured", "all, nothing measured", "of these, steps captured as CUDA graphs"),
    Line(
        "captured",
        "all, as stored before each run, with today's widths",
        "the captured steps as predicted before each run, with today's intervals",
    ),
    Line("captured", "all, one model left out", "the captured steps, from those of the other models"),
    Line("plans", "h100_ib400, as recorded, when each was run", "step time on H100, predicted before each run"),
    Line("recorded", "NVIDIA H200, one model left out", "step time on H200, from the rows of other models"),
    Line("recorded", "of these, where the device sets the pace", "of these, device-bound"),
    Line("recorded", "of these, where the host does", "of these, host-bound"),
    Line(
        "engines",
        "megatron .* with Transformer Engine .* nothing measured",
        "Megatron-Core as an engine, its structure",
    ),
    Line("engines", "torchtitan .*, nothing measured", "torchtitan as an engine, its structure"),
    Line("public", "all rows, nothing fitted", "runs that other teams published, nothing fitted"),
    Line("public", "dense models, nothing fitted", "of these, dense models"),
    Line("public", "mixtures of experts, nothing fitted", "of these, mixtures of experts"),
    Line("study", "nothing fitted", "the study's runs (nanotron on H100), nothing fitted"),
    Line("study", "the whole table of the other models", "the study's runs, from those of its other models"),
    Line("a100", "vtrain_ground_truth_single, nothing fitted", "Megatron-DeepSpeed on A100, nothing fitted"),
)
"""Lines of the summary."""
CELLS = (("rows", "predictions"), ("MAPE", "step time"), ("median",), ("bias",), ("inside 90 %",))
"""Columns of the summary, by the names that they have in other tables."""


def section(pages: str) -> str:
    """``pages``: the text of the pages with the other sections."""
    return "\n".join([HEAD, peaks(), *(_line(one, section_of(pages, one.section)) for one in LINES)])


def section_of(pages: str, name: str) -> str:
    """The text between a section's marks. Raises `ValueError` if no page has them."""
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", pages, re.DOTALL)
    if found is None:
        raise ValueError(f"no page has a section {name}")
    return found[1]


def _line(line: Line, text: str) -> str:
    cells = cells_of(text, line.first)
    values = (next((cells[name] for name in names if name in cells), "–") for names in CELLS)
    return f"| {line.name} | {' | '.join(values)} |"


def cells_of(text: str, first: str) -> Mapping[str, str]:
    """Cells of the first row of a table whose first cell matches a pattern, by column. Raises `ValueError` if there is
    none."""
    names: list[str] = []
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")] if row.startswith("| ") else []
        if cells and re.fullmatch(first, cells[0]):
            return dict(zip(names, cells, strict=True))
        names = cells if cells and not names else names
        names = names if row else []
    raise ValueError(f"no row {first}")


def peaks() -> str:
    """Peaks of allocated tensors of this engine, the closed form beside recorded measurements."""
    points = points_of(recorded_attempts())
    workspaces = {name: one.device.workspace_bytes for name, one in read_clusters().items()}
    own = points["cluster"].map(workspaces)
    predicted = pd.Series([peak_stage(one).peak_bytes for one in points["experiment"]], index=points.index) + own
    errors = relative_errors(predicted, points["peak_allocated_bytes"])
    found = summary(errors)
    assert found is not None
    bias = f"{100 * found.bias:+.2f} %"
    cells = [f"{found.n:,}", f"{100 * found.mape:.2f} %", f"{100 * found.median_size:.2f} %", bias, "–"]
    name = f"peak memory of this engine, closed form (largest error {percent(abs(errors).max())})"
    return f"| {name} | {' | '.join(cells)} |"
