"""A long plan says how far it is; a short one says nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from sweep.__main__ import main
from sweep.grids import walk
from sweep.planning import progress as told
from sweep.planning.progress import PlanProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_short_plan_says_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlanProgress(stream, clock) as progress:
        clock.now = 1.9
        progress("combinations", 10, 20)
    assert stream.getvalue() == ""


def test_a_line_now_and_then_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlanProgress(stream, clock) as progress:
        for second in range(60):
            clock.now = float(second)
            progress("combinations", 1_000_000 * second, 60_000_000)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "planning: 2,000,000 of 60,000,000 combinations (3 %)"
    assert len(lines) == 6


def test_one_line_that_moves_on_a_terminal() -> None:
    stream, clock = Terminal(), Clock()
    with PlanProgress(stream, clock) as progress:
        clock.now = 3.0
        progress("combinations", 10, 20)
        progress("points predicted", 20, 20)
    assert "planning" in stream.getvalue()


SEEDS, LENGTHS, BATCHES = 12, 60, 70
KEPT = 2
"""Of the lengths, each with one micro-batch size."""


@pytest.fixture
def long_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that plan a grid of many combinations of which a condition on the last axis leaves few."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    axes = {
        "model": "tiny",
        "world_size": 1,
        "seed": [*range(SEEDS)],
        "seq_len": [*range(64, 64 + LENGTHS)],
        "micro_batch_size": [*range(1, 1 + BATCHES)],
        "global_batch_size": 1,
    }
    where = {"few": f"micro_batch_size == 1 and seq_len < {64 + KEPT}"}
    grid = {"cluster": "cpu", "axes": axes, "derive": {"dp": "world_size"}, "where": where}
    (tmp_path / "conf" / "grid").mkdir(parents=True)
    (tmp_path / "conf" / "grid" / "long.yaml").write_text(json.dumps(grid))
    return ["plan", "+grid=long", "--conf", "conf"]


@pytest.mark.slow
def test_the_command_says_how_far_a_long_search_is(
    long_search: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(told, "_FIRST_S", 3600.0)
    assert main(long_search) == 0
    short = capsys.readouterr()
    assert short.err == ""

    monkeypatch.setattr(told, "_FIRST_S", 0.0)
    monkeypatch.setattr(told, "_EVERY_S", 0.0)
    monkeypatch.setattr(walk, "_PROGRESS_EVERY_S", 0.0)
    assert main(long_search) == 0
    long = capsys.readouterr()
    assert long.out == short.out
    each, points = LENGTHS * BATCHES, SEEDS * KEPT
    assert long.err.splitlines() == [
        *(
            f"planning: {done * each:,} of {SEEDS * each:,} combinations ({100 * done / SEEDS:.0f} %)"
            for done in range(SEEDS)
        ),
        f"planning: 0 of {points} points checked (0 %)",
        f"planning: 0 of {points} points predicted (0 %)",
    ]
