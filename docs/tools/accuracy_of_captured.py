"""The table of docs/accuracy_details.md on steps that ran as CUDA graphs, so that no host paces them: by model, each
predicted from the captured steps of the others."""

from __future__ import annotations

import pandas as pd

from docs.tools.accuracy_of_plans import (
    CLUSTER,
    pairs_with,
    planned,
    points_of,
    recorded_attempts,
    table_of,
    without_its_model,
)
from results.statistics import grade
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec

COLUMNS = ("rows", "MAPE", "p90", "bias", "Spearman", "top-1 regret", "inside 90 %")


def section() -> str:
    """Captured steps of `CLUSTER`: all, those of dense models, those of mixtures of experts, and those of each
    model."""
    attempts = recorded_attempts()
    attempts = attempts[(attempts["cluster"] == CLUSTER) & (attempts["cuda_graph_run"] == "step")]
    points = points_of(attempts)
    left = without_its_model(points, attempts)
    mixed = points["experiment"].map(lambda one: has_routed_experts(one.model))
    lines = [
        ("all, nothing measured", planned(points), points),
        ("all, one model left out", left, points),
        ("of these, dense models", left, points[~mixed]),
        ("of these, mixtures of experts", left, points[mixed]),
        *((str(model), left, own) for model, own in points.groupby("model", sort=True)),
    ]
    graded = [(name, pd.Series(grade.grade_of(pairs_with(found, own)), dtype="object")) for name, found, own in lines]
    return table_of("captured steps on H200", graded, COLUMNS)


def has_routed_experts(model: ModelSpec) -> bool:
    """Whether a router chooses experts in any layer."""
    return any(isinstance(kind.mlp, RoutedMLP) for kind in layers_of(model).kinds)
