"""Writes an experiment as the config columns of the results tables."""

from __future__ import annotations

import json
from typing import Any

from results.tables.schema import CONFIG_COLUMNS
from workloads.spec.experiment import Experiment, to_dict

_NAMED = ("experiment_id", "model", "config_json")
_OF_EXPERIMENT, _OF_MODEL = (
    tuple(
        column.name
        for column in CONFIG_COLUMNS
        if column.name not in _NAMED and hasattr(Experiment, column.name) == of_experiment
    )
    for of_experiment in (True, False)
)


def config_columns(experiment: Experiment) -> dict[str, Any]:
    """Values of all columns in `results.tables.schema.CONFIG_COLUMNS`, by name."""
    model = experiment.model
    return {
        "experiment_id": experiment.id,
        "model": model.name,
        "config_json": json.dumps(to_dict(experiment), sort_keys=True),
        **{name: getattr(experiment, name) for name in _OF_EXPERIMENT},
        **{name: getattr(model, name) for name in _OF_MODEL},
    }
