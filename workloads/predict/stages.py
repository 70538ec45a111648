"""Layers and head of each pipeline stage of a code base, for many rows at one time.

equal     all stages have equally many layers, the first ones one more; the head is on the last
balanced  layers go one by one to the stage with least work, the head counts as work (`workloads.costs.shape.partition`)
greedy    nanotron's: stages are filled in order. A stage is full when the parameters up to its last layer exceed its
          share of the model's (the head counted, the embedding not), so that early stages overshoot and late ones may
          hold no layer; the head is on the last
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from workloads.predict.points import Floats, Points


class Stages(NamedTuple):
    """Arrays of shape (rows, widest pipeline), zero where a row has fewer stages."""

    layers: Floats
    head: Floats
    """1 on the stage with the head."""
    first: Floats
    """1 on the stage with the embedding."""
    exists: Floats
    in_flight: Floats
    """Maximum number of micro-batches whose activations a stage holds under 1F1B, ``min(pp - stage, m)``."""


def stages_of(points: Points, partition: dict[str, str]) -> Stages:
    """`Stages` of all rows. ``partition``: rule by name of the code base."""
    widest = int(points.pp.max(initial=1))
    layers = np.zeros((len(points), widest))
    ratio = np.where(points.pp > 1, points.vocabulary_params / points.layer_params, 0.0)
    head = ratio if np.isfinite(ratio).all() else np.nan_to_num(ratio)
    of_head = np.round(head, 9)
    for row, (count, pp, share, name) in enumerate(
        zip(points.layers, points.pp, of_head, points.codebase, strict=True)
    ):
        held = split(partition[str(name)], int(count), int(pp), float(share))
        layers[row, : len(held)] = held
    stage = np.arange(widest)[None, :]
    last = points.pp[:, None] - 1
    exists = (stage <= last).astype(float)
    in_flight = np.minimum(points.pp[:, None] - stage, points.micro_batches[:, None]) * exists
    first = np.broadcast_to(stage == 0, layers.shape).astype(float)
    return Stages(layers, (stage == last).astype(float), first, exists, in_flight)


@lru_cache(maxsize=65536)
def split(rule: str, layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Layers of every stage. ``head``: work of the head in units of a layer."""
    return RULES[rule](layers, pp, head)


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
        if layer + 1 > whole * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(held)


RULES: dict[str, Callable[[int, int, float], tuple[int, ...]]] = {
    "equal": _equal,
    "balanced": _balanced,
    "greedy": _greedy,
}
