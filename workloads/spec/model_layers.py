"""The layers of any model by kind: those of its list, or those that its numbers describe."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, reduce

from workloads.spec.layer_kinds.weight import Splits
from workloads.spec.model_spec import ModelSpec
from workloads.spec.model_spec import layers_of as layers_of
from workloads.spec.model_spec import with_modules as with_modules


@lru_cache(maxsize=256)
def numbers_of(model: ModelSpec) -> ModelSpec | None:
    """The model without its modules of multi-token prediction, as numbers describe it; None if they do not."""
    if model.layers is None:
        return model
    numbers = dataclasses.replace(model, layers=None, num_layers=model.num_layers - model.mtp_modules)
    return numbers if layers_of(numbers) == model.layers.without_modules() else None


@lru_cache(maxsize=256)
def splits_of(model: ModelSpec) -> Splits:
    """Numbers that tensor parallelism must divide in every layer."""
    return reduce(Splits.both, (kind.splits for kind in layers_of(model).kinds), Splits())


def routed_layers(model: ModelSpec) -> tuple[bool, ...]:
    """Whether each layer has routed experts."""
    layers = layers_of(model)
    routed = [kind.routed for kind in layers.kinds]
    return tuple(routed[at] for at in layers.order)
