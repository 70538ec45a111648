"""Kinds of layers and number formats that no engine here runs yet. They are planned, and refused by name where
something would run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from workloads.costs.shape.params import whole_model
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment_values import PLANNED_FORMATS
from workloads.spec.model_spec import ModelSpec


@lru_cache(maxsize=256)
def lacking_kinds(model: ModelSpec) -> tuple[str, ...]:
    """What the model's layers have that the engines lack, by name; empty if they run it."""
    if model.layers is None:
        return ()
    from workloads.spec.config_json.expressible import not_expressible

    return tuple(not_expressible(whole_model(model)))


def engine_lacks(model: ModelSpec, precision: str) -> tuple[str, ...]:
    """What the engines lack to train the model in this precision, by name; empty if they can."""
    return lacking_kinds(model) + ((f"{precision} matrix products",) if precision in PLANNED_FORMATS else ())


def refuse_planned_formats(precisions: Iterable[str]) -> None:
    """Raises `UnsupportedByEngine`, one line for each precision whose matrix products the engines lack."""
    lines = [
        f"precision={precision} can be planned and exported, but not run: the engine has no {precision} matrix "
        "products; leave it out, or use one of fp8_tensorwise, fp8_rowwise, fp8_blockwise"
        for precision in sorted({*precisions} & {*PLANNED_FORMATS})
    ]
    if lines:
        raise UnsupportedByEngine(*lines)


def refuse_lacking_kinds(models: Iterable[ModelSpec]) -> None:
    """Raises `UnsupportedByEngine`, one line for each model whose kinds of layers the engines lack."""
    lines = [
        f"model {model.name} can be planned, but not run or exported yet: the engine lacks {'; '.join(lacking)}"
        for model in models
        if (lacking := lacking_kinds(model))
    ]
    if lines:
        raise UnsupportedByEngine(*lines)
