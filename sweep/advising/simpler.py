"""The simplest of a family's layouts that no prediction tells apart from its fastest.

Recomputation only adds work, so it is chosen only where memory is short. By a fitted time, and the ratio from which
another layout's follows, recomputing every fourth layer may still look faster than none, by less than predictions err.
An unusual schedule, replicas of shards and other kinds of context parallelism are likewise chosen only if time is won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from sweep.advising.axes import KINDS
from sweep.advising.conditions import meets
from sweep.advising.ranked import RankedLayout
from sweep.advising.space import LayoutSpace
from sweep.advising.times import Times
from sweep.grids.step_time import ALIKE, StepTime
from workloads.rules.layout_rules import violations
from workloads.spec.activations.offload import canonical_offload
from workloads.spec.experiment import Experiment

Fitting = Callable[[Experiment, StepTime], RankedLayout | None]
"""The layout with its memory if it fits; None: it does not."""


def simplest(best: Sequence[RankedLayout], space: LayoutSpace, times: Times, fitting: Fitting) -> list[RankedLayout]:
    """For each of the ``best`` the layout with the least recomputation, and of these the one with the fewest departures
    from plain 1F1B, of those that differ in nothing else, take at most `ALIKE` longer and leave memory free."""
    found, longest_s = list(best), [(1 + ALIKE) * one.time.cautious_s for one in best]
    for variants in (_recomputing_less, _departing_less, _recomputing_less):
        tried = [(at, one) for at, of_best in enumerate(found) for one in variants(of_best.experiment, space)]
        question = space.question
        tried = [(at, one) for at, one in tried if meets(one, question.where) and not violations(one, question.cluster)]
        simpler: dict[int, RankedLayout] = {}
        for (at, one), time in zip(tried, times.of_layouts([one for _, one in tried]), strict=True):
            if at in simpler or time is None or time.cautious_s > longest_s[at]:
                continue
            other = fitting(one, time)
            # A step that is longer with its memory than without it stops to free memory.
            if other is not None and other.time == time:
                simpler[at] = other
        found = [simpler.get(at, one) for at, one in enumerate(found)]
    return found


def _recomputing_less(e: Experiment, space: LayoutSpace) -> Iterator[Experiment]:
    """Layouts that recompute less, from the least on."""
    amounts = sorted((KINDS.index(kind), -every) for kind, every in space.recomputations)
    for kind, every in amounts:
        if (kind, every) < (KINDS.index(e.recompute), -e.recompute_every):
            less = e.replace(recompute=KINDS[kind], recompute_every=-every if kind else 1)
            offload = canonical_offload(space.question.activation_offload, less.recompute)
            yield less.replace(activation_offload=offload)


def _departing_less(e: Experiment, space: LayoutSpace) -> Iterator[Experiment]:
    """Layouts that depart less from 1F1B, one group of shards and the ring, from the fewest departures on."""
    schedules = [one for one in space.schedules if e.pp > 1] or [(e.pp_schedule, e.virtual_stages)]
    replicas = {e.dp_replicate, *([1] if e.zero_stage and 1 in space.replicas else [])}
    kinds = {e.cp_kind, *(["ring"] if "ring" in space.kinds else [])}
    others = [
        e.replace(
            pp_schedule=schedule, virtual_stages=stages, dp_replicate=copies, dp_shard=e.dp // copies, cp_kind=kind
        )
        for (schedule, stages), copies, kind in product(schedules, sorted(replicas), sorted(kinds))
    ]
    fewer = [one for one in others if departures(one) < departures(e)]
    yield from sorted(fewer, key=lambda one: (departures(one), one.id))


def departures(e: Experiment) -> int:
    """Number of ways in which a layout departs from 1F1B, one chunk a rank, one group of shards and a ring."""
    odd = e.pp_schedule not in ("none", "1f1b"), e.virtual_stages > 1, e.cp_kind != "ring"
    return sum(odd) + (e.zero_stage > 0 and e.dp_replicate > 1)
