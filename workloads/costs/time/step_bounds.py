"""Step seconds in closed form, for many layouts at one time; an upper bound of `step_simulation`.

Step time = pipeline time with steady-state action durations (`steady_times`) + the extra time of each chunk's first and
last action (`once_s`) + copies and updates (`updates_s`). Every array has one entry per chunk or per layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from workloads.costs.shape.schedule import SPLIT_BACKWARD, V_SHAPED, stage_at
from workloads.costs.time.pipeline import pipeline_times_s
from workloads.costs.time.rank_times import Floats, Ints
from workloads.costs.time.step_simulation import ChunkWork, gathered_s, reduced_s


class LayoutSteps(NamedTuple):
    """Components of the steps of many layouts."""

    chunks: ChunkWork
    """Chunks of all layouts, one after another; a layout has each kind of rank once, with all its chunks."""
    zero_stage: Ints
    """ZeRO stage by chunk."""
    splits: Ints
    """1 if the chunk's backwards are split into I and W."""
    schedules: Sequence[PipelineShape]
    """Pipeline by layout. The following fields are by layout, too."""
    first: Ints
    """Index of a layout's first chunk."""
    hop_s: Floats
    """Seconds of a message between two ranks."""
    tied_s: Floats
    optimizer_s: Floats
    """Seconds of the slowest rank's optimizer."""


class PipelineShape(NamedTuple):
    schedule: str
    num_microbatches: int
    num_ranks: int
    virtual_stages: int
    places: Ints
    """Index of the chunk within its layout's chunks, by rank and chunk."""


class Steady(NamedTuple):
    """Seconds of a micro-batch that is neither the first nor the last of a chunk, without messages."""

    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    weight_s: Floats
    wait_s: Floats
    """Wait for the previous backward's reduction with ZeRO 3, in a forward or in a backward after another."""


def step_bounds_s(steps: LayoutSteps) -> Floats:
    """Upper bounds of the seconds of steps, by layout.

    The time of single actions beyond steady times can delay the end by no more than its sum: the first gathers and the
    last reductions of all stages, which one micro-batch passes one after another. Most steps of `simulate_step` are
    within 2 % of it. With split backwards and few micro-batches, whose last W's overlap, they are up to a tenth
    shorter.
    """
    steady, once = steady_times(steps.chunks, steps.zero_stage), once_s(steps)
    seconds = steps.tied_s + updates_s(steps)
    for layouts, pipeline in _alike(steps.schedules):
        places = np.stack([steps.schedules[at].places for at in layouts]) + steps.first[layouts, None]
        m = np.array([steps.schedules[at].num_microbatches for at in layouts])
        seconds[layouts] += once[places].sum(axis=1) + _pipelines_s(pipeline, m, steady, places, steps.hop_s[layouts])
    return seconds


def parted_steps_s(steps: LayoutSteps) -> Floats:
    """Parts of `step_bounds_s`, shape (4, layouts): the work of micro-batches; exposed data-parallel traffic;
    `updates_s`; and of the first the pipeline's fill, in which its busiest rank does not work."""
    (exposed, busy), updates = _of_busiest_s(steps), updates_s(steps)
    work = step_bounds_s(steps) - exposed - updates
    return np.stack([work, exposed, updates, np.maximum(0.0, work - busy - steps.tied_s)])


def updates_s(steps: LayoutSteps) -> Floats:
    """Seconds of a step that do not depend on its micro-batches, by layout: copies of weights and gradients, of one
    stage after another, and the optimizer."""
    copies, seconds = steps.chunks.copied_s + steps.chunks.unscattered_s, steps.optimizer_s.copy()
    for layouts, places, _ in _of_equal_shape(steps):
        seconds[layouts] += copies[places].sum(axis=(1, 2))
    return seconds


def _of_busiest_s(steps: LayoutSteps) -> Floats:
    """(exposed data-parallel traffic, work of the busiest rank) in seconds, shape (2, layouts). Traffic adds to a step
    once in every chunk, and in every micro-batch of the busiest rank."""
    steady, chunk, seconds = steady_times(steps.chunks, steps.zero_stage), steps.chunks, np.empty((2, len(steps.first)))
    whole = np.where(steps.splits > 0, steady.input_s + steady.weight_s, steady.backward_s)
    alone = chunk.forward_s + np.where(steps.splits > 0, chunk.input_s + chunk.weight_s, chunk.backward_s)
    beside, once = steady.forward_s + steady.wait_s + whole, once_s(steps)
    for layouts, places, m in _of_equal_shape(steps):
        with_traffic, without = (of_chunk[places].sum(axis=2).max(axis=1) for of_chunk in (beside, alone))
        seconds[0, layouts] = once[places].sum(axis=(1, 2)) + m * (with_traffic - without)
        seconds[1, layouts] = m * without
    return seconds


