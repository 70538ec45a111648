"""The table of training curves, and the bands that they are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from docs.tools.curves.curve_bands import (
    FIRST_STEPS,
    LAYOUT_BANDS,
    ONE_RANK,
    PRECISION_BANDS,
    WINDOW,
    collapsed,
    distances,
)
from docs.tools.curves.curve_table import by_run, read_curves, write_curves
from docs.tools.curves.runs import REFERENCE
from results.errors import InvalidResults
from results.tables.files import write_parquet

STEPS = 4 * WINDOW


def curve(
    precision: str, layout: str = ONE_RANK, *, off: dict[int, float] | None = None, held_out: float | None = 2.0
) -> list[dict[str, Any]]:
    """A run that falls from 5 to 2 in a line; ``off``: what is added to the loss of some steps."""
    return [
        {
            "run": f"m {precision} {layout}",
            "experiment_id": "m-1",
            "model": "m",
            "precision": precision,
            "layout": layout,
            "world_size": 1,
            "step": step,
            "loss": 5 - 3 * step / (STEPS - 1) + (off or {}).get(step, 0.0),
            "load_entropy": None,
            "held_out_loss": held_out if step == STEPS - 1 else None,
        }
        for step in range(STEPS)
    ]


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.parquet"
    write_curves(path, [*curve("fp32"), *curve("bf16")])
    rows = read_curves(path)
    assert [row["loss"] for row in rows[:STEPS]] == [row["loss"] for row in curve("fp32")]
    assert rows[0]["held_out_loss"] is None and rows[0]["grad_norm"] is None
    assert list(by_run(rows[::-1])) == ["m bf16 one rank", "m fp32 one rank"]
    assert [row["step"] for row in by_run(rows[::-1])["m fp32 one rank"]] == list(range(STEPS))


def test_what_is_no_table_of_curves_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "curves.parquet"
    with pytest.raises(InvalidResults, match="no such file"):
        read_curves(path)
    write_parquet(path, pa.table({"run": ["a"], "loss": [1.0]}))
    with pytest.raises(InvalidResults, match="it has no column step"):
        read_curves(path)
    write_curves(path, [])
    with pytest.raises(InvalidResults, match="has no rows"):
        read_curves(path)
    path.write_text("run,step\n")
    with pytest.raises(InvalidResults, match="cannot be read"):
        read_curves(path)


def test_a_layout_is_held_to_one_rank_and_a_precision_to_fp32() -> None:
    rows = [*curve("bf16", "tp 2"), *curve("bf16"), *curve("fp32"), *curve("fp32", "dp 2")]
    held = {found.run: (found.reference, found.band) for found in distances(rows)}
    assert held == {
        "m bf16 tp 2": ("m bf16 one rank", LAYOUT_BANDS["bf16"]),
        "m bf16 one rank": ("m fp32 one rank", PRECISION_BANDS["bf16"]),
        "m fp32 dp 2": ("m fp32 one rank", LAYOUT_BANDS["fp32"]),
    }
    assert distances([*curve("fp32"), *curve("fp64")]) == []  # no band
    assert distances(curve("bf16")) == []  # nothing to be held to
    assert ONE_RANK == REFERENCE


BAND = LAYOUT_BANDS["bf16"]
LATER = range(WINDOW, 2 * WINDOW)


@pytest.mark.parametrize(
    ("off", "held_out", "inside"),
    [
        ({}, 2.0, True),
        ({3: 0.9 * BAND.first}, 2.0, True),
        ({3: -1.1 * BAND.first}, 2.0, False),  # the first steps
        ({FIRST_STEPS: 1.0}, 2.0, True),  # which are over
        (dict.fromkeys(LATER, 0.9 * BAND.mean), 2.0, True),
        (dict.fromkeys(LATER, -1.1 * BAND.mean), 2.0, False),  # a mean
        ({WINDOW: 15 * BAND.mean, WINDOW + 1: -15 * BAND.mean}, 2.0, True),  # which single steps do not move
        (dict.fromkeys(range(STEPS - WINDOW, STEPS), 0.9 * BAND.end), 2.0, True),
        (dict.fromkeys(range(STEPS - WINDOW, STEPS), 1.05 * BAND.end), 2.0, False),  # the end
        ({}, 2.0 - 1.05 * BAND.end, False),  # the held-out text
        ({}, None, True),
    ],
)
def test_a_run_outside_of_its_band_is_found(off: dict[int, float], held_out: float | None, inside: bool) -> None:
    (found,) = distances([*curve("bf16"), *curve("bf16", "pp 2", off=off, held_out=held_out)])
    assert found.is_inside is inside
    assert found.any_step == pytest.approx(max(map(abs, off.values()), default=0.0))
    assert (found.held_out is None) is (held_out is None)


def test_a_run_may_end_before_the_first_mean() -> None:
    (found,) = distances([*curve("bf16")[:3], *curve("bf16", "pp 2")[:3]])
    assert found.mean is None and found.is_inside


def test_routing_that_collapses_is_found() -> None:
    even = [{**row, "load_entropy": [0.9, 0.3 if row["step"] < STEPS - WINDOW else 0.95]} for row in curve("fp32")]
    fallen = [{**row, "load_entropy": [0.9, 0.95 if row["step"] < STEPS - WINDOW else 0.3]} for row in curve("bf16")]
    assert collapsed([*even, *curve_without_experts()]) == {}
    assert collapsed([*even, *fallen]) == {"m bf16 one rank": pytest.approx(0.3)}


def curve_without_experts() -> list[dict[str, Any]]:
    return [{**row, "load_entropy": None} for row in curve("fp64")]
