"""Searches again in runs that were made already: how many of them a search would have needed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from sweep.composing.search_settings import Settings
from sweep.searching.choice import to_repeat
from sweep.searching.recorded import Recorded
from sweep.searching.session import Session
from sweep.searching.space import RUNNING, UNTRIED, Floats
from workloads.contract.protocol import SLOW_STEPS, WARM_STEPS, MeasureSpec

START_S, STEPS = 60.0, MeasureSpec().steps_of(None)
"""What a run costs: so many seconds until its first step, and so many steps."""
ENDS_EARLY_STEPS = WARM_STEPS + SLOW_STEPS
"""Of a run that is `Settings.slow` times slower than the best of its cell; its row counts all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one strategy did in one cell."""

    cell: int
    runs: tuple[int, ...]
    """Candidates in the order in which they ran, also those that failed and those that ran again."""
    regret: tuple[float, ...]
    """After each run: the true step time of what was fastest so far over that of the cell's best, less one; infinite
    before one ran."""
    gpu_hours: tuple[float, ...]
    """After each run: what all of them have cost."""
    said: tuple[tuple[float, bool], ...] = ()
    """At each decision: the probability of a better layout that was said, and whether there was one."""

    def until(self, within: float) -> float:
        """Runs until the best was within this share of the cell's best, infinite if it never was."""
        return next((count for count, regret in enumerate(self.regret, start=1) if regret <= within), inf)


@dataclass(slots=True)
class Ran:
    """Runs of one cell as they are made again, each with the noise that is asked for."""

    recorded: Recorded
    cell: int
    slow: float | None = None
    """As `Settings.slow`."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a run's step time."""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    runs: list[int] = field(default_factory=list)
    regret: list[float] = field(default_factory=list)
    gpu_hours: list[float] = field(default_factory=list)
    seen_s: dict[int, list[float]] = field(default_factory=dict)
    """Step times of the candidates that ran, as they were seen."""

    @property
    def fastest(self) -> int | None:
        """By the median of what was seen of each."""
        return min(self.seen_s, key=lambda one: float(np.median(self.seen_s[one])), default=None)

    def run(self, one: int) -> float | None:
        """The step time that is seen in a run of ``one``, in seconds; None where it fails."""
        true_s = float(self.recorded.step_time_s[one])
        time_s, steps_s = None, 0.0
        if np.isfinite(true_s):
            time_s = true_s * float(np.exp(self.noise * self.random.standard_normal()))
            best = min((min(times) for times in self.seen_s.values()), default=inf)
            ends_early = self.slow is not None and time_s > self.slow * best
            steps_s = (ENDS_EARLY_STEPS if ends_early else STEPS) * time_s
            self.seen_s.setdefault(one, []).append(time_s)
        spent = float(self.recorded.space.gpus[one]) * (START_S + steps_s) / 3600
        self.gpu_hours.append((self.gpu_hours[-1] if self.gpu_hours else 0.0) + spent)
        self.runs.append(one)
        fastest = self.fastest
        best_s = cell_best(self.recorded, self.cell)
        self.regret.append(inf if fastest is None else float(self.recorded.step_time_s[fastest]) / best_s - 1)
        return time_s

    def result(self, said: Sequence[tuple[float, bool]] = ()) -> CellResult:
        return CellResult(
            cell=self.cell,
            runs=tuple(self.runs),
            regret=tuple(self.regret),
            gpu_hours=tuple(self.gpu_hours),
            said=tuple(said),
        )


def cell_best(recorded: Recorded, cell: int) -> float:
    """Step time of the cell's fastest run, in seconds."""
    return float(np.nanmin(recorded.step_time_s[recorded.space.of(cell)]))


def replay(
    recorded: Recorded, settings: Settings, *, noise: float = 0.0, repeats: int = 0, seed: int = 0
) -> list[CellResult]:
    """Searches cell after cell, the smaller sizes first; rows of earlier cells are known in later ones.

    ``noise``: of every run's step time, drawn from ``seed``; then the candidates at the top run ``repeats`` times more.
    """
    space, random = recorded.space, np.random.default_rng(seed)
    session = Session(space, settings)
    found = []
    for cell in sorted(space.cells, key=lambda cell: (float(space.gpus[space.of(cell)][0]), cell)):
        ran = Ran(recorded, cell, slow=settings.slow, noise=noise, random=random)
        said = _search_cell(recorded, session, cell, ran)
        for one in to_repeat(space, session.seen, cell) * repeats:
            ran.run(one)
        found.append(ran.result(said))
    return found


def _search_cell(recorded: Recorded, session: Session, cell: int, ran: Ran) -> list[tuple[float, bool]]:
    """Runs until the session says that the cell is done, a batch of them side by side: each that ends is followed by
    another. What it said of a better layout at every such moment."""
    said: list[tuple[float, bool]] = []
    running: list[tuple[float, int]] = []
    now_s = 0.0
    while True:
        probability = session.probability(cell)
        if (best := session.best(cell)) is not None:
            limit = float(recorded.step_time_s[best]) * (1 - session.settings.within)
            said.append((probability, _fastest_left(recorded, session, cell) < limit))
        if session.end(cell, probability) is None and (room := session.settings.batch - len(running)):
            for one in session.ask(cell, room):
                heapq.heappush(running, (now_s + START_S + STEPS * _or_0(float(recorded.step_time_s[one])), one))
        if not running:
            return said
        now_s, one = heapq.heappop(running)
        time_s = ran.run(one)
        probed = float(recorded.log_expected[one] - recorded.space.log_time[one])
        session.tell(one, recorded.outcome[one], time_s, probed)


def _or_0(step_time_s: float) -> float:
    """Steps of a run that fails take no time."""
    return step_time_s if np.isfinite(step_time_s) else 0.0


def _fastest_left(recorded: Recorded, session: Session, cell: int) -> float:
    own = recorded.space.of(cell)
    times = recorded.step_time_s[own][np.isin(session.seen.state[own], (UNTRIED, RUNNING))]
    return float(np.nanmin(times)) if np.isfinite(times).any() else inf


def quantiles(results: Sequence[CellResult], within: float) -> tuple[float, float]:
    """Runs until within this share of the best: median and 90th percentile over the cells."""
    counts = np.array([one.until(within) for one in results], dtype=float)
    median, p90 = np.quantile(counts, [0.5, 0.9], method="higher")
    return float(median), float(p90)


def settled(results: Sequence[CellResult], within: float) -> int:
    """Cells whose best at the end was within this share of the true best."""
    return sum(one.regret[-1] <= within for one in results)


def coverage(results: Sequence[CellResult], edges: Sequence[float]) -> list[tuple[float, float, int, float, float]]:
    """How true the probabilities were that were said: for each bin ``(low, high, decisions, mean said, share that was
    true)``; bins without a decision are left out."""
    said: Floats = np.array([one for result in results for one in result.said], dtype=float).reshape(-1, 2)
    lines = []
    for low, high in pairwise(edges):
        inside = said[(said[:, 0] > low) & (said[:, 0] <= high)] if low > 0 else said[said[:, 0] <= high]
        if len(inside):
            lines.append((low, high, len(inside), float(inside[:, 0].mean()), float(inside[:, 1].mean())))
    return lines
