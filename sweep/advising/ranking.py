"""The fastest layouts that fit, of each number of devices, without timing all of them.

1. Rows that need more memory than a device has in any of their forms are left out (`sweep.advising.floor`).
2. For the others the parts of a step are computed, all at one time (`Times.bounds`), and from these an estimate for
   every group of layouts: by recomputation, schedule, replicas of shards and kind of context parallelism.
3. In the order of these estimates groups are spelled out and timed as a plan times them, until the next estimate is
   worse than the best few found by a margin (`MARGIN`). The exact memory is only asked for layouts that would be among
   these.

Estimates are no proof: a layout that is faster than its estimate by more than the margin is missed. A test compares the
answer with the plan of whole grids.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweep.advising.floor import Floor, floor_of, saved_of
from sweep.advising.space import KINDS, Group, Ints, Space, is_v_shaped
from sweep.advising.times import Bounds, Times
from sweep.grids.step_time import StepTime
from workloads.costs.memory.estimate import StageMemory, peak_stage
from workloads.predict.points import Floats
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import Experiment

MARGIN = 0.95
"""Estimates are taken so much lower, for what structures save that no part of the form says."""
FILL = {"interleaved_zero_bubble": 0.5, "zero_bubble_v": 0.35, "dualpipe_v": 0.35}
"""What schedules leave of the time to fill a pipeline (of Llama 70B and Qwen3-30B-A3B nine in ten leave more);
interleaved 1F1B a part for each of its stages."""
BATCH = 96
"""Layouts that are timed at one time."""

Family = tuple[int, ...]
Flags = NDArray[Any]


def family_of(e: Experiment) -> Family:
    """Degrees, micro-batch and ZeRO stage of a layout."""
    return e.dp, e.tp, e.cp, e.pp, e.ep, e.etp, e.micro_batch_size, e.zero_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout that fits, with what is predicted of it."""

    experiment: Experiment
    time: StepTime
    memory: StageMemory

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.experiment.tokens_per_step / self.time.step_time_s / self.experiment.world_size


@dataclass(slots=True, kw_only=True)
class Ranked:
    """The best of one number of devices, fastest first, one of each family."""

    size: int
    best: list[Found]
    timed: int
    """Layouts that were timed in full."""
    open_bound_s: float | None = None
    """The search was given up: nothing that is left can be faster than this. None: it has ended."""


@dataclass(slots=True)
class _Search:
    """What one search has seen."""

    top: int
    kept: dict[Family, Found] = field(default_factory=dict)
    timed: int = 0
    worst_s: float = math.inf
    """What a layout must be faster than to be among the best."""

    def keep(self, found: Found) -> None:
        """``found`` is faster than what was kept of its family."""
        self.kept[family_of(found.experiment)] = found
        if len(self.kept) >= self.top:
            times = (one.time.step_time_s for one in self.kept.values())
            self.worst_s = heapq.nsmallest(self.top, times)[-1]


