"""Names that conditions (``--where``) and ``--sort`` may use: a point's fields and its predictions."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Protocol

from sweep.grids.axes import AXES, BUDGET
from sweep.grids.comparisons import Kind, impossible
from sweep.grids.step_time import StepTime
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.expressions import Expression
from workloads.spec.model_spec import ModelSpec

SHAPE_NAMES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "num_experts",
)
"""Values of a model's shape that expressions may use."""
COMPUTED = ("dp", "world_size", "num_microbatches", "tokens_per_step")
"""Properties of an experiment that are computed from its fields."""
POINT_NAMES = frozenset({field.name for field in dataclasses.fields(Experiment)} | {*COMPUTED, *SHAPE_NAMES})
"""Names that are known of a point before prediction."""


def _kinds() -> dict[str, Kind]:
    """What the values of a name are, by the annotations of `Experiment`; ``model`` is the name of one."""
    hints = typing.get_type_hints(Experiment)
    kinds: dict[str, Kind] = dict.fromkeys((*COMPUTED, *SHAPE_NAMES, BUDGET), "number")
    for field in dataclasses.fields(Experiment):
        options = {kind for kind in typing.get_args(hints[field.name]) or (hints[field.name],) if kind is not NoneType}
        if options == {bool}:
            kinds[field.name] = "flag"
        else:
            kinds[field.name] = "number" if options <= {int, float} else "text"
    return kinds


class Priced(Protocol):
    """The part of `sweep.planning.price.Price` that conditions use."""

    @property
    def expected_h(self) -> float | None: ...
    @property
    def worst_h(self) -> float: ...


class Predicted(Protocol):
    """The part of a planned point that conditions and ``--sort`` use."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def limit_bytes(self) -> int | None: ...
    @property
    def host_memory_bytes(self) -> int | None: ...
    @property
    def time(self) -> StepTime | None: ...
    @property
    def tokens_per_s_per_gpu(self) -> float | None: ...
    @property
    def price(self) -> Priced | None: ...


PREDICTED: Mapping[str, Callable[[Predicted], float | None]] = {
    "predicted_peak_bytes": lambda point: point.peak_bytes,
    "limit_bytes": lambda point: point.limit_bytes,
    "predicted_host_memory_bytes": lambda point: point.host_memory_bytes,
    "predicted_step_time_s": lambda point: point.time.step_time_s if point.time is not None else None,
    "predicted_step_time_low_s": lambda point: point.time.low_s if point.time is not None else None,
    "predicted_step_time_high_s": lambda point: point.time.high_s if point.time is not None else None,
    "predicted_tokens_per_s_per_gpu": lambda point: point.tokens_per_s_per_gpu,
    "expected_gpu_hours": lambda point: point.price.expected_h if point.price is not None else None,
    "worst_gpu_hours": lambda point: point.price.worst_h if point.price is not None else None,
}
"""Columns of the ledger that hold a prediction, each with its value of a point. None: not predicted."""
PREDICTED_NAMES: Mapping[str, str] = {
    **{name: name for name in PREDICTED},
    **{name.removeprefix("predicted_"): name for name in PREDICTED},
}
"""Names accepted for a prediction: its column's, and the same without ``predicted_``."""
KINDS: Mapping[str, Kind] = {**_kinds(), **dict.fromkeys(PREDICTED_NAMES, "number")}
"""What the values of each of these names are."""
_WORDS = {name: rule for name, rule in AXES.items() if KINDS[name] == "text"}


def check_comparisons(place: str, expression: Expression, kinds: Mapping[str, Kind] = KINDS) -> None:
    """Raises `InvalidSweep` if the expression, which is at ``place``, compares what can never be equal. ``kinds``: of
    all names in it, as far as they are known."""
    if mistake := impossible(expression, kinds, _WORDS):
        raise InvalidSweep(f"{place}: {mistake}")


def shape_of(model: ModelSpec) -> dict[str, bool | int | float | str]:
    """Values of a model that expressions may use, by name. ``num_experts`` is 1 for a dense model."""
    shape: dict[str, bool | int | float | str] = {
        name: getattr(model, name) for name in SHAPE_NAMES if name != "num_experts"
    }
    shape["num_experts"] = model.moe.num_experts if model.moe is not None else 1
    return shape


def field_of(experiment: Experiment, name: str) -> Any:
    """The value of one of `POINT_NAMES`; for ``model``, its name."""
    if name == "model":
        return experiment.model.name
    if name == "num_experts":
        return experiment.model.moe.num_experts if experiment.model.moe is not None else 1
    return getattr(experiment.model if name in SHAPE_NAMES else experiment, name)


def value_of(point: Predicted, name: str) -> Any:
    """The value of one of `POINT_NAMES` or `PREDICTED_NAMES`; None if it is not predicted."""
    if name in PREDICTED_NAMES:
        return PREDICTED[PREDICTED_NAMES[name]](point)
    return field_of(point.experiment, name)


def holds(condition: Expression, point: Predicted) -> bool | None:
    """Whether a point meets a condition on its numbers; None if one of the numbers is not predicted."""
    values = {name: value_of(point, name) for name in condition.names}
    if any(value is None for value in values.values()):
        return None
    return bool(condition.evaluate(values))
