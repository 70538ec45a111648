"""The table of docs/accuracy_details.md on steps that ran as CUDA graphs, so that no host paces them: by model, each
predicted from the captured steps of the others."""

from __future__ import annotations

import pandas as pd

from docs.tools.accuracy_of_plans import (
    CLUSTER,
    COLUMNS,
    graded,
    pairs_with,
    planned,
    points_of,
    recorded_attempts,
    table_of,
    without_its_model,
)
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec


def section() -> str:
    """Captured steps of `CLUSTER`: all, those of dense models, those of mixtures of experts, and those of each
    model. The widths of today are also graded beside errors in whose sight nothing was set: of the predictions that
    were stored before the runs."""
    attempts = recorded_attempts()
    attempts = attempts[(attempts["cluster"] == CLUSTER) & (attempts["cuda_graph_run"] == "step")]
    points = points_of(attempts)
    found, left = planned(points), without_its_model(points, attempts)
    mixed = points["experiment"].map(lambda one: has_routed_experts(one.model))
    lines = [
        ("all, nothing measured", found, points),
        ("all, as stored before each run, with today's widths", _moved(found, points), points),
        ("all, one model left out", left, points),
        ("of these, dense models", left, points[~mixed]),
        ("of these, mixtures of experts", left, points[mixed]),
        *((str(model), left, own) for model, own in points.groupby("model", sort=True)),
    ]
    grades = [(name, graded(pairs_with(found, own))) for name, found, own in lines]
    return table_of("captured steps on H200", grades, COLUMNS)


def _moved(predictions: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """The predictions that rows have stored, with intervals as wide as those of ``predictions``, one of each point."""
    stored = pd.to_numeric(points["predicted_step_time_s"]).to_numpy()
    names = ["step_time_s", "step_time_low_s", "step_time_high_s"]
    scaled = predictions[names].mul(stored / predictions["step_time_s"], axis=0)
    return predictions.assign(**{name: scaled[name] for name in names})


def has_routed_experts(model: ModelSpec) -> bool:
    """Whether a router chooses experts in any layer."""
    return any(isinstance(kind.mlp, RoutedMLP) for kind in layers_of(model).kinds)
