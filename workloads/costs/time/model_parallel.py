"""What layouts share that differ in data parallelism alone, so that it is computed once for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workloads.costs.time.rank_times import Floats, Ints
from workloads.costs.time.step_bounds import PipelineShape
from workloads.spec.experiment import Experiment


class ModelParallel(NamedTuple):
    """What some layouts share with those that differ in ZeRO stage, replicas and shards. Chunks and ranks of all
    layouts are one after another, each kind of rank once."""

    experiments: Sequence[Experiment]
    """With the models that ranks hold (`workloads.costs.shape.held_model`)."""
    table: Floats
    """By layout, what `workloads.costs.time.step_times` has of its `Setting` apart from data parallelism."""
    chunks: Ints
    ranks: Ints
    """``chunks``, ``ranks``: `HeldLayers`, of shape (fields, chunks or ranks)."""
    of_chunk: Ints
    of_rank: Ints
    """``of_chunk``, ``of_rank``: layout by chunk and rank."""
    sums: Floats
    """Sums of the layers' times, of shape (chunks, fields of `LayerTimes`)."""
    schedules: Sequence[PipelineShape]
    degrees: Ints
    """The first layout with the same degrees, by layout."""

    def take(self, layouts: Ints) -> ModelParallel:
        """The parts of these layouts, each as often as it is given."""
        (of_chunk, chunks), (of_rank, ranks) = _entries(self.of_chunk, layouts), _entries(self.of_rank, layouts)
        return ModelParallel(
            [self.experiments[at] for at in layouts.tolist()],
            self.table[layouts],
            self.chunks[:, chunks],
            self.ranks[:, ranks],
            of_chunk,
            of_rank,
            self.sums[chunks],
            [self.schedules[at] for at in layouts.tolist()],
            self.degrees[layouts],
        )


def _entries(owner: Ints, owners: Ints) -> tuple[Ints, Ints]:
    """(place in ``owners``, index) of the entries of these owners, one owner after another."""
    counts = np.bincount(owner)[owners]
    place = np.repeat(np.arange(len(owners)), counts)
    before = np.cumsum(counts) - counts
    return place, np.arange(len(place)) + (starts(owner)[owners] - before)[place]


def starts(owner: Ints) -> Ints:
    """Index at which each owner's entries begin."""
    first: Ints = np.flatnonzero(np.diff(owner, prepend=-1))
    return first
