"""The table from which `workloads.costs.time.step_times` makes a `Setting`: what layouts share, in columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from workloads.costs.shape.partition import experiment_chunks, experiment_stages, ranks_alike
from workloads.costs.time.rank_times import EndTimes, Floats, HeldLayers, Ints, LayerTimes, Setting
from workloads.costs.traffic.collectives import Contention, Group
from workloads.spec.experiment import Experiment


class OfLayers(NamedTuple):
    """Part of a layout's `Setting` that depends on its micro-batch and its split inside a stage."""

    whole: tuple[float, ...]
    kinds: Floats
    """`LayerTimes` by kind of layer."""
    ends: tuple[float, ...]
    """`EndTimes`, and the bytes of a message between stages."""


class HeldKinds(NamedTuple):
    """`HeldLayers` of a layout's kinds of ranks and of their chunks, as tables of shape (fields, kinds)."""

    ranks: Ints
    chunks: Ints
    places: Ints
    """Index of each chunk, as in `PipelineShape`."""
    of_kind: Floats
    """Number of layers of each kind, by chunk."""
    recomputed: Floats
    """Number of recomputed ones."""
    words: tuple[str, ...]
    """`StageParams.recompute` of each chunk."""

    @classmethod
    def made(cls, e: Experiment) -> HeldKinds:
        alike, whole, chunks = ranks_alike(e), experiment_stages(e), experiment_chunks(e)
        kinds = list(dict.fromkeys(alike))
        place = {kind: at for at, kind in enumerate(kinds)}
        of_chunks = [chunk for kind in kinds for chunk in chunks[kind]]
        places = np.array(
            [place[kind] * e.virtual_stages + chunk for kind in alike for chunk in range(e.virtual_stages)]
        )
        return cls(
            np.stack(HeldLayers.of([whole[kind] for kind in kinds])),
            np.stack(HeldLayers.of(of_chunks)),
            places,
            np.array([chunk.of_kind for chunk in of_chunks], dtype=float),
            np.array([chunk.recomputed_of_kind for chunk in of_chunks], dtype=float),
            tuple(chunk.recompute for chunk in of_chunks),
        )


_WHOLE = 15
RECOMPUTE = LayerTimes._fields.index("recompute_s")
MESSAGE = _WHOLE + 1 + len(EndTimes._fields)
_SHARDS = MESSAGE + 1
HOP = _SHARDS + 2 + 5 * len(Group._fields)
"""Columns of the table of `StepTimes.parts`."""


def setting_of(table: Floats, layers: LayerTimes | None = None) -> Setting:
    """`Setting` made of a table's rows. ``layers``: sums over the layers of each row; not needed for an optimizer."""
    columns = list(np.ascontiguousarray(table.T))
    whole: list[Any] = [column.astype(np.int64) for column in (*columns[:_WHOLE], *columns[_SHARDS : _SHARDS + 2])]
    size = len(Group._fields)
    at = _WHOLE + 1
    parts: list[Any] = [
        *(columns[_WHOLE], layers, EndTimes(*columns[at:MESSAGE])),
        *(Group(*columns[start : start + size]) for start in range(_SHARDS + 2, HOP, size)),
        Contention(*columns[HOP + 2 : HOP + 2 + len(Contention._fields)]),
        columns[-1].astype(np.int64),
    ]
    return Setting._make([*whole, *parts])
