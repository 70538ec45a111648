"""Gives rows the ids and model columns that a new run of their experiments gets, so that rows of all versions can be
matched."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pandas as pd

from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import from_json, to_dict
from workloads.spec.model_spec import canonical_model

_CHANGED = ("experiment_id", "config_json", "head_dim", "ffn_hidden_size")


def with_canonical_models(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with canonical values in the fields of their models that have no effect
    (`workloads.spec.model_spec.canonical_model`). Rows without a readable ``config_json`` stay as they are."""
    renamed = {text: new for text in rows["config_json"].dropna().unique() if (new := _canonical(text)) is not None}
    if not renamed:
        return rows
    rows = rows.copy()
    changed = rows["config_json"].isin(list(renamed))
    texts = rows.loc[changed, "config_json"]
    for name in _CHANGED:
        if name in rows:
            rows.loc[changed, name] = [renamed[text][name] for text in texts]
    return rows


def _canonical(config_json: str) -> dict[str, Any] | None:
    """New values of `_CHANGED` for rows with this configuration; None if nothing changes."""
    if '"moe": null' in config_json and '"mla": null' in config_json:  # every field of a dense model has an effect
        return None
    try:
        stored = from_json(config_json)
    except (InvalidExperiment, ValueError, TypeError, KeyError):
        return None
    model = canonical_model(stored.model)
    if model is stored.model:
        return None
    new = dataclasses.replace(stored, model=model)
    return {
        "experiment_id": new.id,
        "config_json": json.dumps(to_dict(new), sort_keys=True),
        "head_dim": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size,
    }
