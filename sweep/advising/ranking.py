"""The fastest layouts that fit, for each number of devices, without timing all of them.

1. Rows whose layouts all need more memory than a device has are left out (`sweep.advising.floor`).
2. For the other rows the parts of a step are computed in one batch (`Times.bounds`). They give an estimate for every
   group of layouts: by recomputation, schedule, replicas of shards and kind of context parallelism. What experts,
   replicas and other kinds of context parallelism add is bounded for many layouts at once
   (`sweep.advising.factor_bounds`), and computed exactly only for those whose bound is good enough.
3. Groups are expanded in the order of these estimates and timed as in a plan, until the next estimate is worse than the
   best few layouts by a margin (`MARGIN`). The exact memory is computed only for layouts that would be among these.

Layouts are ranked by `StepTime.cautious_s`, so that a wide interval counts against a layout. Estimates include the
width that all layouts have (`Times.narrowest`) and the part of it that follows from the structure factor.

Estimates are not strict bounds: a layout that is faster than its estimate by more than the margin is missed. A test
compares the answer with the plan of whole grids.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sweep.advising.axes import KINDS
from sweep.advising.by_stage import MORE, by_stage
from sweep.advising.factor_bounds import FactorBounds
from sweep.advising.floor import V_SHARE, Floor, floor_of, in_flight_of, more_saved, saved_of
from sweep.advising.ranked import Family, Peak, Ranked, RankedLayout, family_of
from sweep.advising.simpler import simplest
from sweep.advising.space import Ints, LayoutGroup, LayoutSpace, is_v_shaped, shards_are_whole
from sweep.advising.times import Bounds, Times
from sweep.grids.step_time import CAUTION, StepTime
from workloads.costs.memory.estimate import peak_stage
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.predict import layouts
from workloads.predict.points import Floats
from workloads.predict.predictor import NORMAL_90
from workloads.predict.time_terms import fill_share
from workloads.rules.engine_support import is_own
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import ENGINE, Experiment

MARGIN = 0.95
"""Factor on estimates, because a schedule or another structure may save time that the closed form does not know."""
FILL = {"interleaved_zero_bubble": 0.5, "zero_bubble_v": 0.35, "dualpipe_v": 0.35}
"""Share of the pipeline fill time that remains with a schedule: the 10th percentile over layouts of Llama 70B and
Qwen3-30B-A3B, so that few layouts are faster than their estimate. With interleaved 1F1B `fill_share` remains."""
_OF_WIDTH = 0.9
"""Factor on widths in estimates: recomputation and schedule change a layout's interval a little."""
BATCH = 192
"""Number of layouts timed in one batch, at least, and of structure factors computed in one."""
PLAIN = 96
"""Number of plain layouts timed first for each of the best that are asked for."""

LEAST_OF_ANOTHER = 0.8
"""Factor on the memory floor for another engine, because the floor is computed for this project's engine."""

Flags = NDArray[Any]


@dataclass(slots=True)
class _Search:
    """State of one search."""

    top: int
    kept: dict[Family, RankedLayout] = field(default_factory=dict)
    timed: int = 0
    worst_s: float = math.inf
    """Cautious step time that a layout must beat to be among the best; at first that of the ones found elsewhere."""

    def keep(self, faster: RankedLayout) -> None:
        """Replace the layout kept of its family by a ``faster`` one."""
        self.kept[family_of(faster.experiment)] = faster
        if len(self.kept) >= self.top:
            times = (one.time.cautious_s for one in self.kept.values())
            self.worst_s = min(self.worst_s, heapq.nsmallest(self.top, times)[-1])


class _Promising(NamedTuple):
    """Rows of groups with the same replicas and kind of context parallelism that may be among the best."""

    groups: Sequence[LayoutGroup]
    rows: Ints
    """In ascending order."""
    estimates: Floats
    """Without the structure factor, by row and group."""
    ahead: Iterator[int]
    """The rows in the order of their bounds."""

    def estimates_of(self, row: int) -> list[float]:
        estimates: list[float] = self.estimates[int(np.searchsorted(self.rows, row))].tolist()
        return estimates


