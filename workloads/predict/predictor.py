"""Predicts rows of a table, fitted to measured rows if there are any.

Every code base is fitted separately, to its own rows only. A code base without rows is predicted from its profile, or
from the general values, and its interval is as wide as their uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from workloads.predict.facts import facts_of
from workloads.predict.fit import prior
from workloads.predict.learned_memory import LearnedMemory, learn_memory
from workloads.predict.learned_time import LearnedTime, Widening, learn_time, widening
from workloads.predict.memory_terms import GIB, MEMORY, peaks, reserved
from workloads.predict.parameters import time_parameters
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import ResidualKernel
from workloads.predict.time_terms import TimeTerms, host_bound, step_parts

NORMAL_90 = 1.645
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows to calibrate with; arrays of the length of the points. NaN: not measured."""

    points: Points
    step_time_s: Floats
    reserved_bytes: Floats
    out_of_memory: Floats
    """1: the row ran out of memory; 0: it ran; NaN: unknown."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Arrays of the length of the points."""

    step_time_s: Floats
    low_s: Floats
    high_s: Floats
    """``low_s`` to ``high_s``: central 90 % interval of the step time."""
    allocated_bytes: Floats
    reserved_bytes: Floats
    fits: np.ndarray[tuple[int], np.dtype[np.bool_]]
    load: Floats
    """Reserved bytes of the fullest stage divided by the device's memory. Rows above the cut (1 by default) do not
    fit."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """Fitted parameters by code base."""

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
        kernel: ResidualKernel | None = None,
        *,
        widened: bool = True,
    ) -> Predictor:
        """Returns a predictor fitted to these rows; None: from the profiles alone.

        ``widened``: whether intervals are widened to cover held-out rows, which takes most of the time.
        """
        predictor = cls(profiles)
        if measured is None:
            return predictor
        for name in sorted(set(measured.points.codebase.tolist())):
            of_codebase = measured.points.codebase == name
            predictor._learn_time(
                name, measured, of_codebase & np.isfinite(measured.step_time_s), kernel or ResidualKernel(), widened
            )
            predictor._learn_memory(name, measured, of_codebase)
        return predictor

    def _learn_time(self, name: str, measured: Measured, rows: Floats, kernel: ResidualKernel, widened: bool) -> None:
        if not rows.any():
            return
        points, target = measured.points.take(rows), measured.step_time_s[rows]
        self.time[name] = learned = learn_time(points, target, self.profiles, name, kernel)
        if widened and learned.residuals is not None:
            known = learned.fitted.values, learned.broken
            self.widen[name] = widening(points, target, self.profiles, name, kernel, *known)

    def _learn_memory(self, name: str, measured: Measured, of_codebase: Floats) -> None:
        rows = of_codebase & np.isfinite(measured.reserved_bytes)
        known = of_codebase & np.isfinite(measured.out_of_memory)
        if not rows.any() and not known.any():
            return
        profile = self.profiles[name]
        start = {key: one._replace(value=profile.memory.get(key, one.value)) for key, one in MEMORY.items()}
        self.memory[name] = learn_memory(
            measured.points, measured.reserved_bytes, measured.out_of_memory, of_codebase, self.profiles, profile, start
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
            of_table = first if self.profiles[name].reserved_of == "first" else fullest
            allocated[rows] = factor * fullest
            held[rows] = factor * reserved(of_table, memory)
            load[rows] = factor * reserved(fullest, memory) / part.capacity
            fits[rows] = load[rows] <= self.cut.get(name, 1.0)
        wide = NORMAL_90 * spread
        return Prediction(time, time * np.exp(-wide), time * np.exp(wide), allocated, held, fits > 0, load)

    def seconds(self, points: Points, changed: Mapping[str, float] | None = None) -> TimeTerms:
        """Seconds of a step by component, without an interval; this takes a third of the time of `predict`.

        ``changed``: values of `workloads.predict.parameters.TIME` that replace the known ones.
        """
        seconds = [np.full(len(points), np.nan) for _ in TimeTerms._fields]
        for name in sorted(set(points.codebase.tolist())):
            rows = points.codebase == name
            part = points.take(rows)
            facts, learned = facts_of(part, self.profiles), self.time.get(name)
            factor = np.ones(len(part)) if learned is None else learned.correction(part, facts)
            parts = step_parts(part, facts, {**self._time_values(name), **(changed or {})})
            for array, of_these in zip(seconds, parts, strict=True):
                array[rows] = factor * of_these
        return TimeTerms(*seconds)

    def host_share(self, points: Points) -> Floats:
        """Degree to which a layer is host-bound, from 0 to 1."""
        share = np.full(len(points), np.nan)
        for name in sorted(set(points.codebase.tolist())):
            rows = points.codebase == name
            part = points.take(rows)
            share[rows] = host_bound(part, facts_of(part, self.profiles), self._time_values(name))
        return share

    def _time_values(self, name: str) -> Mapping[str, float]:
        """Fitted values of a code base, or its profile's if it has no rows."""
        if name in self.time:
            return self.time[name].fitted.values
        return {key: one.value for key, one in time_parameters(self.profiles[name]).items()}

    def _memory_defaults(self, name: str) -> dict[str, float]:
        values = self.profiles[name].memory
        return {key: values.get(key, one.value) for key, one in MEMORY.items()}


def best_cut(load: Floats, failed: Floats) -> float:
    """Load above which a row is refused, so that most verdicts are right; the middle of equally good cuts."""
    order = np.argsort(load, kind="stable")
    ran = np.concatenate([[0], np.cumsum(~failed[order])])  # correct verdicts below the cut
    fell = failed.sum() - np.concatenate([[0], np.cumsum(failed[order])])  # correct verdicts above it
    right = ran + fell
    edges = np.concatenate([[load.min() * 0.99], (load[order][1:] + load[order][:-1]) / 2, [load.max() * 1.01]])
    good = edges[right == right.max()]
    return float(good[len(good) // 2])


__all__ = ["GIB", "Measured", "Prediction", "Predictor"]
