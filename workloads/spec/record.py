"""Writes an experiment as the config columns of the results tables."""

from __future__ import annotations

import json
from typing import Any

from results.tables.schema import CONFIG_COLUMNS
from workloads.spec.experiment import Experiment, to_dict


def config_columns(experiment: Experiment) -> dict[str, Any]:
    """Values of all columns in `results.tables.schema.CONFIG_COLUMNS`, by name."""
    named = {"experiment_id": experiment.id, "model": experiment.model.name}
    named["config_json"] = json.dumps(to_dict(experiment), sort_keys=True)
    values: dict[str, Any] = {}
    for column in CONFIG_COLUMNS:
        if column.name in named:
            values[column.name] = named[column.name]
        elif hasattr(experiment, column.name):
            values[column.name] = getattr(experiment, column.name)
        else:
            values[column.name] = getattr(experiment.model, column.name)
    return values
