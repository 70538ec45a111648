"""Layouts for the parity tests: a list in which every two choices of different axes meet, and larger combinations.

Bugs of parallel training sit where two features meet (Megatron-LM issue 7452, TTrace arXiv:2506.09280), so every pair
of values of two axes is in some layout that the rules allow, and no layout is written down by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from math import prod
from typing import Any

from tests.workloads.engine.parity import experiment
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec.experiment import Experiment

Layout = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

AXES: dict[str, list[Layout]] = {
    "data": [
        {},
        {"dp": 2, "zero_stage": 0},
        {"dp": 2, "zero_stage": 1},
        {"dp": 2, "zero_stage": 2},
        {"dp": 2, "zero_stage": 3},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    ],
    "tp": [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}],
    "cp": [{}, *({"cp": 2, "cp_kind": kind} for kind in ("ring", "allgather", "ulysses"))],
    "pp": [
        {},
        {"pp": 2, "pp_schedule": "gpipe"},
        {"pp": 2, "pp_schedule": "1f1b"},
        {"pp": 2, "pp_schedule": "1f1b", "pp_split": "even"},
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"pp": 2, "pp_schedule": "interleaved_zero_bubble", "virtual_stages": 2},
        {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2},
        {"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 2},
    ],
    "recompute": [
        {},
        {"recompute": "selective"},
        {"recompute": "full"},
        *({"recompute": named} for named in ("norm+swiglu", "rope")),
        {"recompute": "selective", "recompute_every": 3},
        {"recompute": "full", "recompute_every": 2},
        {"recompute": "selective+mla_up"},
    ],
    "rounds": [{"rounds": 1}, {"rounds": 2}, {"rounds": 4}],
    "tie": [{}, {"tie": True}],
    "heads": [{}, {"num_kv_heads": 4}],
    "qk_norm": [{}, {"qk_norm": True}],
    "latent": [{}, {"latent": 16}, {"latent": 0}],
}
"""The values of each axis. ``rounds`` are micro-batches of one sequence."""

DEGREES = ("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp")
TRIES = 12
"""Random layouts among which `every_pair` chooses the one with most new pairs."""


def every_pair(most_ranks: int, seed: int = 0) -> list[Experiment]:
    """Layouts of at most ``most_ranks`` ranks in which every pair meets that can meet; greedily few."""
    draw = random.Random(seed)
    missing = {pair for pair in _pairs() if _completed(dict(pair), draw, most_ranks) is not None}
    layouts = []
    while missing:
        wanted = min(missing)
        tries = [_completed(dict(wanted), draw, most_ranks) for _ in range(TRIES)]
        best = max((choice for choice in tries if choice), key=lambda choice: len(missing & met_by(choice)))
        missing -= met_by(best)
        layouts.append(best)
    return [experiment(**_fields(choice)) for choice in layouts]


def larger(count: int, most_ranks: int, fewest_axes: int, seed: int = 1) -> list[Experiment]:
    """Random layouts in which at least ``fewest_axes`` of the degrees dp, tp, cp and pp are above 1."""
    draw = random.Random(seed)
    found: dict[str, Experiment] = {}
    while len(found) < count:
        choice = {axis: draw.randrange(len(values)) for axis, values in AXES.items()}
        case = _allowed(choice, most_ranks)
        if case is not None and sum(degree > 1 for degree in (case.dp, case.tp, case.cp, case.pp)) >= fewest_axes:
            found[case.id] = case
    return list(found.values())


def met_by(choice: dict[str, int]) -> set[Pair]:
    """Every pair of values that a layout brings together."""
    return {(a, b) for a, b in combinations(sorted(choice.items()), 2)}


def _pairs() -> Iterator[Pair]:
    for one, two in combinations(sorted(AXES), 2):
        yield from (((one, i), (two, j)) for i in range(len(AXES[one])) for j in range(len(AXES[two])))


def _completed(fixed: dict[str, int], draw: random.Random, most_ranks: int) -> dict[str, int] | None:
    """A layout with the ``fixed`` values and any others that the rules allow; None if 200 draws find none."""
    for _ in range(200):
        choice = {axis: fixed.get(axis, draw.randrange(len(values))) for axis, values in AXES.items()}
        if _allowed(choice, most_ranks) is not None:
            return choice
    return None


def _allowed(choice: dict[str, int], most_ranks: int) -> Experiment | None:
    if choice["latent"] and (choice["heads"] or choice["qk_norm"]):
        return None  # latent attention has neither groups of heads nor norms of them
    fields = _fields(choice)
    if prod(fields.get(name, 1) for name in DEGREES) > most_ranks:  # before an experiment is made, which takes longer
        return None
    case = experiment(**fields)
    if layout_violations(case) or lacking(case):
        return None
    return case


def _fields(choice: dict[str, int]) -> Layout:
    fields: Layout = {}
    for axis, at in choice.items():
        fields |= AXES[axis][at]
    return fields
