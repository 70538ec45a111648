"""The best layouts of a question over all that it asks to have on the host: each choice is ranked by itself."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sweep.advising.least_memory import smallest
from sweep.advising.question import Question
from sweep.advising.ranked import Family, Peak, Ranked, RankedLayout, family_of
from sweep.advising.ranking import Ranking
from sweep.advising.space import refuse_what_no_layout_may, space_of
from sweep.advising.times import Times
from sweep.grids.step_time import ALIKE
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Rankings:
    """A ranking for each choice of `Question.offloads` with which some layout obeys the rules."""

    each: tuple[Ranking, ...]

    @classmethod
    def of(cls, question: Question, times: Times) -> Rankings:
        """Raises `InvalidSweep` as `space_of` does if no choice has a layout."""
        limit = question.usable_bytes - question.cluster.device.workspace_bytes
        found, refused = [], None
        for one in question.each_offload:
            try:
                refuse_what_no_layout_may(one)
                found.append(Ranking(space_of(one), times, limit))
            except InvalidSweep as error:
                refused = refused or error
        if not found:
            assert refused is not None
            raise refused
        return cls(tuple(found))

    @property
    def question(self) -> Question:
        return self.each[0].space.question

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices for which some layout obeys the rules, smallest first."""
        return tuple(sorted({int(size) for one in self.each for size in set(one.space.size.tolist())}))

    @property
    def allowed(self) -> int:
        """Number of layouts that obey the rules."""
        return sum(one.space.allowed for one in self.each)

    @property
    def families(self) -> int:
        return max(len(one.space) for one in self.each)

    @property
    def may_fit(self) -> int:
        """Number of families that may fit in memory with the choice that needs least."""
        return max(len(one.rows) for one in self.each)

    def bound_s(self, size: int) -> float:
        """As `Ranking.bound_s`."""
        return min(one.bound_s(size) for one in self.each)

    def best(self, size: int, top: int) -> Ranked:
        """The ``top`` families of one number of devices, each with the choice of which it takes least time or, of those
        that no prediction tells apart, has least on the host."""
        if len(self.each) == 1:
            return self.each[0].best(size, top)
        found: dict[Family, list[RankedLayout]] = defaultdict(list)
        timed, open_s, beat_s = 0, math.inf, math.inf
        for ranking in self.each:
            ranked = ranking.best(size, top, beat_s)
            timed, open_s = timed + ranked.timed, min(open_s, ranked.open_bound_s or math.inf)
            for one in ranked.best:
                found[family_of(one.experiment)].append(one)
            fastest = [min(one.time.cautious_s for one in layouts) for layouts in found.values()]
            beat_s = (1 + ALIKE) * heapq.nsmallest(top, fastest)[-1] if len(fastest) >= top else math.inf
        best = sorted(map(self._plainest, found.values()), key=lambda one: (one.time.cautious_s, one.experiment.id))
        return Ranked(size=size, best=best[:top], timed=timed, open_bound_s=open_s if open_s < math.inf else None)

    def _plainest(self, layouts: Iterable[RankedLayout]) -> RankedLayout:
        layouts = list(layouts)
        longest_s = (1 + ALIKE) * min(one.time.cautious_s for one in layouts)
        alike = [one for one in layouts if one.time.cautious_s <= longest_s]
        node = self.question.cluster.devices_per_node
        return min(alike, key=lambda one: (node_host_bytes(one.experiment, node), one.time.cautious_s))

    def smallest(self, size: int) -> tuple[Experiment, Peak] | None:
        """As `sweep.advising.least_memory.smallest`, over all combinations."""
        found = (smallest(one.space, size, one.peak) for one in self.each)
        return min((one for one in found if one is not None), key=lambda one: one[1].peak_bytes, default=None)