@dataclass(slots=True)
class Ranking:
    space: LayoutSpace
    times: Times
    limit_bytes: int
    most_timed: int = 12_000
    """Most layouts timed for one number of devices."""
    rows: Ints = field(init=False)
    """Rows of the space that may fit in memory."""
    floors: dict[int, Floor] = field(init=False)
    """Memory bounds of these rows, by replicas."""
    more: dict[LayoutGroup, Floats] = field(init=False)
    """What layers that are not recomputed add to these bounds, by group."""
    whole: dict[int, Flags] = field(init=False)
    """Which of these rows may have so many replicas of ZeRO's shards."""
    bounds: Bounds = field(init=False)
    of_other_kinds: Bounds = field(init=False)
    without_ring: Bounds = field(init=False)
    """Bounds of these rows: with a ring of context-parallel ranks; without the ring's host time; also without its
    messages."""
    width: float = field(init=False)
    """Least log-width of a half interval without the part of the structure factor."""
    factors: dict[tuple[int, str, int], float] = field(default_factory=dict)
    factor_bounds: dict[str, FactorBounds] = field(default_factory=dict)
    """By kind of context parallelism, of the rows that were last asked for."""

    def __post_init__(self) -> None:
        space, saved = self.space, saved_of(self.space)
        least = 1.0 if space.question.engine == ENGINE else LEAST_OF_ANOTHER
        lowest = least * self._lowest(floor_of(space, 1, saved), space.pp)
        self.rows = np.flatnonzero(lowest.min(axis=1) <= self.limit_bytes)
        names = {name: getattr(space, name)[self.rows] for name in ("dp", "cp", "tp", "ep", "etp")}
        self.whole = {
            replicas: shards_are_whole(space.question, names, replicas)
            for replicas in dict.fromkeys(group.replicas for group in space.groups)
        }
        self.width = self.times.narrowest(space, self.rows)
        self.bounds = self.of_other_kinds = self.without_ring = self.times.bounds(space, self.rows)
        if (space.cp[self.rows] > 1).any() and space.kinds != ("ring",):
            self.of_other_kinds, self.without_ring = self._other_kinds(context=True), self._other_kinds(context=False)
        self.floors = {
            replicas: Floor(*(least * one[self.rows] for one in floor_of(space, replicas, saved)))
            for replicas in dict.fromkeys(group.replicas for group in space.groups)
        }
        self.more = {}
        for group in space.groups:
            if group.every > 1 and (alike := group._replace(replicas=1, cp_kind="ring")) not in self.more:
                share = least * (V_SHARE if is_v_shaped(group.schedule) else 1.0)
                self.more[alike] = (share * in_flight_of(space) * more_saved(space, saved, group))[self.rows]

    def _other_kinds(self, *, context: bool) -> Bounds:
        of_cp = self.space.cp[self.rows] > 1
        bounds = Bounds(*(one.copy() for one in self.bounds))
        for whole, part in zip(
            bounds, self.times.bounds(self.space, self.rows[of_cp], context=context, ring=False), strict=True
        ):
            whole[of_cp] = part
        return bounds

    @staticmethod
    def _lowest(floor: Floor, pp: Ints) -> Floats:
        return np.where((pp > 1)[:, None], np.minimum(floor.piped, floor.v_shaped), floor.piped)

    def bound_s(self, size: int) -> float:
        """Lower estimate for the step time on this number of devices; infinite if no layout may fit."""
        mine = self.space.size[self.rows] == size
        fits = self._lowest(self.floors[1], self.space.pp[self.rows])[mine] <= self.limit_bytes
        return MARGIN * float(np.where(fits, self.without_ring.work[mine], np.inf).min(initial=np.inf))

    def best(self, size: int, top: int, beat_s: float = math.inf) -> Ranked:
        """The ``top`` families of one number of devices, of those that may have a cautious time below ``beat_s``."""
        is_auto = self.space.question.chooses_by_stage
        search = _Search(MORE * top, worst_s=math.inf) if is_auto else _Search(top, worst_s=beat_s)
        # Plain layouts first: their bound is nearly exact, and a good layout early prunes the others.
        self._walk(size, search, [group for group in self.space.groups if group.is_plain], PLAIN * top)
        given_up = self._walk(size, search, self.space.groups, self.most_timed)
        best = _sorted(search.kept.values())[: MORE * top if is_auto else top]
        best = _sorted(simplest(best, self.space, self.times, self.fitting))
        if is_auto:
            best = _sorted(by_stage(best, self.space.question, self.times, self.fitting))[:top]
        return Ranked(size=size, best=best, timed=search.timed, open_bound_s=given_up)

    def _walk(self, size: int, search: _Search, groups: Sequence[LayoutGroup], most: int) -> float | None:
        """Time the layouts of groups in the order of their bounds. Returns the bound at which it gave up, or None."""
        waiting: list[Experiment] = []
        for bound, one in self._ordered(size, groups, search):
            if len(waiting) >= max(BATCH, search.timed // 2) or bound >= search.worst_s:
                self._look(waiting, search)
                waiting = []
                if bound >= search.worst_s:
                    return None
                if search.timed >= most:
                    return bound
            waiting.append(one)
        self._look(waiting, search)
        return None

    def _ordered(self, size: int, groups: Sequence[LayoutGroup], search: _Search) -> Iterator[tuple[float, Experiment]]:
        """Yields (estimate of the cautious time, layout) in non-decreasing order of the estimate.

        The factor for replicas, other kinds of context parallelism and routed experts is computed exactly only when the
        row would come next by its bound; the row then moves back accordingly.
        """
        mine = np.flatnonzero(self.space.size[self.rows] == size)
        if not len(mine) or not groups:
            return
        sets: dict[tuple[str, int], list[LayoutGroup]] = defaultdict(list)
        for group in groups:
            sets[group.cp_kind, group.replicas].append(group)
        waiting: list[tuple[float, int, int, int]] = []
        promising: list[_Promising] = []
        for number, alike in enumerate(sets.values()):
            first, estimates = self._first(mine, alike, search.worst_s)
            rows = np.flatnonzero(first < search.worst_s)
            waiting += [(float(first[row]), row, number, -1) for row in rows.tolist()]
            ahead = mine[rows[np.argsort(first[rows], kind="stable")]].tolist()
            promising.append(_Promising(alike, rows, estimates[rows], iter(ahead)))
        heapq.heapify(waiting)
        while waiting:
            estimate, row, number, at = heapq.heappop(waiting)
            of_set = promising[number]
            if at >= 0:
                experiment = self.space.layout(int(self.rows[mine[row]]), of_set.groups[at])
                if experiment is not None and self.space.meets(experiment):
                    yield estimate, experiment
                continue
            if estimate >= search.worst_s:
                return
            factor = self._factor(int(mine[row]), of_set.groups[0], of_set.ahead)
            wider = float(self._widening(abs(np.log(factor))))
            for one, plain in enumerate(of_set.estimates_of(row)):
                if math.isfinite(later := max(estimate, factor * plain * wider)) and later < search.worst_s:
                    heapq.heappush(waiting, (later, row, number, one))

    def _first(self, mine: Ints, alike: Sequence[LayoutGroup], worst_s: float) -> tuple[Floats, Floats]:
        """(lower bound of the estimates by row, estimates without the structure factor by row and group), of groups
        with the same replicas and kind of context parallelism. Bounds are tight for rows that may beat ``worst_s``."""
        estimates = np.stack([self._estimate(mine, group) for group in alike], axis=1)
        first = np.stack([self._least(mine, group) for group in alike], axis=1).min(axis=1) * self._widening(0.0)
        if not self._is_form(alike[0]) and len(there := np.flatnonzero(first < worst_s)):
            factors = self._least_factors(mine, there, alike[0].cp_kind, alike[0].replicas)
            wider = self._widening(np.maximum(0.0, np.log(factors)))
            first[there] = np.maximum(first[there], factors * wider * estimates[there].min(axis=1))
        return first, estimates

    def _widening(self, log_factor: Any) -> Any:
        """Lower estimate of cautious over predicted time, by the size of the structure factor's logarithm."""
        structure = NORMAL_90 * _OF_WIDTH * layouts.PLANNED_SPREAD * log_factor
        return np.exp(CAUTION * np.hypot(self.width, structure))

    def _least_factors(self, mine: Ints, there: Ints, kind: str, replicas: int) -> Floats:
        """Bounds of the rows ``mine[there]``."""
        rows, known = self.rows[mine[there]], self.factor_bounds.get(kind)
        if known is None or not known.covers(rows):
            # Rings are needed of nearly all rows, at the latest with other schedules.
            asked = self.rows[mine] if kind == "ring" else rows
            known = self.factor_bounds[kind] = FactorBounds.of(self.times, self.space, asked, kind)
        return known.least(rows, replicas)

    def _is_form(self, group: LayoutGroup) -> bool:
        """Whether the closed form describes the group's structure, so that its factor is 1. This project's engine adds
        to sums in its products and shares memory between tensor-parallel ranks, which the form does not know, and
        bounds know the first tier of a network alone."""
        q = self.space.question
        if len(q.cluster.outside) > 1:
            return False
        return q.engine != ENGINE and q.model.moe is None and group.cp_kind == "ring" and group.replicas == 1

    def _factor(self, here: int, group: LayoutGroup, ahead: Iterator[int]) -> float:
        """Factor on a row's time for groups with the same replicas and kind of context parallelism.

        ``ahead``: the rows that will be needed next, some of which are computed in the same batch.
        """
        kind, replicas = group.cp_kind, group.replicas
        if self._is_form(group):
            return 1.0
        if (here, kind, replicas) not in self.factors:
            rows_of_batch = list(dict.fromkeys([here, *islice(ahead, BATCH)]))
            plain_layouts = [self._plain_schedule(one, kind, replicas) for one in rows_of_batch]
            self.factors |= {(one, kind, replicas): math.inf for one in rows_of_batch}
            known = [
                (one, layout) for one, layout in zip(rows_of_batch, plain_layouts, strict=True) if layout is not None
            ]
            if known:
                factors = self.times.factors([layout for _, layout in known]).tolist()
                self.factors |= {(one, kind, replicas): factor for (one, _), factor in zip(known, factors, strict=True)}
        return self.factors[here, kind, replicas]

    def _plain_schedule(self, here: int, kind: str, replicas: int) -> Experiment | None:
        """A row's layout with the schedule that bounds assume; None if it breaks a rule."""
        row = int(self.rows[here])
        experiment = self.space.layout(row, self.space.plain_group(row, kind, replicas))
        return None if experiment is None or violations(experiment, self.space.question.cluster) else experiment

    def _estimate(self, mine: Ints, group: LayoutGroup) -> Floats:
        """Estimate of each row without its structure factor; infinite without a layout in the group that may fit."""
        rows, kind = self.rows[mine], KINDS.index(group.recompute)
        parts = self.bounds if group.cp_kind == "ring" else self.of_other_kinds
        m, stages = self.space.micro_batches[rows], self.space.pp[rows]
        left = FILL.get(group.schedule) or fill_share(np.full(len(rows), group.virtual_stages), m, stages)
        of_kind, of_none = (
            parts.work[mine, one] + left * parts.fill[mine, one] + parts.traffic[mine, one] for one in (kind, 0)
        )
        there = self._there(mine, rows, group)
        estimates = np.full(len(mine), np.inf)
        estimates[there] = MARGIN * (of_none + (of_kind - of_none) / group.every)[there]
        return estimates

    def _least(self, mine: Ints, group: LayoutGroup) -> Floats:
        """Estimate from the compute time alone, which no schedule shortens."""
        parts = self.bounds if group.cp_kind == "ring" else self.without_ring
        of_kind, of_none = (parts.work[mine, one] for one in (KINDS.index(group.recompute), 0))
        if self._is_form(group):
            return self._estimate(mine, group)
        estimates = np.full(len(mine), np.inf)
        there = self._there(mine, self.rows[mine], group)
        estimates[there] = MARGIN * (of_none + (of_kind - of_none) / group.every)[there]
        return estimates

    def _there(self, mine: Ints, rows: Ints, group: LayoutGroup) -> Flags:
        """Rows with a layout in the group that may fit."""
        pp, zero, cp = self.space.pp[rows], self.space.zero[rows], self.space.cp[rows]
        there: Flags = (pp > 1) == (group.schedule != "none")
        there &= pp * group.virtual_stages <= self.space.question.model.num_layers
        there &= np.where(zero > 0, self.whole[group.replicas][mine], group.replicas == 1)
        there &= (cp > 1) | (group.cp_kind == "ring")
        fits: Flags = self.needs(mine, group) <= self.limit_bytes
        return there & fits

    def needs(self, mine: Ints, group: LayoutGroup) -> Floats:
        """Bound on the bytes that each row's layout in the group needs."""
        floor = self.floors[group.replicas]
        needs: Floats = (floor.v_shaped if is_v_shaped(group.schedule) else floor.piped)[
            mine, KINDS.index(group.recompute)
        ]
        return needs + self.more[group._replace(replicas=1, cp_kind="ring")][mine] if group.every > 1 else needs

    def _look(self, experiments: list[Experiment], search: _Search) -> None:
        """Time layouts, and keep the fastest of each family that fits."""
        cluster = self.space.question.cluster
        new = [one for one in dict.fromkeys(experiments) if not violations(one, cluster)]
        search.timed += len(new)
        timed = [(time, one) for time, one in zip(self.times.of_layouts(new), new, strict=True) if time is not None]
        for time, one in sorted(timed, key=lambda pair: pair[0].cautious_s):
            if time.cautious_s >= search.worst_s:
                break
            before = search.kept.get(family_of(one))
            if before is not None and time.cautious_s >= before.time.cautious_s:
                continue
            fits = self.fitting(one, time)
            if fits is not None and (before is None or fits.time.cautious_s < before.time.cautious_s):
                search.keep(fits)

    def fitting(self, one: Experiment, time: StepTime) -> RankedLayout | None:
        """The layout with its memory, and the time that a nearly full device takes more; None: it does not fit."""
        memory = self.peak(one, self.limit_bytes)
        if memory is None or memory.peak_bytes > self.limit_bytes or not self._fits_host(one):
            return None
        if is_own(one):
            time = self.times.forecast.near_full(time, memory.peak_bytes)
        return RankedLayout(experiment=one, time=time, memory=memory)

    def _fits_host(self, experiment: Experiment) -> bool:
        """Whether a node has the memory that optimizers keep on its host, or nobody knows how much it has."""
        cluster = self.space.question.cluster
        limit = cluster.host.memory_bytes
        return limit is None or node_host_bytes(experiment, cluster.devices_per_node) <= limit

    def peak(self, experiment: Experiment, limit_bytes: float = math.inf) -> Peak | None:
        """Peak memory without the workspace of matrix products, of any stage above ``limit_bytes`` if there is one;
        None: unknown."""
        if is_own(experiment):
            return peak_stage(experiment, limit_bytes)
        return self.times.forecast.memory.peak(experiment)


def _sorted(layouts: Iterable[RankedLayout]) -> list[RankedLayout]:
    return sorted(layouts, key=lambda one: (one.time.cautious_s, one.experiment.id))
