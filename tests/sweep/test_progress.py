"""A long plan says how far it is; a short one says nothing."""

from __future__ import annotations

import io

from sweep.progress import PlanProgress


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