def least_steps_s(steps: LayoutSteps) -> Floats:
    """The first three of `parted_steps_s`, of steps with 1F1B or without a pipeline: of the first a lower bound. The
    other two are exact for these sums of gradients; beside lesser sums, more traffic is exposed than beside a layout's.

    A rank's forwards and backwards of all micro-batches follow each other, after the first micro-batch's forwards on
    the ranks before it, and before the last one's backwards there.
    """
    steady, once = steady_times(steps.chunks, steps.zero_stage), once_s(steps)
    seconds = steps.tied_s.copy()
    both = steady.forward_s + steady.wait_s + steady.backward_s
    for layouts, places, m in _of_equal_shape(steps):
        ranks = places.shape[1]
        of_rank = both[places[:, :, 0]] + sum(_messages("1f1b", ranks, 1)) * steps.hop_s[layouts, None]
        chains = np.cumsum(of_rank, axis=1) + (m[:, None] - 1) * of_rank
        seconds[layouts] += once[places].sum(axis=(1, 2)) + chains.max(axis=1)
    exposed = _of_busiest_s(steps)[0]
    return np.stack([seconds - exposed, exposed, updates_s(steps)])


def _of_equal_shape(steps: LayoutSteps) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(layouts, indices of their chunks by rank and chunk, micro-batches) of layouts with as many ranks and chunks."""
    counts = np.array([(one.num_ranks, one.virtual_stages, one.num_microbatches) for one in steps.schedules])
    for ranks, chunks in np.unique(counts[:, :2], axis=0).tolist():
        layouts = np.flatnonzero((counts[:, 0] == ranks) & (counts[:, 1] == chunks))
        places = np.stack([steps.schedules[at].places for at in layouts]) + steps.first[layouts, None]
        yield layouts, places.reshape(len(layouts), ranks, chunks), counts[layouts, 2]


def _alike(schedules: Sequence[PipelineShape]) -> list[tuple[list[int], PipelineShape]]:
    """Groups of layouts with the same actions; without a pipeline, numbers of micro-batches may differ in a group."""
    groups: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for at, one in enumerate(schedules):
        groups[
            one.schedule, one.num_ranks, one.virtual_stages, one.num_microbatches if one.num_ranks > 1 else 0
        ].append(at)
    return [(layouts, schedules[layouts[0]]) for layouts in groups.values()]


def _pipelines_s(one: PipelineShape, m: Ints, steady: Steady, places: Ints, hop_s: Floats) -> Floats:
    """Seconds of pipelines with steady action times and messages, by layout. ``places`` has the shape (layouts, chunks
    of all ranks)."""
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
    """(forward, backward) by rank and chunk: 1 if forwards, or backwards, wait for another rank's message."""
    last = num_ranks * chunks - 1
    forward, backward = [], []
    for rank in range(num_ranks):
        turn = schedule in V_SHAPED and rank == num_ranks - 1  # the two stages of the last rank are neighbours
        for stage in (stage_at(schedule, rank, chunk, num_ranks) for chunk in range(chunks)):
            forward.append(stage > 0 and not (turn and stage == num_ranks))
            backward.append(stage < last and not (turn and stage == num_ranks - 1))
    return np.array(forward, dtype=float), np.array(backward, dtype=float)


def steady_times(chunk: ChunkWork, zero_stage: Ints) -> Steady:
    zero3, n, most, beside = zero_stage == 3, chunk.units, np.maximum, chunk.contention
    scatter, gather = chunk.scatter_s * (zero_stage >= 2), chunk.gather_s * zero3
    forward = gathered_s(chunk.forward_s, gather, n, most, beside)
    inputs = gathered_s(chunk.input_s, gather, n, most, beside)
    backward = reduced_s(chunk.backward_s, gather, scatter, n, most, beside)
    weight = most(reduced_s(chunk.weight_s, 0.0, scatter, n, most, beside), scatter)
    return Steady(forward, backward, inputs, weight, scatter * zero3 / n)


def once_s(steps: LayoutSteps) -> Floats:
    """Seconds beyond steady times of a chunk's first forward and of its last B or W, with the wait for the
    reduction."""
    chunk = steps.chunks
    gather = chunk.gather_s * (steps.zero_stage < 3)
    first = gathered_s(chunk.forward_s, gather, chunk.units, np.maximum, chunk.contention) - chunk.forward_s
    extra: Floats = first + _last_s(steps)
    return extra


def _last_s(steps: LayoutSteps) -> Floats:
    """Seconds beyond steady times of a chunk's last B or W, with the wait for the reduction."""
    chunk, zero_stage = steps.chunks, steps.zero_stage
    n, most, beside = chunk.units, np.maximum, chunk.contention
    total, gather = chunk.scatter_s + chunk.replicas_s, chunk.gather_s * (zero_stage == 3)
    whole = reduced_s(chunk.backward_s, gather, total, n, most, beside) + total / n
    steady = steady_times(chunk, zero_stage)
    halves = most(reduced_s(chunk.weight_s, 0.0, total, n, most, beside) + total / n, total + chunk.scatter_s / n)
    last: Floats = most(whole - steady.backward_s, (halves - steady.weight_s) * steps.splits)
    return last


def ends_s(steps: LayoutSteps) -> Floats:
    """Part of `step_bounds_s` that follows the work of the last micro-batch: the reductions of every chunk's last
    backward, and the sum of tied gradients."""
    last, seconds = _last_s(steps), steps.tied_s.copy()
    for at, (shape, first) in enumerate(zip(steps.schedules, steps.first, strict=True)):
        seconds[at] += last[shape.places + first].sum()
    return seconds
