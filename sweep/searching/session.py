"""One search from its first run to its last: chooses what to run next and takes the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, log
from typing import Any, Literal

import numpy as np

from sweep.composing.search_settings import Settings
from sweep.searching.choice import (
    Beaten,
    CellView,
    alone,
    beaten,
    best_repeat,
    choose,
    in_order,
    inflation,
    least_repeats,
    look,
    repeat,
)
from sweep.searching.space import RUNNING, Outcome, SearchSpace, Seen, Surprise
from sweep.searching.surrogate import Fit, believe, extend, fit

End = Literal["settled", "patience", "exhausted", "tied"]
"""Why a cell is done: a better layout is improbable enough, no improvement for long enough, every candidate that may
fit has run, or the fastest are not told apart and more repeats are not allowed or not worth their cost."""


@dataclass(slots=True)
class Session:
    space: SearchSpace
    settings: Settings
    seen: Seen = field(init=False)
    _expected: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Mean and standard deviation of the expected log step time of running candidates, from when they were chosen."""
    _views: dict[int, tuple[tuple[Any, ...], CellView, Beaten]] = field(default_factory=dict)
    """By cell: the last view, and the results that it was made of."""
    _worth: dict[int, tuple[CellView, bool]] = field(default_factory=dict)
    """By cell: whether a repeat is worth its cost, by the view."""
    _fit: Fit = field(init=False)
    """Of the rows so far, or of the first of them."""
    _since_better: dict[int, int] = field(default_factory=dict)
    """Runs that have ended since the best was found, by cell."""

    def __post_init__(self) -> None:
        self.seen = Seen.nothing(len(self.space))
        self._fit = fit(self.space, self.seen)

    def ask(self, cell: int, count: int | None = None) -> list[int]:
        """The next ``count`` candidates of a cell to run (default: a batch), which then count as running until `tell`.

        New candidates as long as one of them may be the best, then repeats of those that ran. Empty while the runs in
        progress decide whether more are needed.
        """
        view, count = self.view(cell), count or self.settings.batch
        if self._new_needed(cell):
            in_turn = self.settings.patience is not None
            chosen = in_order(view, count) if in_turn else choose(self.space, self.seen, view, count, self.settings)
            spread = view.belief.spread
            for one in chosen:
                row = int(np.flatnonzero(view.places == one)[0])
                self._expected[one] = float(view.belief.mean[row]), hypot(spread[row], view.noise)
            self.seen.state[chosen] = RUNNING
            return chosen
        if view.running.any() or not self._repeat_needed(cell):
            return []
        chosen = repeat(view, min(count, self._repeats_left(cell)), self.settings)
        np.add.at(self.seen.repeating, np.array(chosen, np.int64), 1)
        return chosen

    def expect(self, one: int) -> None:
        """Store the current expectation for a candidate that another process chose, for use by `tell`."""
        self._fit = fitted = extend(self.space, self.seen, self._fit)
        wider = inflation(self.seen, int(self.space.cell[one]), fitted.slow)
        belief = believe(self.space, self.seen, np.array([one]), wider, fitted=fitted)
        self._expected[one] = float(belief.mean[0]), hypot(belief.spread[0], fitted.noise)

    def tell(
        self,
        one: int,
        outcome: Outcome,
        step_time_s: float | None = None,
        probed: float = 0.0,
        nodes: Sequence[str] = (),
    ) -> None:
        """Record the result of a run of a candidate.

        ``probed``: logarithm of the run's predicted slowdown, from what its pilot measured on the machine before it
        ran. ``nodes``: where it ran; empty if unknown.
        """
        cell = int(self.space.cell[one])
        first, before = not self.seen.has_run(one), self.seen.fastest(self.space.of(cell))
        self.seen.repeating[one] = max(0, self.seen.repeating[one] - 1)
        self.seen.ended(one, outcome, step_time_s, float(self.space.log_time[one]) + probed, nodes)
        expected = self._expected.pop(one, None)
        if step_time_s is not None and expected is not None and first:
            mean, spread = expected
            self.seen.surprises.append(Surprise(log(step_time_s) - mean - probed, spread, tuple(nodes), cell))
        if first:
            better = self.seen.fastest(self.space.of(cell)) != before
            self._since_better[cell] = 0 if better else self._since_better.get(cell, 0) + 1

    def view(self, cell: int) -> CellView:
        """What is known of a cell now."""
        seen = self.seen
        now = len(seen.rows), *(one.tobytes() for one in (seen.state, seen.failures, seen.repeating))
        if cell not in self._views or self._views[cell][0] != now:
            if self._fit.fitted_rows != len(seen.rows):
                self._fit = fit(self.space, seen)
            view = look(self.space, seen, cell, self._fit, self.settings.within)
            self._views[cell] = now, view, beaten(view, self.settings.within)
        return self._views[cell][1]

    def best(self, cell: int) -> int | None:
        """The candidate of a cell that most probably is the fastest of those that ran, or within `Settings.within`."""
        return self.view(cell).fastest

    def probability(self, cell: int) -> float:
        """Probability that another candidate, run or not, is faster than the best by more than ``within``."""
        return self._odds(cell).by_any

    def end(self, cell: int) -> End | None:
        """Why a cell needs no more runs; None: it needs more."""
        view, odds = self.view(cell), self._odds(cell)
        if self._new_needed(cell) or self._repeat_needed(cell):
            return None
        if not (~view.ran & ~view.running).any():  # also if there are no candidates
            return "exhausted"
        if odds.by_old > self.settings.stop:
            return "tied"
        return "settled" if self.settings.patience is None else "patience"

    def ties(self, cell: int) -> list[int]:
        """The candidates of a cell that ran and may be the fastest: the best, and those that are faster than it with a
        probability above `Settings.stop`, the best first."""
        view = self.view(cell)
        if view.best is None:
            return []
        close = np.flatnonzero(view.ran & (alone(view, 0.0) > self.settings.stop))
        order = close[np.argsort(view.belief.mean[close], kind="stable")]
        return [int(view.places[one]) for one in (view.best, *order)]

    def _odds(self, cell: int) -> Beaten:
        self.view(cell)
        return self._views[cell][2]

    def _new_needed(self, cell: int) -> bool:
        """Whether a candidate that has not run may be the best."""
        view = self.view(cell)
        if view.ran.all():  # also if there are no candidates
            return False
        if self.settings.patience is not None:
            return view.best is None or self._since_better.get(cell, 0) < self.settings.patience
        return view.best is None or self._odds(cell).by_new > self.settings.stop

    def _repeat_needed(self, cell: int) -> bool:
        """Whether another run of a candidate that ran may change which is the best, and is allowed."""
        if self.view(cell).best is None or not self._repeats_left(cell):
            return False
        repeats = len(self.seen.rows) - len({row.place for row in self.seen.rows}) + int(self.seen.repeating.sum())
        view = self.view(cell)
        if repeats < least_repeats(view.noise):
            return True
        if cell not in self._worth or self._worth[cell][0] is not view:
            self._worth[cell] = view, best_repeat(view, self.settings.within).is_worth_it(self.settings)
        return self._worth[cell][1]

    def _repeats_left(self, cell: int) -> int:
        return max(0, self.settings.repeats - self.seen.repeats(self.space.of(cell)))
