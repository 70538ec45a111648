"""How the step of a layout differs from that of its plain neighbour, and what that makes of the neighbour's prediction.

    T(e) = f * pipeline + (g * seen + x) + (h * after + u)

``pipeline``, ``seen`` and ``after`` are the form's parts of the neighbour's step (`workloads.predict.time_terms`). By
the sum of a step's parts (`workloads.costs.time.step_bounds`), f is the ratio of the two steps' micro-batches. Exposed
data-parallel traffic, and copies and the optimizer, do not grow with the work: where they are less than the
neighbour's, g and h are the ratios of both, otherwise 1, and x and u the seconds that are added. The constant part of
``after`` stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workloads.predict.points import Floats
from workloads.predict.time_terms import TimeTerms


class Factors(NamedTuple):
    """Arrays with one entry per layout."""

    work: Floats
    """f; 1: as the neighbour."""
    exposed: Floats
    """g: of rows of other engines f, otherwise at most 1."""
    exposed_s: Floats
    """x, in seconds; 0: no more than the neighbour's."""
    updates: Floats
    """h: as g, of all but the constant part of ``after``."""
    updates_s: Floats
    """u, in seconds; 0: no more than the neighbour's."""

    @classmethod
    def nothing(cls, count: int) -> Factors:
        """Those of so many layouts that do not differ."""
        ones, zeros = np.ones(count), np.zeros(count)
        return cls(ones, ones.copy(), zeros, ones.copy(), zeros.copy())

    @classmethod
    def between(cls, own_s: Floats, near_s: Floats) -> Factors:
        """Those of layouts and neighbours with these first three parts of `parted_steps_s`."""
        less, more = np.minimum(own_s[1:3], near_s[1:3]), np.maximum(0.0, own_s[1:3] - near_s[1:3])
        share = np.divide(less, near_s[1:3], out=np.ones_like(less), where=near_s[1:3] > 0)
        return cls(own_s[0] / near_s[0], share[0], more[0], share[1], more[1])

    def take(self, rows: Floats) -> Factors:
        return Factors(*(of_all[rows] for of_all in self))

    def put(self, rows: Sequence[int], others: Factors) -> None:
        """Replace those of some layouts."""
        for of_all, of_rows in zip(self, others, strict=True):
            of_all[rows] = of_rows

    def step_s(self, parts: TimeTerms) -> Floats:
        """Seconds of steps, from the parts of the form's prediction."""
        step: Floats = self.work * parts.pipeline + self.traffic_s(parts) + self.after_s(parts)
        return step

    def traffic_s(self, parts: TimeTerms) -> Floats:
        """Exposed seconds of data-parallel traffic."""
        traffic: Floats = self.exposed * parts.seen + self.exposed_s
        return traffic

    def after_s(self, parts: TimeTerms) -> Floats:
        """Seconds of copies and the optimizer."""
        after: Floats = self.updates * (parts.after - parts.fixed) + parts.fixed + self.updates_s
        return after

    def of_step(self, parts: TimeTerms) -> Floats:
        """`step_s` over the form's prediction."""
        ratio: Floats = self.step_s(parts) / (parts.pipeline + parts.seen + parts.after)
        return ratio

    def without_schedule(self, of_layers: Floats, parts: TimeTerms) -> Floats:
        """`of_step` without the effect of another schedule. ``of_layers``: `Structures.of_layers`."""
        ratio: Floats = self.of_step(parts) * of_layers / self.work
        return ratio

    def with_hosts(self, of_layers: Floats, parts: TimeTerms) -> Factors:
        """The factors, with work that takes no less than its host needs: a better schedule removes device idle time,
        not launch time. ``of_layers``: `Structures.of_layers`."""
        least = of_layers * parts.issued / parts.pipeline
        return self._replace(work=np.maximum(self.work, least))
