"""The register of all fault scenarios, and how they run: each on nodes of its own of a shared cluster.

Scenarios that only disturb their own nodes run at the same time; those that disturb the controller run one after the
other. A scenario returns one `TableRow` for each line that it adds to the table in docs/reliability.md.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.slurm.lab import Lab
from tests.slurm.sweeps import StandinSweep

Isolation = Literal["nodes", "cluster", "plain"]
"""nodes: at the same time as other scenarios, on a cluster with accounting. cluster: alone on that cluster. plain:
alone on a cluster without accounting."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the table."""

    injected: str
    rows: str


@dataclass(slots=True)
class Place:
    """Cluster and nodes of one scenario."""

    lab: Lab
    folder: Path
    nodes: tuple[str, ...]
    partition: str

    def sweep(self, *points: tuple[str, int], words: Sequence[str] = (), **more: object) -> StandinSweep:
        """A sweep on this scenario's partition; another one's ``partition`` or ``root`` may be given."""
        fields = {"lab": self.lab, "root": self.folder, "name": "a sweep", "partition": self.partition, **more}
        return StandinSweep(points=points, words=words, **fields)  # type: ignore[arg-type]


Body = Callable[[Place], Mapping[str, TableRow]]


@dataclass(frozen=True, slots=True)
class Scenario:
    titles: tuple[str, ...]
    body: Body
    nodes: int
    isolation: Isolation
    preemptible: bool

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.titles[0].lower()).strip("-")[:40]


SCENARIOS: list[Scenario] = []


def scenario(
    *titles: str, nodes: int = 1, isolation: Isolation = "nodes", preemptible: bool = False
) -> Callable[[Callable[[Place], TableRow | Mapping[str, TableRow]]], None]:
    """Register a function as the scenario that adds ``titles`` to the table."""

    def register(function: Callable[[Place], TableRow | Mapping[str, TableRow]]) -> None:
        def body(place: Place) -> Mapping[str, TableRow]:
            found = function(place)
            return {titles[0]: found} if isinstance(found, TableRow) else found

        SCENARIOS.append(Scenario(titles, body, nodes, isolation, preemptible))

    return register


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    rows: Mapping[str, TableRow]
    """Rows of the table by title."""
    seconds: float


@dataclass(slots=True)
class ScenarioRunner:
    """Runs scenarios on one cluster, up to ``at_once`` at a time, each when enough nodes are free."""

    lab: Lab
    folder: Path
    at_once: int = 8
    _free: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _count: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._free = list(self.lab.nodes)

    def run_all(self, scenarios: Sequence[Scenario]) -> dict[str, Future[ScenarioResult]]:
        """Start all scenarios and return their futures by title."""
        pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="scenario")
        futures: dict[str, Future[ScenarioResult]] = {}
        for one in scenarios:
            future = pool.submit(self.run, one)
            futures |= dict.fromkeys(one.titles, future)
        pool.shutdown(wait=False)
        return futures

    def run(self, one: Scenario) -> ScenarioResult:
        """Run one scenario on nodes that no other uses."""
        with self._nodes(one.nodes) as nodes:
            folder = self.folder / one.slug
            folder.mkdir(parents=True)
            name = "main"  # from slurm.conf: a slurmctld that ends forgets partitions made at run time
            if one.isolation == "nodes":
                name = self.lab.add_partition(f"p{next(self._count)}", nodes, preemptible=one.preemptible)
            started = time.monotonic()
            try:
                rows = one.body(Place(self.lab, folder, nodes, name))
            finally:
                if one.isolation != "nodes":
                    self.lab.resume_nodes()  # a failed scenario must not make the next ones fail
            return ScenarioResult(rows, time.monotonic() - started)

    @contextmanager
    def _nodes(self, count: int) -> Iterator[tuple[str, ...]]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = tuple(self._free[:count]), self._free[count:]
        try:
            yield taken
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()
