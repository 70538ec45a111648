"""Layouts for the parity tests: a list in which every two choices of different axes meet, and larger combinations.

Bugs of parallel training sit where two features meet (Megatron-LM issue 7452, TTrace arXiv:2506.09280), so every pair
of values of two axes is in some layout that the rules allow, and no layout is written down by hand.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import combinations
from math import prod
from typing import Any, get_args

from tests.workloads.engine.parity import experiment
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec.experiment import Experiment, Recompute

OF_DENSE = [kind for kind in get_args(Recompute) if "experts" not in kind]
FEW_RANKS = [
    experiment(),
    *(experiment(dp=2, zero_stage=zero, micro_batch_size=2) for zero in range(4)),
    experiment(tp=2),
    experiment(tp=2, sequence_parallel=False, recompute="full"),
    *(experiment(cp=2, cp_kind=kind, micro_batch_size=2) for kind in ("ring", "allgather", "ulysses")),
    experiment(cp=2, zero_stage=3, micro_batch_size=2),
    *(experiment(pp=2, pp_schedule=schedule, micro_batch_size=2) for schedule in ("gpipe", "1f1b")),
    experiment(pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, micro_batch_size=2, tie=True),
    experiment(pp=2, pp_schedule="interleaved_zero_bubble", virtual_stages=2, micro_batch_size=2),
    experiment(pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, micro_batch_size=2, tie=True),
    experiment(pp=2, pp_schedule="dualpipe_v", virtual_stages=2, micro_batch_size=1),
    experiment(pp=2, pp_stages="E|tttttL", micro_batch_size=2, tie=True),
    experiment(tp=2, pad_vocab_to=100, micro_batch_size=2),  # of 96 rows; every second one of 200 stands for no token
    experiment(pad_vocab_to=40, dp=2, zero_stage=3, tie=True, pp=2, pp_schedule="gpipe", micro_batch_size=2),
    experiment(pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, pp_stages="E|t|tttt|L", micro_batch_size=2),
    *(experiment(qk_norm=True, micro_batch_size=2, recompute=kind) for kind in OF_DENSE if "mla" not in kind),
    *(experiment(micro_batch_size=2, recompute="full", recompute_every=every) for every in (2, 4)),
    # The plain formulas keep values as they are; on a CPU the fused kernel keeps them padded, which no recipe makes.
    *(experiment(latent=16, micro_batch_size=2, recompute=kind, attention="math") for kind in OF_DENSE),
    experiment(latent=0, tp=2, micro_batch_size=2, recompute="norm+mla_up", attention="math"),
    experiment(latent=16, tp=2, sequence_parallel=False, micro_batch_size=2, recompute="mla_up", attention="math"),
    *(experiment(latent=queries, tp=2, sequence_parallel=sp) for queries in (16, 0) for sp in (True, False)),
]
"""Each axis alone, on at most two ranks."""
ODD = [
    experiment(tie=True, dp=2, zero_stage=3, micro_batch_size=2),
    experiment(dp=3, zero_stage=3, global_batch_size=12, micro_batch_size=2, qk_norm=True, recompute="selective"),
    experiment(cp=3, zero_stage=2, tp=2, micro_batch_size=2).replace(seq_len=12),
    experiment(pp=3, micro_batch_size=2, qk_norm=True),
    experiment(pp=3, micro_batch_size=4),
    experiment(pp=3, pp_schedule="gpipe", micro_batch_size=2),
    experiment(pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, micro_batch_size=4, global_batch_size=12),
    experiment(dp=4, zero_stage=2, micro_batch_size=1),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=2, pp=2, pp_schedule="interleaved_zero_bubble"),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=3, pp=2, pp_schedule="dualpipe_v", virtual_stages=2),
]
"""Degrees and numbers of micro-batches that are no powers of 2; fewer micro-batches than stages."""


def with_equal_heads(case: Experiment) -> Experiment:
    """Values as large as queries and keys: else the CPU's kernel pads the values, so that it saves something else than
    the up-projection's output, and nothing is recomputed. A GPU's kernels take them as they are."""
    mla = case.model.mla
    assert mla is not None
    equal = dataclasses.replace(mla, v_head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return case.replace(model=dataclasses.replace(case.model, mla=equal))


OF_MESSAGES = [
    experiment(dp=2, zero_stage=3, micro_batch_size=1, tie=True),
    experiment(dp=2, zero_stage=2, micro_batch_size=1, tie=True, tp=2),
    *(
        experiment(dp=2, zero_stage=zero, pp=2, pp_schedule=schedule, micro_batch_size=1)
        for zero in (1, 3)
        for schedule in ("gpipe", "1f1b")
    ),
    experiment(dp=2, zero_stage=3, pp=3, micro_batch_size=1, recompute="full"),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=3, tp=2, micro_batch_size=1, qk_norm=True),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=2, pp=2, micro_batch_size=1, tie=True),
    experiment(dp=2, tp=2, pp=2, sequence_parallel=False, micro_batch_size=2, recompute="full", qk_norm=True),
    experiment(tp=2, recompute="full", micro_batch_size=2),
    experiment(tp=2, recompute="selective", micro_batch_size=2, sequence_parallel=False),
    # Of 5 layers on two stages, those of the second are not recomputed.
    *(
        experiment(tp=2, pp=2, pp_split="even", recompute="full", recompute_every=5, sequence_parallel=sp, rounds=2)
        for sp in (True, False)
    ),
    experiment(cp=2, dp=2, zero_stage=3, recompute="full", recompute_every=3, micro_batch_size=2),
    experiment(tp=2, recompute="norm+rope", micro_batch_size=2),
    experiment(tp=2, micro_batch_size=2, sequence_parallel=False),
    *(
        experiment(latent=queries, tp=2, micro_batch_size=2, sequence_parallel=sp, recompute=kind)
        for queries in (16, 0)
        for sp in (True, False)
        for kind in ("none", "selective", "full")
    ),
    *(
        with_equal_heads(experiment(latent=queries, tp=2, micro_batch_size=2, recompute=kind, recompute_every=2))
        for queries in (16, 0)
        for kind in ("mla_up", "norm+mla_up", "selective+mla_up")
    ),
    *(
        experiment(latent=16, cp=2, cp_kind=kind, tp=2, zero_stage=3, micro_batch_size=2)
        for kind in ("ring", "allgather", "ulysses")
    ),
]
"""Layouts whose messages are special: with several micro-batches FSDP gathers units that it does not need any more."""

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
