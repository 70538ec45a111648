"""Layers and head of each pipeline stage of a code base, for many rows at one time.

equal     all stages have equally many layers, the first ones one more; the head is on the last
balanced  layers go one by one to the stage with least work, the head counts as work: forward FLOPs, of a layer with
          those of its scores (`workloads.costs.shape.partition`)
greedy    nanotron's: stages are filled in order. A stage is full when the parameters up to its last layer reach its
          share of the model's (the head counted, the embedding not), so that early stages overshoot and late ones may
          hold no layer; the head is on the last. Its build_model compares with "more than" the share, but the first
          ranks of the study's 16 layers with a head of four hold 10 on two stages and 5 on four, not 11 and 6: their
          memory grows by 20 layers' activations a sequence, where 8 stages of three layers grow by 24
ends      the embedding and the loss count as layers, and all chunks get equally many (Megatron-LM's
          account_for_embedding_in_pipeline_split, torchtitan's split); used where `Points.ends` is 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from workloads.predict.points import Floats, Points


class Stages(NamedTuple):
    """Stages of each row; those that hold as much as each other are one column. Arrays of shape (rows, most columns of
    a row), zero where a row has fewer. The first column has the embedding."""

    layers: Floats
    head: Floats
    """1 on the stage with the head."""
    first: Floats
    """1 on the stage with the embedding."""
    number: Floats
    """Number of stages in the column."""
    in_flight: Floats
    """Maximum number of micro-batches whose activations the column's first stage holds under 1F1B,
    ``min(pp - stage, m)``; later ones hold fewer. With v > 1 chunks a stage (interleaved 1F1B, arXiv:2104.04473) runs
    ``2 (pp - stage - 1) + (v - 1) pp`` chunks ahead and holds one more, each 1 / v of its layers, and never more than
    those of all m micro-batches."""


def stages_of(points: Points, partition: dict[str, str]) -> Stages:
    """`Stages` of all rows. ``partition``: rule by name of the code base."""
    rules = np.array([partition[str(name)] for name in points.codebase], dtype=np.str_)
    scores = np.where(rules == "balanced", points.queries * points.seq, 0.0)  # as many FLOPs as so many parameters
    ratio = np.where(points.pp > 1, points.vocabulary_params / (points.layer_params + scores), 0.0)
    head = ratio if np.isfinite(ratio).all() else np.nan_to_num(ratio)
    of_head = np.round(head, 9)
    rows: list[int] = []
    numbers: dict[tuple[int, ...], int] = {}
    for count, pp, vpp, ends, share, name in zip(
        points.layers, points.pp, points.vpp, points.ends, of_head, points.codebase, strict=True
    ):
        if ends > 0:
            held = with_ends(int(count), int(pp), int(vpp))
        else:
            held = split(partition[str(name)], int(count), int(pp), float(share))
        rows.append(numbers.setdefault(held, len(numbers)))
    kinds = [_alike(held) for held in numbers]
    table = np.zeros((5, len(kinds), max(map(len, kinds), default=1)))
    for place, columns in enumerate(kinds):
        table[:, place, : len(columns)] = np.transpose(columns)
    layers, of_end, first, number, stage = table[:, rows]
    chunks, behind = points.vpp[:, None], points.pp[:, None] - stage
    ahead = np.where(chunks > 1, (2 * (behind - 1) + (chunks - 1) * points.pp[:, None] + 1) / chunks, behind)
    in_flight = np.minimum(ahead, points.micro_batches[:, None]) * (number > 0)
    return Stages(layers, of_end, first, number, in_flight)


def _alike(held: tuple[int, ...]) -> list[tuple[int, bool, bool, int, int]]:
    """(layers, whether it has the head, the embedding, how many stages are equal, the first of them) of stages."""
    kinds = [(layers, stage == len(held) - 1, stage == 0) for stage, layers in enumerate(held)]
    counts = Counter(kinds)
    return [(*kind, counts[kind], kinds.index(kind)) for kind in counts]


@lru_cache(maxsize=65536)
def split(rule: str, layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Layers of every stage. ``head``: work of the head in units of a layer."""
    return RULES[rule](layers, pp, head)


@lru_cache(maxsize=65536)
def with_ends(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of every stage if the embedding and the loss count as layers and the first chunks get the remainder.

    Stage s holds the chunks s, s + pp, s + 2 pp and so on.
    """
    base, extra = divmod(layers + 2, pp * vpp)
    chunks = [base + (chunk < extra) for chunk in range(pp * vpp)]
    chunks[0] -= 1
    chunks[-1] -= 1
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


def _equal(layers: int, pp: int, head: float) -> tuple[int, ...]:
    base, extra = divmod(layers, pp)
    return tuple(base + (stage < extra) for stage in range(pp))


def _balanced(layers: int, pp: int, head: float) -> tuple[int, ...]:
    held = [1] * pp
    work = [1.0] * (pp - 1) + [1.0 + head]
    for _ in range(layers - pp):
        stage = min(range(pp), key=lambda one: (work[one], one))
        held[stage] += 1
        work[stage] += 1.0
    return tuple(held)


def _greedy(layers: int, pp: int, head: float) -> tuple[int, ...]:
    whole, held, stage = layers + head, [0] * pp, 0
    for layer in range(layers):
        held[stage] += 1
        if layer + 1 >= whole * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(held)


RULES: dict[str, Callable[[int, int, float], tuple[int, ...]]] = {
    "equal": _equal,
    "balanced": _balanced,
    "greedy": _greedy,
}
