"""Replays a search on recorded runs, to count the runs that it would have needed."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from sweep.composing.search_settings import Settings
from sweep.searching.recorded import RecordedSpace
from sweep.searching.session import Session
from sweep.searching.space import Floats, Outcome
from workloads.contract.measure_spec import SLOW_STEPS, WARM_STEPS, MeasureSpec

START_S, STEPS = 60.0, MeasureSpec().steps_of(None)
"""Cost of a run: seconds until its first step, and number of steps."""
ENDS_EARLY_STEPS = WARM_STEPS + SLOW_STEPS
"""Steps of a run that ends early because it is `Settings.slow` times slower than the best of its cell; its row still
counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What happens to replayed runs that did not happen to the recorded ones."""

    noise: float = 0.0
    """Standard deviation of the logarithm of a run's step time."""
    failures: float = 0.0
    """Probability that a run fails, for a reason that another run of the layout does not meet."""
    slow_node: float = 1.0
    """Factor on the step time of runs that use one node of the cluster, `SLOW`."""


NO_TROUBLE = Trouble()
SLOW = "node0"
NODE_GPUS = 8
"""Devices of a node of the replayed cluster. A cell's runs share ``batch`` times the nodes of one of them, so that all
nodes are in use while a batch runs; the numbering of nodes is the same for all cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Results of one strategy in one cell."""

    cell: int
    runs: tuple[int, ...]
    """Candidates in the order in which they ran, including failed and repeated runs."""
    regret: tuple[float, ...]
    """After each run: true step time of the fastest so far over the cell's best, minus 1; infinite before the first
    success."""
    gpu_hours: tuple[float, ...]
    """Cumulative GPU-hours after each run."""
    decisions: tuple[tuple[float, bool], ...] = ()
    """At each decision: the estimated probability of a better layout, and whether there was one."""

    def until(self, within: float) -> float:
        """Number of runs until the best is within this share of the cell's best; infinite if it never is."""
        return next((count for count, regret in enumerate(self.regret, start=1) if regret <= within), inf)


@dataclass(slots=True)
class CellReplay:
    """Replayed runs of one cell, with added trouble."""

    recorded: RecordedSpace
    cell: int
    slow: float | None = None
    """See `Settings.slow`."""
    trouble: Trouble = NO_TROUBLE
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    runs: list[int] = field(default_factory=list)
    regret: list[float] = field(default_factory=list)
    gpu_hours: list[float] = field(default_factory=list)
    seen_s: dict[int, list[float]] = field(default_factory=dict)
    """Observed step times of the candidates that ran, noise included."""
    nodes: dict[int, set[str]] = field(default_factory=dict)
    """Nodes on which candidates ran."""

    @property
    def fastest(self) -> int | None:
        """The candidate with the smallest median observed step time."""
        return min(self.seen_s, key=lambda one: float(np.median(self.seen_s[one])), default=None)

    def run(self, one: int, nodes: Collection[str] = ()) -> float | None:
        """Replays a run of candidate ``one`` on ``nodes``. Returns its observed step time in seconds; None if it
        fails."""
        true_s = float(self.recorded.step_time_s[one])
        time_s, steps_s = None, 0.0
        if np.isfinite(true_s) and not self.random.random() < self.trouble.failures:
            time_s = true_s * float(np.exp(self.trouble.noise * self.random.standard_normal()))
            time_s *= self.trouble.slow_node if SLOW in nodes else 1.0
            best = min((min(times) for times in self.seen_s.values()), default=inf)
            ends_early = self.slow is not None and time_s > self.slow * best
            steps_s = (ENDS_EARLY_STEPS if ends_early else STEPS) * time_s
            self.seen_s.setdefault(one, []).append(time_s)
        spent = float(self.recorded.space.gpus[one]) * (START_S + steps_s) / 3600
        self.gpu_hours.append((self.gpu_hours[-1] if self.gpu_hours else 0.0) + spent)
        self.runs.append(one)
        self.regret.append(self._regret_of(self.fastest))
        self.nodes[one] = {*self.nodes.get(one, ()), *nodes}
        return time_s

    def found(self, best: int | None) -> None:
        """Set the best after the last run, if it is not the one with the smallest median."""
        self.regret[-1] = self._regret_of(best)

    def _regret_of(self, best: int | None) -> float:
        if best is None:
            return inf
        return float(self.recorded.step_time_s[best]) / cell_best(self.recorded, self.cell) - 1

    def result(self, decisions: Sequence[tuple[float, bool]] = ()) -> CellResult:
        return CellResult(
            cell=self.cell,
            runs=tuple(self.runs),
            regret=tuple(self.regret),
            gpu_hours=tuple(self.gpu_hours),
            decisions=tuple(decisions),
        )


def cell_best(recorded: RecordedSpace, cell: int) -> float:
    """Step time of the cell's fastest run, in seconds."""
    return float(np.nanmin(recorded.step_time_s[recorded.space.of(cell)]))


