"""Bytes that a pipeline rank saves for backward, by the part of the layer that saves them: to explain a peak."""

from __future__ import annotations

from workloads.costs.memory.kind_sizes import saved_parts
from workloads.costs.memory.sizes import Part, Shared
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of


def saved_by_part(e: Experiment, x: Shared, rank: Part) -> dict[str, int]:
    """Bytes that a rank saves for one micro-batch; they add up to `Part.saved`."""
    found = {"stage output": 0 if rank.has_head else x.stream}
    if rank.last_stays or rank.input_stays:
        found["kept of offloaded layers"] = rank.last_stays + rank.input_stays
    for one in rank.classes:
        kind = layers_of(e.model).kinds[x.sizes.index(one.size)]
        for recomputed, count in ((True, one.recomputed), (False, one.layers - one.recomputed)):
            for name, size in saved_parts(e, kind, x.c, recomputed=recomputed).items():
                found[name] = found.get(name, 0) + count * size
    return found
