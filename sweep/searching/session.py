"""One search from its first run to its last: chooses what to run next and takes the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import hypot, log
from typing import Literal

import numpy as np

from sweep.composing.search_settings import Settings
from sweep.searching.choice import beaten, choose, in_order, inflation, look
from sweep.searching.space import RUNNING, Outcome, SearchSpace, Seen
from sweep.searching.surrogate import KERNEL, believe

End = Literal["settled", "patience", "exhausted"]
"""Why a cell is done: a better layout is improbable enough, no improvement for long enough, or every candidate that may
fit has run."""


@dataclass(slots=True)
class Session:
    space: SearchSpace
    settings: Settings
    seen: Seen = field(init=False)
    _expected: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Mean and standard deviation of the expected log step time of running candidates, from when they were chosen."""
    _since_better: dict[int, int] = field(default_factory=dict)
    """Runs that have ended since the best was found, by cell."""

    def __post_init__(self) -> None:
        self.seen = Seen.nothing(len(self.space))

    def ask(self, cell: int, count: int | None = None) -> list[int]:
        """The next ``count`` candidates of a cell to run (default: a batch), which then count as running until `tell`.

        Empty while the running candidates are likely to include the best: their results decide whether more are needed.
        """
        view = look(self.space, self.seen, cell)
        count = count or self.settings.batch
        if view.running.any() and self.settings.patience is None:
            idle = view.only(~view.running)
            if view.best is not None and beaten(idle, self.settings.within) <= self.settings.stop:
                return []
        in_turn = self.settings.patience is not None
        chosen = in_order(view, count) if in_turn else choose(self.space, self.seen, view, count)
        row_of = {int(place): row for row, place in enumerate(view.places)}
        spread = view.belief.spread
        for one in chosen:
            row = row_of[one]
            self._expected[one] = float(view.belief.mean[row]), float(spread[row])
        self.seen.state[chosen] = RUNNING
        return chosen

    def expect(self, one: int) -> None:
        """Store the current expectation for a candidate that another process chose, for use by `tell`."""
        belief = believe(self.space, self.seen, np.array([one]), inflation(self.seen))
        self._expected[one] = float(belief.mean[0]), float(belief.spread[0])

    def again(self, one: int, step_time_s: float) -> None:
        """Update the step time of a candidate, in seconds, after another run of it."""
        self.seen.residual[one] += log(step_time_s) - self.seen.log_time[one]
        self.seen.log_time[one] = log(step_time_s)

    def tell(self, one: int, outcome: Outcome, step_time_s: float | None = None, probed: float = 0.0) -> None:
        """Record the result of a candidate.

        ``probed``: logarithm of the run's predicted slowdown, from what its pilot measured on the machine before it
        ran.
        """
        cell = int(self.space.cell[one])
        before = self.best(cell)
        self.seen.ended(one, outcome, step_time_s, float(self.space.log_time[one]) + probed)
        expected = self._expected.pop(one, None)
        if step_time_s is not None and expected is not None:
            mean, spread = expected
            self.seen.surprise.append((log(step_time_s) - mean - probed) / hypot(spread, KERNEL.noise))
        better = self.best(cell) != before
        self._since_better[cell] = 0 if better else self._since_better.get(cell, 0) + 1

    def best(self, cell: int) -> int | None:
        """The fastest candidate of a cell that ran."""
        return self.seen.best(self.space.of(cell))

    def probability(self, cell: int) -> float:
        """Probability that an unfinished candidate is faster than the best by more than ``within``."""
        return beaten(look(self.space, self.seen, cell), self.settings.within)

    def end(self, cell: int, probability: float) -> End | None:
        """Why a cell needs no more runs, given its `probability`; None: it needs more."""
        view = look(self.space, self.seen, cell)
        if view.running.all():  # also if there are no candidates
            return "exhausted"
        if self.settings.patience is not None:
            if self.best(cell) is not None and self._since_better.get(cell, 0) >= self.settings.patience:
                return "patience"
        elif self.best(cell) is not None and probability <= self.settings.stop:
            return "settled"
        return None

    def ties(self, cell: int) -> list[int]:
        """The candidates of a cell whose runs are within ``within`` of its fastest, fastest first."""
        candidates = self.space.of(cell)
        times = self.seen.log_time[candidates]
        if not np.isfinite(times).any():
            return []
        close = candidates[times <= np.nanmin(times) - log(1 - self.settings.within)]
        return [int(one) for one in close[np.argsort(self.seen.log_time[close], kind="stable")]]
