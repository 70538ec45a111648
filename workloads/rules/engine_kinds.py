"""Kinds of layers that no engine here runs yet. They are planned, and refused by name where something would run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from workloads.costs.shape.params import whole_model
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.model_spec import ModelSpec


@lru_cache(maxsize=256)
def lacking_kinds(model: ModelSpec) -> tuple[str, ...]:
    """What the model's layers have that the engines lack, by name; empty if they run it."""
    if model.layers is None:
        return ()
    from workloads.spec.config_json.expressible import not_expressible

    return tuple(not_expressible(whole_model(model)))


def refuse_lacking_kinds(models: Iterable[ModelSpec]) -> None:
    """Raises `UnsupportedByEngine`, one line for each model whose kinds of layers the engines lack."""
    lines = [
        f"model {model.name} can be planned, but not run or exported yet: the engine lacks {'; '.join(lacking)}"
        for model in models
        if (lacking := lacking_kinds(model))
    ]
    if lines:
        raise UnsupportedByEngine(*lines)
