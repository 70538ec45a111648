"""Predicts rows of a table, fitted on rows that were measured where there are any.

Every code base is fitted by itself, on its own rows alone; one without rows is predicted from its profile, or from the
general values, and its interval is as wide as those are uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from workloads.predict.fit import prior
from workloads.predict.learned_memory import LearnedMemory, learn_memory
from workloads.predict.learned_time import LearnedTime, Widening, learn_time, widening
from workloads.predict.memory_terms import GIB, MEMORY, peaks, reserved
from workloads.predict.parameters import time_parameters
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import Kernel
from workloads.predict.time_terms import Parts, facts_of, host_bound, step_parts

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
    memory: dict[str, LearnedMemory] = field(default_factory=dict)
    cut: dict[str, float] = field(default_factory=dict)

    @classmethod
    def learn(
        cls,
        measured: Measured | None,
        profiles: Mapping[str, Profile],
        kernel: Kernel | None = None,
        *,
        widened: bool = True,
    ) -> Predictor:
        """A predictor fitted on these rows; None: the profiles alone.

        ``widened``: whether intervals are made to cover rows that are left out, which takes most of the time.
        """
        predictor = cls(profiles)
        if measured is None:
            return predictor
        for name in sorted(set(measured.points.codebase.tolist())):
            own = measured.points.codebase == name
            predictor._learn_time(name, measured, own & np.isfinite(measured.step_time_s), kernel or Kernel(), widened)
            predictor._learn_memory(name, measured, own)
        return predictor

    def _learn_time(self, name: str, measured: Measured, rows: Floats, kernel: Kernel, widened: bool) -> None:
        if not rows.any():
            return
        points, target = measured.points.take(rows), measured.step_time_s[rows]
        self.time[name] = learned = learn_time(points, target, self.profiles, name, kernel)
        if widened and learned.residuals is not None:
            self.widen[name] = widening(points, target, self.profiles, name, kernel, learned.fitted.values)

    def _learn_memory(self, name: str, measured: Measured, own: Floats) -> None:
        rows = own & np.isfinite(measured.reserved_bytes)
        known = own & np.isfinite(measured.out_of_memory)
        if not rows.any() and not known.any():
            return
        profile = self.profiles[name]
        start = {key: one._replace(value=profile.memory.get(key, one.value)) for key, one in MEMORY.items()}
        self.memory[name] = learn_memory(
            measured.points, measured.reserved_bytes, measured.out_of_memory, own, self.profiles, profile, start
        )
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
            learned = self.time.get(name) or LearnedTime(prior(time_parameters(self.profiles[name])), 0, None, {})
            mean, sigma = learned.at(part, facts)
            if name in self.widen:
                sigma = sigma * self.widen[name].at(part)
            time[rows], spread[rows] = np.exp(mean), sigma
            learned_memory = self.memory.get(name)
            memory = learned_memory.fitted.values if learned_memory else self._memory_defaults(name)
            factor = learned_memory.correction(part) if learned_memory else np.ones(len(part))
            first, fullest = peaks(part, facts, memory)
            told = first if self.profiles[name].reserved_of == "first" else fullest
            allocated[rows] = factor * fullest
            held[rows] = factor * reserved(told, memory)
            load[rows] = factor * reserved(fullest, memory) / part.capacity
            fits[rows] = load[rows] <= self.cut.get(name, 1.0)
        wide = NORMAL_90 * spread
        return Prediction(time, time * np.exp(-wide), time * np.exp(wide), allocated, held, fits > 0, load)

    def parts(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Seconds of the busiest stage's own work in a step, of what comes after its last backward, and of the least
        that hosts need for a step, as parts of the predicted step time."""
        busy, after, least = (np.full(len(points), np.nan) for _ in range(3))
        for name in sorted(set(points.codebase.tolist())):
            rows = points.codebase == name
            part = points.take(rows)
            found = step_parts(part, facts_of(part, self.profiles), self._time_values(name))
            whole = found.pipeline + found.seen + found.after
            busy[rows], after[rows] = found.busy / whole, found.after / whole
            least[rows] = (found.issued + found.seen + found.after) / whole
        return busy, after, least

    def seconds(self, points: Points, changed: Mapping[str, float] | None = None) -> Parts:
        """Step times as what they add up from, without an interval, which takes a third of the time of `predict`.

        ``changed``: values of `workloads.predict.parameters.TIME` that are taken instead of the known ones.
        """
        found = [np.full(len(points), np.nan) for _ in Parts._fields]
        for name in sorted(set(points.codebase.tolist())):
            rows = points.codebase == name
            part = points.take(rows)
            facts, learned = facts_of(part, self.profiles), self.time.get(name)
            factor = np.ones(len(part)) if learned is None else learned.correction(part, facts)
            parts = step_parts(part, facts, {**self._time_values(name), **(changed or {})})
            for array, of_these in zip(found, parts, strict=True):
                array[rows] = factor * of_these
        return Parts(*found)

    def host_share(self, points: Points) -> Floats:
        """How far it is the host that sets the pace of a layer, from 0 to 1."""
        share = np.full(len(points), np.nan)
        for name in sorted(set(points.codebase.tolist())):
            rows = points.codebase == name
            part = points.take(rows)
            share[rows] = host_bound(part, facts_of(part, self.profiles), self._time_values(name))
        return share

    def _time_values(self, name: str) -> Mapping[str, float]:
        """Fitted ones of a code base, or its profile's where it has no rows."""
        if name in self.time:
            return self.time[name].fitted.values
        return {key: one.value for key, one in time_parameters(self.profiles[name]).items()}

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
