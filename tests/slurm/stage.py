"""What a scenario plays on: nodes of its own on a shared cluster, and a register of all scenarios.

Scenarios that keep to their own nodes are played at the same time; those that disturb the controller, one after the
other. A play returns one `Told` for each line that it adds to the table in docs/reliability.md.
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

Leg = Literal["nodes", "controller", "plain"]
"""nodes: beside others, on a cluster with accounting. controller: alone on it. plain: alone, without accounting."""


@dataclass(frozen=True, slots=True)
class Told:
    """One line of the table."""

    injected: str
    rows: str


@dataclass(slots=True)
class Stage:
    """One scenario's place."""

    lab: Lab
    folder: Path
    nodes: tuple[str, ...]
    partition: str

    def sweep(self, *points: tuple[str, int], words: Sequence[str] = (), **more: object) -> StandinSweep:
        """A sweep on this scenario's partition; another one's ``partition`` or ``root`` may be given."""
        fields = {"lab": self.lab, "root": self.folder, "name": "a sweep", "partition": self.partition, **more}
        return StandinSweep(points=points, words=words, **fields)  # type: ignore[arg-type]


Play = Callable[[Stage], Mapping[str, Told]]


@dataclass(frozen=True, slots=True)
class Scenario:
    titles: tuple[str, ...]
    play: Play
    nodes: int
    leg: Leg
    preemptible: bool

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.titles[0].lower()).strip("-")[:40]


SCENARIOS: list[Scenario] = []


def scenario(
    *titles: str, nodes: int = 1, leg: Leg = "nodes", preemptible: bool = False
) -> Callable[[Callable[[Stage], Told | Mapping[str, Told]]], None]:
    """Register a play that adds ``titles`` to the table."""

    def register(play: Callable[[Stage], Told | Mapping[str, Told]]) -> None:
        def whole(stage: Stage) -> Mapping[str, Told]:
            told = play(stage)
            return {titles[0]: told} if isinstance(told, Told) else told

        SCENARIOS.append(Scenario(titles, whole, nodes, leg, preemptible))

    return register


@dataclass(frozen=True, slots=True)
class Played:
    told: Mapping[str, Told]
    seconds: float


@dataclass(slots=True)
class Theatre:
    """Plays scenarios on one cluster, as many at a time as there are nodes and hands."""

    lab: Lab
    folder: Path
    at_once: int = 6
    _free: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _count: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._free = list(self.lab.nodes)

    def play_all(self, scenarios: Sequence[Scenario]) -> dict[str, Future[Played]]:
        """Start playing; the futures by title."""
        pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="scenario")
        futures: dict[str, Future[Played]] = {}
        for one in scenarios:
            future = pool.submit(self.play, one)
            futures |= dict.fromkeys(one.titles, future)
        pool.shutdown(wait=False)
        return futures

    def play(self, one: Scenario) -> Played:
        """Play one scenario on nodes that nobody else uses."""
        with self._nodes(one.nodes) as nodes:
            folder = self.folder / one.slug
            folder.mkdir(parents=True)
            name = "main"  # in slurm.conf: what was made at run time goes with a slurmctld that ends
            if one.leg == "nodes":
                name = self.lab.add_partition(f"p{next(self._count)}", nodes, preemptible=one.preemptible)
            started = time.monotonic()
            told = one.play(Stage(self.lab, folder, nodes, name))
            return Played(told, time.monotonic() - started)

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
