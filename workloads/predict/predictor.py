"""Predicts rows of a table, fitted on rows that were measured where there are any.

Every code base is fitted by itself, on its own rows alone; one without rows is predicted from its profile, or from the
general values, and its interval is as wide as those are uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from workloads.predict.fit import Fitted, fit, prior
from workloads.predict.learned_time import LearnedTime, Widening, learn_time, widening
from workloads.predict.memory_terms import GIB, MEMORY, peaks, reserved
from workloads.predict.parameters import time_parameters
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import Kernel
from workloads.predict.time_terms import facts_of

MEMORY_SPREAD = 0.08
NORMAL_90 = 1.645
"""Half the width of a normal distribution's middle 90 %."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows to calibrate with, of the same length as their points. NaN: not measured."""

    points: Points
    step_time_s: Floats
    reserved_bytes: Floats
    out_of_memory: Floats
    """1: the row ran out of memory, 0: it ran, NaN: neither is known."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Arrays of the length of the points."""

    step_time_s: Floats
    low_s: Floats
    high_s: Floats
    """The middle 90 % of where the step time may be."""
    allocated_bytes: Floats
    reserved_bytes: Floats
    fits: np.ndarray[tuple[int], np.dtype[np.bool_]]
    load: Floats
    """Reserved bytes of the fullest stage over the device's memory: a row with more than 1 is refused."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """Fitted quantities by code base."""

    profiles: Mapping[str, Profile]
    time: dict[str, LearnedTime] = field(default_factory=dict)
    widen: dict[str, Widening] = field(default_factory=dict)
    memory: dict[str, Fitted] = field(default_factory=dict)
    memory_offset: dict[str, float] = field(default_factory=dict)
    cut: dict[str, float] = field(default_factory=dict)

    @classmethod
    def learn(
        cls, measured: Measured | None, profiles: Mapping[str, Profile], kernel: Kernel | None = None
    ) -> Predictor:
        """A predictor fitted on these rows; None: the profiles alone."""
        predictor = cls(profiles)
        if measured is None:
            return predictor
        for name in sorted(set(measured.points.codebase.tolist())):
            own = measured.points.codebase == name
            predictor._learn_time(name, measured, own & np.isfinite(measured.step_time_s), kernel or Kernel())
            predictor._learn_memory(name, measured, own)
        return predictor

    def _learn_time(self, name: str, measured: Measured, rows: Floats, kernel: Kernel) -> None:
        if not rows.any():
            return
        points, target = measured.points.take(rows), measured.step_time_s[rows]
        self.time[name] = learned = learn_time(points, target, self.profiles, name, kernel)
        if learned.residuals is not None:
            self.widen[name] = widening(points, target, self.profiles, name, kernel)

    def _learn_memory(self, name: str, measured: Measured, own: Floats) -> None:
        rows = own & np.isfinite(measured.reserved_bytes)
        if rows.any():
            points, target = measured.points.take(rows), measured.reserved_bytes[rows]
            facts = facts_of(points, self.profiles)
            place = 0 if self.profiles[name].reserved_of == "first" else 1
            self.memory[name] = fit(
                lambda p: reserved(peaks(points, facts, p)[place], p),
                target,
                {
                    key: one._replace(value=self.profiles[name].memory.get(key, one.value))
                    for key, one in MEMORY.items()
                },
                MEMORY_SPREAD,
            )
        known = own & np.isfinite(measured.out_of_memory)
        failed = measured.out_of_memory[known] > 0
        if failed.any() and not failed.all():
            load = self.predict(measured.points.take(known)).load
            self.cut[name] = best_cut(load, failed)

    def predict(self, points: Points) -> Prediction:
        count = len(points)
        time, spread, allocated, held, load, fits = (np.full(count, np.nan) for _ in range(6))
        for name in sorted(set(points.codebase.tolist())):
            rows = points.codebase == name
            part = points.take(rows)
            facts = facts_of(part, self.profiles)
            learned = self.time.get(name) or LearnedTime(prior(time_parameters(self.profiles[name].time)), 0, None)
            mean, sigma = learned.at(part, facts)
            if name in self.widen:
                sigma = sigma * self.widen[name].at(part)
            time[rows], spread[rows] = np.exp(mean), sigma
            memory = self.memory[name].values if name in self.memory else self._memory_defaults(name)
            first, fullest = peaks(part, facts, memory)
            allocated[rows] = fullest
            told = first if self.profiles[name].reserved_of == "first" else fullest
            held[rows] = reserved(told, memory)
            load[rows] = reserved(fullest, memory) / part.capacity
            fits[rows] = load[rows] <= self.cut.get(name, 1.0)
        wide = NORMAL_90 * spread
        return Prediction(time, time * np.exp(-wide), time * np.exp(wide), allocated, held, fits > 0, load)

    def _memory_defaults(self, name: str) -> dict[str, float]:
        own = self.profiles[name].memory
        return {key: own.get(key, one.value) for key, one in MEMORY.items()}


def best_cut(load: Floats, failed: Floats) -> float:
    """The load above which a row is refused, so that most verdicts are right; the middle of equally good cuts."""
    order = np.argsort(load, kind="stable")
    ran = np.concatenate([[0], np.cumsum(~failed[order])])  # right below the cut
    fell = failed.sum() - np.concatenate([[0], np.cumsum(failed[order])])  # right above it
    right = ran + fell
    edges = np.concatenate([[load.min() * 0.99], (load[order][1:] + load[order][:-1]) / 2, [load.max() * 1.01]])
    good = edges[right == right.max()]
    return float(good[len(good) // 2])


__all__ = ["GIB", "Measured", "Prediction", "Predictor"]
