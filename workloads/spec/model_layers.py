"""The layers of any model by kind: those of its list, or those that its numbers describe."""

from __future__ import annotations

from functools import lru_cache, reduce

from workloads.spec.layer_kinds.weight import Splits
from workloads.spec.model_spec import ModelSpec
from workloads.spec.model_spec import layers_of as layers_of
from workloads.spec.model_spec import with_modules as with_modules


@lru_cache(maxsize=256)
def splits_of(model: ModelSpec) -> Splits:
    """Numbers that tensor parallelism must divide in every layer."""
    return reduce(Splits.both, (kind.splits for kind in layers_of(model).kinds), Splits())


def routed_layers(model: ModelSpec) -> tuple[bool, ...]:
    """Whether each layer has routed experts."""
    layers = layers_of(model)
    routed = [kind.routed for kind in layers.kinds]
    return tuple(routed[at] for at in layers.order)
