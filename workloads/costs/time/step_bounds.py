"""Seconds of steps in closed form, of many layouts at one time: never less than `step_simulation` executes.

A step is its pipeline, whose actions take what they take when they are neither the first nor the last of their chunk
(`steady`), and what the first and the last of them take longer (`once_s`). Every array has one entry for each chunk of
some kind, or for each layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from workloads.costs.shape.schedule import SPLIT_BACKWARD, V_SHAPED, stage_at
from workloads.costs.time.pipeline import pipeline_times_s
from workloads.costs.time.rank_times import Floats, Ints
from workloads.costs.time.step_simulation import ChunkWork, gathered_s, reduced_s


class Steps(NamedTuple):
    """What steps of many layouts consist of."""

    chunks: ChunkWork
    """Of all layouts, one after another; of a layout every kind of rank once, and of it every chunk."""
    zero_stage: Ints
    """By chunk."""
    splits: Ints
    """By chunk, 1: backwards are split into I and W."""
    schedules: Sequence[Pipeline]
    """By layout, as all that follows."""
    first: Ints
    """Where a layout's chunks begin."""
    hop_s: Floats
    """A message between two ranks."""
    tied_s: Floats
    optimizer_s: Floats
    """Of the slowest rank."""


class Pipeline(NamedTuple):
    schedule: str
    num_microbatches: int
    num_ranks: int
    virtual_stages: int
    places: Ints
    """By rank, and of each by chunk: which of the layout's chunks it is."""


class Steady(NamedTuple):
    """Of a micro-batch that is neither the first nor the last of a chunk, without messages."""

    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    weight_s: Floats
    wait_s: Floats
    """In ZeRO 3, for the reduction of the backward before: of a forward, or of a backward where one follows another."""


def step_bounds_s(steps: Steps) -> Floats:
    """What single actions take beyond steady times can delay the end by no more than their sum: the first gathers and
    the last reductions of all stages, of which one micro-batch goes through one after another. Most steps of
    `simulate_step` are within 2 % of it; with split backwards and few micro-batches, whose last W's go beside each
    other, up to a tenth shorter.
    """
    steady, once = steady_times(steps.chunks, steps.zero_stage), once_s(steps)
    found = steps.tied_s + steps.optimizer_s
    for those, pipeline in _alike(steps.schedules):
        places = np.stack([steps.schedules[at].places for at in those]) + steps.first[those, None]
        m = np.array([steps.schedules[at].num_microbatches for at in those])
        found[those] += once[places].sum(axis=1) + _pipelines_s(pipeline, m, steady, places, steps.hop_s[those])
    return found


def _alike(schedules: Sequence[Pipeline]) -> list[tuple[list[int], Pipeline]]:
    """Layouts with the same actions; without a pipeline micro-batches may differ in number."""
    found: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for at, one in enumerate(schedules):
        found[one.schedule, one.num_ranks, one.virtual_stages, one.num_microbatches if one.num_ranks > 1 else 0].append(
            at
        )
    return [(those, schedules[those[0]]) for those in found.values()]


def _pipelines_s(one: Pipeline, m: Ints, steady: Steady, places: Ints, hop_s: Floats) -> Floats:
    """Seconds of pipelines whose actions take steady times, each with its message. ``places`` has the shape (layouts,
    chunks of all ranks)."""
    forward, backward, inputs, weight, wait = (times[places].T for times in steady)
    if one.schedule == "gpipe" and one.num_ranks > 1:
        backward = backward + wait
    else:
        forward = forward + wait
    if one.num_ranks == 1 and one.virtual_stages == 1:
        whole = inputs + weight if one.schedule in SPLIT_BACKWARD else backward
        alone: Floats = m * (forward + whole)[0]
        return alone
    here, there = (has[:, None] * hop_s for has in _messages(one.schedule, one.num_ranks, one.virtual_stages))
    times = np.concatenate([forward + here, backward + there, inputs + there, weight])
    return pipeline_times_s(one.schedule, times, one.num_ranks, one.num_microbatches, one.virtual_stages)


@lru_cache(maxsize=1024)
def _messages(schedule: str, num_ranks: int, chunks: int) -> tuple[Floats, Floats]:
    """By rank, and of each by chunk: 1 where forwards, and where backwards, wait for another rank's message."""
    last = num_ranks * chunks - 1
    forward, backward = [], []
    for rank in range(num_ranks):
        turn = schedule in V_SHAPED and rank == num_ranks - 1  # its two stages are neighbours
        for stage in (stage_at(schedule, rank, chunk, num_ranks) for chunk in range(chunks)):
            forward.append(stage > 0 and not (turn and stage == num_ranks))
            backward.append(stage < last and not (turn and stage == num_ranks - 1))
    return np.array(forward, dtype=float), np.array(backward, dtype=float)


def steady_times(chunk: ChunkWork, zero_stage: Ints) -> Steady:
    zero3, n, most = zero_stage == 3, chunk.units, np.maximum
    scatter, gather = chunk.scatter_s * (zero_stage >= 2), chunk.gather_s * zero3
    forward = gathered_s(chunk.forward_s, gather, n, most)
    inputs = gathered_s(chunk.input_s, gather, n, most)
    backward = reduced_s(chunk.backward_s, gather, scatter, n, most)
    weight = most(reduced_s(chunk.weight_s, 0.0, scatter, n, most), scatter)
    return Steady(forward, backward, inputs, weight, scatter * zero3 / n)


def once_s(steps: Steps) -> Floats:
    """What the first forward of a chunk and its last B or W take longer than steady ones, the wait for the reduction
    included."""
    chunk, zero_stage = steps.chunks, steps.zero_stage
    n, most = chunk.units, np.maximum
    first = gathered_s(chunk.forward_s, chunk.gather_s * (zero_stage < 3), n, most) - chunk.forward_s
    total, gather = chunk.scatter_s + chunk.replicas_s, chunk.gather_s * (zero_stage == 3)
    whole = reduced_s(chunk.backward_s, gather, total, n, most) + total / n
    steady = steady_times(chunk, zero_stage)
    halves = most(reduced_s(chunk.weight_s, 0.0, total, n, most) + total / n, total + chunk.scatter_s / n)
    last = most(whole - steady.backward_s, (halves - steady.weight_s) * steps.splits)
    found: Floats = first + last
    return found