def replay(
    recorded: RecordedSpace,
    settings: Settings,
    *,
    trouble: Trouble = NO_TROUBLE,
    seed: int = 0,
) -> list[CellResult]:
    """Searches cell after cell, smaller sizes first; later cells learn from rows of earlier ones.

    ``trouble`` is drawn from ``seed``.
    """
    space, random = recorded.space, np.random.default_rng(seed)
    space = dataclasses.replace(space, log_time=space.log_time.copy())
    session = Session(space, settings)
    results = []
    for cell in sorted(space.cells, key=lambda cell: (float(space.gpus[space.of(cell)][0]), cell)):
        ran = CellReplay(recorded, cell, slow=settings.slow, trouble=trouble, random=random)
        cluster = _Cluster(int(space.gpus[space.of(cell)][0]), settings.batch, random)
        decisions = _search_cell(recorded, session, cell, ran, cluster)
        results.append(ran.result(decisions))
    return results


@dataclass(slots=True)
class _Cluster:
    """The nodes on which the runs of a cell are placed at random."""

    gpus: int
    batch: int
    random: np.random.Generator
    _free: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = [f"node{number}" for number in range(self.batch * self._per_run)]

    @property
    def _per_run(self) -> int:
        return -(-self.gpus // NODE_GPUS)

    def take(self, ran_on: Collection[str]) -> tuple[str, ...]:
        """The nodes of a run that starts: others than those on which its layout ``ran_on``, as far as they are free."""
        order = [self._free[number] for number in self.random.permutation(len(self._free))]
        nodes = tuple(sorted(order, key=lambda one: one in ran_on)[: self._per_run])
        self.free(nodes, back=False)
        return nodes

    def free(self, nodes: Collection[str], *, back: bool = True) -> None:
        self._free = [*self._free, *nodes] if back else [one for one in self._free if one not in set(nodes)]


def _search_cell(
    recorded: RecordedSpace, session: Session, cell: int, ran: CellReplay, cluster: _Cluster
) -> list[tuple[float, bool]]:
    """Runs a batch at a time until the session ends the cell; each finished run is followed by another.

    Returns, for every decision, the estimated probability of a better layout and whether there was one.
    """
    decisions: list[tuple[float, bool]] = []
    running: list[tuple[float, int, tuple[str, ...]]] = []
    now_s = 0.0
    while True:
        if (best := session.best(cell)) is not None:
            limit = float(recorded.step_time_s[best]) * (1 - session.settings.within)
            decisions.append((session.probability(cell), cell_best(recorded, cell) < limit))
        if session.end(cell) is None and (room := session.settings.batch - len(running)):
            for one in session.ask(cell, room):
                end_s = now_s + START_S + STEPS * _or_0(float(recorded.step_time_s[one]))
                heapq.heappush(running, (end_s, one, cluster.take(ran.nodes.get(one, ()))))
        if not running:
            return decisions
        now_s, one, nodes = heapq.heappop(running)
        time_s = ran.run(one, nodes)
        cluster.free(nodes)
        outcome: Outcome = recorded.outcome[one]
        if outcome == "ok" and time_s is None:
            outcome = "other"
        # The bandwidths that its job measured belong to a recorded run: they are known once it has run, and its
        # repeats have them, too.
        probed = float(recorded.log_expected[one] - session.space.log_time[one])
        session.tell(one, outcome, time_s, probed, nodes)
        session.space.log_time[one] += probed if time_s is not None else 0.0
        ran.found(session.best(cell))


def _or_0(step_time_s: float) -> float:
    """Step time, or 0 for a failed run, which takes no steps."""
    return step_time_s if np.isfinite(step_time_s) else 0.0


def quantiles(results: Sequence[CellResult], within: float) -> tuple[float, float]:
    """Median and 90th percentile over the cells of the number of runs until within this share of the best."""
    counts = np.array([one.until(within) for one in results], dtype=float)
    median, p90 = np.quantile(counts, [0.5, 0.9], method="higher")
    return float(median), float(p90)


def settled(results: Sequence[CellResult], within: float) -> int:
    """Number of cells whose final best is within this share of the true best."""
    return sum(one.regret[-1] <= within for one in results)


def coverage(results: Sequence[CellResult], edges: Sequence[float]) -> list[tuple[float, float, int, float, float]]:
    """Calibration of the estimated probabilities: for each bin ``(low, high, decisions, mean probability, share with a
    better layout)``; bins without a decision are left out."""
    decisions: Floats = np.array([one for result in results for one in result.decisions], dtype=float).reshape(-1, 2)
    lines = []
    for low, high in pairwise(edges):
        inside = (
            decisions[(decisions[:, 0] > low) & (decisions[:, 0] <= high)]
            if low > 0
            else decisions[decisions[:, 0] <= high]
        )
        if len(inside):
            lines.append((low, high, len(inside), float(inside[:, 0].mean()), float(inside[:, 1].mean())))
    return lines
