"""Writes an experiment as the config columns of the results tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from results.tables.schema import CONFIG_COLUMNS
from workloads.spec.experiment import Experiment, to_dict
from workloads.spec.model_spec import ModelSpec

_NAMED = ("experiment_id", "model", "config_json")
_OF_EXPERIMENT, _OF_MODEL = (
    tuple(
        column.name
        for column in CONFIG_COLUMNS
        if column.name not in _NAMED and hasattr(Experiment, column.name) == of_experiment
    )
    for of_experiment in (True, False)
)

_values_of = attrgetter(*_OF_EXPERIMENT)


def config_columns(experiment: Experiment) -> dict[str, Any]:
    """Values of all columns in `results.tables.schema.CONFIG_COLUMNS`, by name."""
    return {
        "experiment_id": experiment.id,
        "config_json": json.dumps(to_dict(experiment), sort_keys=True),
        **dict(zip(_OF_EXPERIMENT, _values_of(experiment), strict=True)),
        **_model_columns(experiment.model),
    }


@lru_cache(maxsize=64)
def _model_columns(model: ModelSpec) -> Mapping[str, Any]:
    return {"model": model.name, **{name: getattr(model, name) for name in _OF_MODEL}}
