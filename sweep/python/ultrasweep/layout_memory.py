"""``ultrasweep.memory``: the predicted memory of one layout, by pipeline stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from results.errors import UltrasweepError
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import cluster_for, compose_sweep
from sweep.grids.expand import expand_all
from ultrasweep.given import Conf, folders, words
from workloads.costs.memory.estimate import estimate_memory
from workloads.rules.engine_support import is_own
from workloads.rules.layout_rules import layout_violations
from workloads.spec.errors import InfeasibleLayout
from workloads.spec.experiment import Experiment, from_json
from workloads.spec.experiment_values import FIELDS

_ONE_POINT = "+grid=one_point"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutMemory:
    """The answer of `memory`: bytes of one device."""

    experiment_id: str
    """Id of the layout, as a run of it would have."""
    stages: pd.DataFrame = field(repr=False)
    """One row for each pipeline ``stage``, the index: ``parameters_bytes``, ``gradients_bytes``, ``optimizer_bytes``,
    ``activations_bytes`` and ``peak_bytes``, of a rank at its peak."""
    peak_stage: int
    """Stage with the highest peak."""
    peak_bytes: int
    """Peak of that stage, with the workspace of matrix products if ``cluster`` is given."""
    workspace_bytes: int | None
    """None: no cluster is given."""
    limit_bytes: int | None
    """Memory of a device that training can have; None: no cluster is given, or its file does not say."""
    fits: bool | None
    """Whether the peak is within the limit; None: the limit is unknown."""


def memory(layout: Mapping[str, Any] | pd.Series[Any], *, cluster: str | None = None, conf: Conf = ()) -> LayoutMemory:
    """Predicts the peak memory of one layout of this project's engine in closed form.

    ``layout``: a row of `Plan.points`, `Advice.layouts` or `Results.attempts`, also with other values, as in ``{**row,
    "micro_batch_size": 1}``; or the fields of a point by name (docs/fields.md), such as ``{"model": "llama8b",
    "dp_shard": 8, "zero_stage": 3, "global_batch_size": 8}``. Fields that are not given are those of the grid
    one_point. ``cluster``: whose devices it should fit; None: that is not asked. ``conf``: folders with your own model/
    and cluster/ files. Raises `UltrasweepError` with one line for a field that does not exist and for a layout that
    breaks a rule.
    """
    own = folders(conf)
    experiment = _experiment(dict(layout), own)
    if not is_own(experiment):
        raise UltrasweepError(f"memory knows layouts of the engine ultrasweep; this one has engine={experiment.engine}")
    if broken := layout_violations(experiment):
        raise InfeasibleLayout(*(violation.message for violation in broken))
    estimate = estimate_memory(experiment)
    on = cluster_for("one_point", cluster, own) if cluster is not None else None
    workspace_bytes = on.device.workspace_bytes if on is not None else None
    peak_bytes = estimate.peak_bytes + (workspace_bytes or 0)
    limit_bytes = on.usable_bytes if on is not None else None
    rows = [{**dataclasses.asdict(stage), "peak_bytes": stage.peak_bytes} for stage in estimate.stages]
    return LayoutMemory(
        experiment_id=experiment.id,
        stages=pd.DataFrame(rows).set_index("stage"),
        peak_stage=estimate.peak_stage,
        peak_bytes=peak_bytes,
        workspace_bytes=workspace_bytes,
        limit_bytes=limit_bytes,
        fits=peak_bytes <= limit_bytes if limit_bytes is not None else None,
    )


def _experiment(fields: Mapping[str, Any], own: ConfFolders) -> Experiment:
    """The experiment of a row with its configuration, or of fields that change the grid one_point."""
    if isinstance(stored := fields.get("config_json"), str):
        return _changed(from_json(stored), fields, own)
    if "model" not in fields:
        raise UltrasweepError(f"layout has no model: give one of {', '.join(own.names('model'))}, or a config.json")
    axes = {f"grid.axes.{name}": value for name, value in fields.items() if name != "model"}
    config = compose_sweep([_ONE_POINT, *words({"model": fields["model"], **axes})], own)
    points = expand_all(config.grids, config.models.__getitem__).points
    if len(points) != 1:
        raise UltrasweepError(f"layout describes {len(points)} points; give one value for each field")
    return points[0].experiment


def _changed(stored: Experiment, fields: Mapping[str, Any], own: ConfFolders) -> Experiment:
    """The experiment of a row, with the fields that its user has set to another value. A null is not a value: rows of
    older versions lack some columns."""
    changes: dict[str, Any] = {}
    for name in FIELDS:
        value = fields.get(name)
        if isinstance(value, np.generic):
            value = value.item()
        if name != "model" and value is not None and not pd.isna(value) and value != getattr(stored, name):
            changes[name] = value
    if (model := fields.get("model", stored.model.name)) != stored.model.name:
        changes["model"] = own.model(str(model))
    same = {one.name: getattr(stored, one.name) for one in dataclasses.fields(stored)}
    return Experiment.canonical(**{**same, **changes}) if changes else stored