@dataclass(slots=True)
class Ranking:
    space: Space
    times: Times
    limit_bytes: int
    most_timed: int = 12_000
    """Layouts of one number of devices that are timed at most."""
    rows: Ints = field(init=False)
    """Those that may fit in memory, of the space."""
    floors: dict[int, Floor] = field(init=False)
    """Of these rows, by replicas."""
    bounds: Bounds = field(init=False)
    of_other_kinds: Bounds = field(init=False)
    without_ring: Bounds = field(init=False)
    """Of these rows: of a ring of context-parallel ranks; without what its turns cost the host; without its messages,
    too."""
    factors: dict[tuple[int, str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        space, saved = self.space, saved_of(self.space)
        lowest = self._lowest(floor_of(space, 1, saved), space.pp)
        self.rows = np.flatnonzero(lowest.min(axis=1) <= self.limit_bytes)
        self.bounds = self.of_other_kinds = self.without_ring = self.times.bounds(space, self.rows)
        if (space.cp[self.rows] > 1).any() and space.kinds != ("ring",):
            self.of_other_kinds, self.without_ring = self._other_kinds(context=True), self._other_kinds(context=False)
        self.floors = {
            replicas: Floor(*(one[self.rows] for one in floor_of(space, replicas, saved)))
            for replicas in dict.fromkeys(group.replicas for group in space.groups)
        }

    def _other_kinds(self, *, context: bool) -> Bounds:
        of_cp = self.space.cp[self.rows] > 1
        found = Bounds(*(one.copy() for one in self.bounds))
        for whole, part in zip(
            found, self.times.bounds(self.space, self.rows[of_cp], context=context, ring=False), strict=True
        ):
            whole[of_cp] = part
        return found

    @staticmethod
    def _lowest(floor: Floor, pp: Ints) -> Floats:
        return np.where((pp > 1)[:, None], np.minimum(floor.piped, floor.v_shaped), floor.piped)

    def bound_s(self, size: int) -> float:
        """No layout of so many devices is estimated to be faster; infinite where none may fit."""
        mine = self.space.size[self.rows] == size
        fits = self._lowest(self.floors[1], self.space.pp[self.rows])[mine] <= self.limit_bytes
        return MARGIN * float(np.where(fits, self.without_ring.work[mine], np.inf).min(initial=np.inf))

    def best(self, size: int, top: int) -> Ranked:
        """The ``top`` families of one number of devices."""
        search = _Search(top)
        # Plain layouts first: of these a bound is nearly the time, and a good layout at once makes other bounds tell.
        self._walk(size, search, [group for group in self.space.groups if group.is_plain], BATCH * top)
        given_up = self._walk(size, search, self.space.groups, self.most_timed)
        best = sorted(search.kept.values(), key=lambda one: (one.time.step_time_s, one.experiment.id))[:top]
        return Ranked(size=size, best=best, timed=search.timed, open_bound_s=given_up)

    def _walk(self, size: int, search: _Search, groups: Sequence[Group], most: int) -> float | None:
        """Time the layouts of groups in the order of their bounds; the bound at which it was given up."""
        waiting: list[Experiment] = []
        for bound, one in self._ordered(size, groups, search):
            if len(waiting) >= BATCH or bound >= search.worst_s:
                self._look(waiting, search)
                waiting = []
                if bound >= search.worst_s:
                    return None
                if search.timed >= most:
                    return bound
            waiting.append(one)
        self._look(waiting, search)
        return None

    def _ordered(self, size: int, groups: Sequence[Group], search: _Search) -> Iterator[tuple[float, Experiment]]:
        """(estimate, layout), the estimates never falling.

        What replicas, other kinds of context parallelism and routed experts make of a row's time is computed when the
        row would be next for them: it moves them back.
        """
        mine = np.flatnonzero(self.space.size[self.rows] == size)
        if not len(mine) or not groups:
            return
        plain = np.stack([self._estimate(mine, group) for group in groups], axis=1)
        sets: dict[tuple[str, int], list[int]] = defaultdict(list)
        for at, group in enumerate(groups):
            sets[group.cp_kind, group.replicas].append(at)
        waiting: list[tuple[float, int, int, int]] = []
        keys, ahead = list(sets), list[Iterator[int]]()
        for number, key in enumerate(keys):
            first = np.stack([self._least(mine, groups[at]) for at in sets[key]], axis=1).min(axis=1)
            there = np.flatnonzero(np.isfinite(first))
            waiting += [(float(first[row]), int(row), number, -1) for row in there]
            ahead.append(iter(mine[there[np.argsort(first[there], kind="stable")]].tolist()))
        heapq.heapify(waiting)
        while waiting:
            estimate, row, number, at = heapq.heappop(waiting)
            if at >= 0:
                if (found := self.space.layout(int(self.rows[mine[row]]), groups[at])) is not None:
                    yield estimate, found
                continue
            if estimate >= search.worst_s:
                return
            factor = self._factor(int(mine[row]), groups[sets[keys[number]][0]], ahead[number])
            for one in sets[keys[number]]:
                if math.isfinite(later := max(estimate, factor * float(plain[row, one]))) and later < search.worst_s:
                    heapq.heappush(waiting, (later, row, number, one))

    def _factor(self, here: int, group: Group, ahead: Iterator[int]) -> float:
        """What a row's time is multiplied by for groups with the same replicas and kind of context parallelism.

        ``ahead``: the rows that are asked for next, of which some are computed at one time.
        """
        kind, replicas = group.cp_kind, group.replicas
        if self.space.question.model.moe is None and kind == "ring" and replicas == 1:
            return 1.0
        if (here, kind, replicas) not in self.factors:
            those = list(dict.fromkeys([here, *islice(ahead, BATCH)]))
            found = [self._plain_schedule(one, kind, replicas) for one in those]
            self.factors |= {(one, kind, replicas): math.inf for one in those}
            known = [(one, layout) for one, layout in zip(those, found, strict=True) if layout is not None]
            if known:
                factors = self.times.factors([layout for _, layout in known]).tolist()
                self.factors |= {(one, kind, replicas): factor for (one, _), factor in zip(known, factors, strict=True)}
        return self.factors[here, kind, replicas]

    def _plain_schedule(self, here: int, kind: str, replicas: int) -> Experiment | None:
        """A row's layout with the schedule that bounds are of; None: it breaks a rule."""
        row = int(self.rows[here])
        schedule = "1f1b" if self.space.pp[row] > 1 else "none"
        found = self.space.layout(row, Group("selective", 1, schedule, 1, replicas, kind))
        return None if found is None or violations(found, self.space.question.cluster) else found

    def _estimate(self, mine: Ints, group: Group) -> Floats:
        """Of each row, without what its structure makes of it; infinite where it has no such layout or it does not
        fit."""
        rows, kind = self.rows[mine], KINDS.index(group.recompute)
        parts = self.bounds if group.cp_kind == "ring" else self.of_other_kinds
        left = FILL.get(group.schedule, 1.0 / group.virtual_stages)
        of_kind, of_none = (
            parts.work[mine, one] + left * parts.fill[mine, one] + parts.traffic[mine, one] for one in (kind, 0)
        )
        there = self._there(mine, rows, group)
        found = np.full(len(mine), np.inf)
        found[there] = MARGIN * (of_none + (of_kind - of_none) / group.every)[there]
        return found

    def _least(self, mine: Ints, group: Group) -> Floats:
        """The work alone: what no structure does away with."""
        parts = self.bounds if group.cp_kind == "ring" else self.without_ring
        of_kind, of_none = (parts.work[mine, one] for one in (KINDS.index(group.recompute), 0))
        if group.replicas == 1 and group.cp_kind == "ring" and self.space.question.model.moe is None:
            return self._estimate(mine, group)
        found = np.full(len(mine), np.inf)
        there = self._there(mine, self.rows[mine], group)
        found[there] = MARGIN * (of_none + (of_kind - of_none) / group.every)[there]
        return found

    def _there(self, mine: Ints, rows: Ints, group: Group) -> Flags:
        """Rows that have a layout in the group which may fit."""
        pp, zero, cp, floor = (
            self.space.pp[rows],
            self.space.zero[rows],
            self.space.cp[rows],
            self.floors[group.replicas],
        )
        needs = (floor.v_shaped if is_v_shaped(group.schedule) else floor.piped)[mine, KINDS.index(group.recompute)]
        there: Flags = (pp > 1) == (group.schedule != "none")
        there &= pp * group.virtual_stages <= self.space.question.model.num_layers
        there &= (zero > 0) | (group.replicas == 1)
        there &= (cp > 1) | (group.cp_kind == "ring")
        fits: Flags = needs <= self.limit_bytes
        return there & fits

    def _look(self, experiments: list[Experiment], search: _Search) -> None:
        """Time layouts, and keep of each family the fastest that fits."""
        cluster = self.space.question.cluster
        new = [one for one in dict.fromkeys(experiments) if not violations(one, cluster)]
        search.timed += len(new)
        timed = [(time, one) for time, one in zip(self.times.of_layouts(new), new, strict=True) if time is not None]
        for time, one in sorted(timed, key=lambda pair: pair[0].step_time_s):
            if time.step_time_s >= search.worst_s:
                break
            before = search.kept.get(family_of(one))
            if before is not None and time.step_time_s >= before.time.step_time_s:
                continue
            memory = peak_stage(one)
            time = self.times.forecast.near_full(time, memory.peak_bytes)
            if memory.peak_bytes <= self.limit_bytes and (before is None or time.step_time_s < before.time.step_time_s):
                search.keep(Found(experiment=one, time=time, memory=memory))

    def smallest(self, size: int) -> tuple[Experiment, StageMemory] | None:
        """Where nothing fits: of the layouts with the lowest floors the one that needs least; None: there are none."""
        of_size = np.flatnonzero(self.space.size == size)
        floor = floor_of(self.space).piped[of_size]
        best: tuple[Experiment, StageMemory] | None = None
        for place in np.argsort(floor, axis=None)[:_ASKED_OF]:
            row, kind = divmod(int(place), len(KINDS))
            for group in self.space.groups:
                if group.recompute != KINDS[kind] or group.every > 1 or is_v_shaped(group.schedule):
                    continue
                one = self.space.layout(int(of_size[row]), group)
                if one is None or violations(one, self.space.question.cluster):
                    continue
                memory = peak_stage(one)
                if best is None or memory.peak_bytes < best[1].peak_bytes:
                    best = one, memory
        return best


_ASKED_OF = 64
"""Rows with the lowest floors of which `Ranking.smallest` asks the exact memory."""
