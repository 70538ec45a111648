"""Times a function on the device while it is kept busy, and reads the device's clock and power meanwhile."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workloads.contract.probe_figures import Figure
from workloads.engine.training.clock import Clock
from workloads.measuring.device import DeviceSampler

_BATCHES = 5
_MOST = 2000


@dataclass(frozen=True, slots=True)
class Timed:
    seconds: float
    """Seconds of one call."""
    spread: float | None
    repeats: int
    state: dict[str, Any]
    """``sm_clock_mhz``, ``power_w`` and ``temperature_c`` during the calls."""

    def figure(self, kind: str, name: str, **fields: Any) -> Figure:
        """The time of one call as a figure."""
        return Figure(
            kind=kind,
            name=name,
            value=self.seconds,
            unit="s",
            spread=self.spread,
            repeats=self.repeats,
            **self.state,
            **fields,
        )


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = Clock(device)
        self._sampler = DeviceSampler(device)

    def state(self) -> dict[str, Any]:
        """Clock, power and temperature of the device now."""
        return self._sampler.now()

    def time(self, call: Callable[[], Any], at_least_s: float, repeats: int | None = None) -> Timed:
        """Time ``call``, which only launches work, for at least ``at_least_s`` seconds. ``repeats``: call it this many
        times instead, if other ranks take part in it."""
        for _ in range(2):
            call()
        self.clock.finish()
        if repeats is None:
            once = self._batch(call, 3)
            repeats = int(min(_MOST, max(_BATCHES, at_least_s / max(once, 1e-6))))
        each = max(1, repeats // _BATCHES)
        marks = [self.clock.mark()]
        for _ in range(_BATCHES):
            for _ in range(each):
                call()
            marks.append(self.clock.mark())
        state = self.state()  # the device is still busy: the host runs ahead
        self.clock.finish()
        times = [self.clock.seconds(a, b) / each for a, b in itertools.pairwise(marks)]
        mean = statistics.fmean(times)
        spread = statistics.stdev(times) / mean if mean > 0 else None
        return Timed(statistics.median(times), spread, each * _BATCHES, state)

    def _batch(self, call: Callable[[], Any], count: int) -> float:
        start = self.clock.mark()
        for _ in range(count):
            call()
        end = self.clock.mark()
        self.clock.finish()
        return self.clock.seconds(start, end) / count
