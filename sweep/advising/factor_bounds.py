"""Lower bounds of structure factors (`Times.factors`) of many rows at once.

Rows with the same degrees and micro-batch differ in ZeRO stage and replicas of its shards, hence in the traffic of data
parallelism alone. Everything else of a step is computed once for all of them, with the lowest of their ZeRO stages,
whose dense products may add to gradients themselves, and with experts whose products do; neither takes longer. The
neighbour by which it is divided, and the closed form, are those of the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweep.advising.space import Ints, LayoutSpace
from sweep.advising.times import Times
from workloads.costs.time.model_parallel import ModelParallel
from workloads.predict.layouts import has_odd_layers
from workloads.predict.network_terms import without_outer_tiers
from workloads.predict.points import Floats, Points


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorBounds:
    """Bounds for some rows of a space with one kind of context parallelism."""

    times: Times
    rows: Ints
    """In ascending order."""
    zero: Ints
    """ZeRO stage by row."""
    alike: ModelParallel
    """What layouts with the same degrees and micro-batch share."""
    of_alike: Ints
    """Index in ``alike`` by row."""
    near_s: Floats
    """`Structures.plain_s` of the rows, shape (3, rows)."""
    points: Points
    """Of ``alike``."""
    odd_layers: bool
    """Whether a table row does not describe the layers."""

    @classmethod
    def of(cls, times: Times, space: LayoutSpace, rows: Ints, kind: str) -> FactorBounds:
        """``rows``: in ascending order; ``kind``: of context parallelism."""
        structures, zero = times.forecast.structures, space.zero[rows]
        degrees = [one[rows] for one in (space.dp, space.tp, space.cp, space.pp, space.mbs)]
        first, of_alike = _distinct([*degrees, space.ep[rows], space.etp[rows]], zero)
        shared = [space.spelled(row, space.plain_group(row, kind)) for row in rows[first].tolist()]
        first, of_near = _distinct([*degrees, zero], zero)
        near = [space.spelled(row, space.plain_group(row, kind)) for row in rows[first].tolist()]
        return cls(
            times=times,
            rows=rows,
            zero=zero,
            alike=structures.model_parallel(shared),
            of_alike=of_alike,
            near_s=structures.plain_s(near)[:, of_near],
            points=without_outer_tiers(times.forecast.points(shared, np.ones(len(shared)))),
            odd_layers=has_odd_layers(shared[0]),
        )

    def covers(self, rows: Ints) -> bool:
        return bool(np.isin(rows, self.rows).all())

    def least(self, rows: Ints, replicas: int) -> Floats:
        """The bounds of some of the rows with so many replicas of shards."""
        at = np.searchsorted(self.rows, rows)
        of_alike, zero, structures = self.of_alike[at], self.zero[at], self.times.forecast.structures
        factors = structures.least(self.alike, of_alike, zero, replicas, self.near_s[:, at])
        points = self.points.take(of_alike)
        scaled = factors.work if self.odd_layers else points.scaled
        points = dataclasses.replace(points, zero=zero.astype(float), scaled=scaled)
        return _BELOW * self.times.of_bounds(factors, points)


_BELOW = 0.99
"""Factor for what may be too much in a bound: traffic beside the least sums of gradients is exposed a little more than
beside those of a layout, at most 0.6 % of eager steps of a mixture with 256 and 1,024 tokens."""


def _distinct(columns: Sequence[Ints], zero: Ints) -> tuple[Ints, Ints]:
    """(row, of_row): the row with the lowest ZeRO stage of each combination of the columns' values, and the combination
    of each row."""
    order = np.argsort(zero, kind="stable")
    sorted_columns = np.stack(columns, axis=1)[order]
    _, first, of_sorted = np.unique(sorted_columns, axis=0, return_index=True, return_inverse=True)
    of_row = np.empty_like(order)
    of_row[order] = of_sorted.reshape(-1)
    return order[first], of_row
