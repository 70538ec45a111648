"""Choices of the explorer's memory widget: shipped model shapes and devices, and the planner's limit.

The YAML files of ``sweep/conf`` ship with this package. They are read as data: no code of ``sweep`` is imported, and no
shape or memory size is written down twice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import yaml

from analysis.explorer.rule_data import rules_json
from workloads.costs.shape.params import num_params
from workloads.spec import experiment as ex
from workloads.spec import experiment_values as values
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidExperiment, InvalidSweep
from workloads.spec.hardware.cluster_fields import cluster_from_dict
from workloads.spec.model_spec import ModelSpec, model_from_dict, model_to_dict
from workloads.spec.recomputation import Recompute

CONF = Path(__file__).resolve().parents[2] / "sweep" / "conf"
SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size")
"""Columns of a row that give its model's sizes."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C takes a tenth of the time; builds of PyYAML without libyaml lack it."""
_DEVICE = "/device@device"
"""Key of the device file in a cluster file's list of defaults (Hydra's grammar)."""


def models_json(attempts: pd.DataFrame | None = None, conf: Path = CONF) -> dict[str, Any]:
    """Plain data for the page (``data.widget``).

    ``models``: every shipped shape, smallest first, then shapes that only ``attempts`` (rows of
    `results.tables.schema`) have; without those of a list of layers, which the widget's fields do not describe.
    ``listed``: names of these in ``attempts``. ``listed_sizes``: name and sizes of every shipped one of these.
    ``clusters``: every shipped cluster with known device memory, in bytes.
    ``oom_margin``: the planner leaves a layout out if its peak exceeds this many times a cluster's ``usable_bytes``.
    ``choices``: allowed values of an experiment's fields. ``engine``: name and version. ``rules``: see `rules_json`.
    Raises `InvalidSweep` if a shipped file cannot be read.
    """
    shipped = [_model(path) for path in _files(conf, "model")]
    models = sorted((model for model in shipped if model.layers is None), key=num_params)
    clusters = [_cluster(path, conf) for path in _files(conf, "cluster")]
    choices = {
        "recompute": Recompute,
        "pp_schedule": values.PipelineSchedule,
        "pp_split": values.PipelineSplit,
        "cp_kind": values.ContextKind,
        "precision": values.Precision,
        "attention": values.Attention,
        "compile": values.Compile,
        "routing": values.Routing,
    }
    return {
        "models": [model_to_dict(model) for model in [*models, *_models_of(attempts, models)]],
        "listed": _listed(attempts),
        "listed_sizes": [_sizes(model) for model in shipped if model.layers is not None],
        "clusters": [_described(cluster) for cluster in clusters if cluster.device.memory_bytes is not None],
        "oom_margin": float(_read(conf / "config.yaml")["plan"]["oom_margin"]),
        "choices": {field: list(get_args(words)) for field, words in choices.items()},
        "engine": {"engine": ex.ENGINE, "engine_version": ex.ENGINE_VERSION},
        "rules": rules_json(),
    }


def power_limit_w(device: str | None, conf: Path = CONF) -> float | None:
    """The power limit of a device in its shipped file, by the name that the driver reports; None: not known."""
    for fields in map(_read, _files(conf, "device")):
        if device is not None and device in (fields["name"], *fields["driver_names"]):
            return None if fields.get("power_w") is None else float(fields["power_w"])
    return None


def _described(cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "backend": cluster.backend,
        "devices_per_node": cluster.devices_per_node,
        "joined_devices": cluster.joined_devices or 0,
        "memory_bytes": cluster.device.memory_bytes,
        "usable_bytes": cluster.usable_bytes,
        "workspace_bytes": cluster.device.workspace_bytes,
        "precisions": list(cluster.device.peak_flops),
    }


def _models_of(attempts: pd.DataFrame | None, known: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Shapes of the rows that record their full experiment, without shapes that are ``known`` under another name."""
    if attempts is None or attempts.empty:
        return []
    rows = attempts.dropna(subset=["config_json"]).drop_duplicates(["model", *SIZES])
    seen = {dataclasses.replace(model, name="") for model in known}
    names = {model.name for model in known}
    models_of_rows = []
    for text in rows["config_json"]:
        try:
            model = ex.from_json(text).model
        except (InvalidExperiment, ValueError):
            continue  # written by another version, whose fields have other meanings
        if model.layers is not None or dataclasses.replace(model, name="") in seen:
            continue
        seen.add(dataclasses.replace(model, name=""))
        name = model.name if model.name not in names else f"{model.name} (of the rows)"
        names.add(name)
        models_of_rows.append(dataclasses.replace(model, name=name))
    return models_of_rows


def _sizes(model: ModelSpec) -> dict[str, Any]:
    return {"name": model.name} | {name: getattr(model, name) for name in SIZES}


def _listed(attempts: pd.DataFrame | None) -> list[str]:
    """Names of models of rows that are lists of layers."""
    if attempts is None or attempts.empty:
        return []
    rows = attempts.dropna(subset=["config_json"]).drop_duplicates("model")
    has_list = ["layers" in json.loads(text)["model"] for text in rows["config_json"]]
    return sorted(rows["model"][has_list])


def _files(conf: Path, group: str) -> list[Path]:
    files = sorted((conf / group).glob("*.yaml"))
    if not files:
        raise InvalidSweep(f"{conf / group} holds no YAML file; it ships with this package")
    return files


def _model(path: Path) -> ModelSpec:
    return model_from_dict({"name": path.stem, **_read(path)})


def _cluster(path: Path, conf: Path) -> ClusterSpec:
    """The cluster with its device file merged, as Hydra composes it. Rates are not converted, because nothing here uses
    them."""
    fields = _read(path)
    for default in fields.pop("defaults", []):
        if isinstance(default, dict) and _DEVICE in default:
            fields["device"] = _read(conf / "device" / f"{default[_DEVICE]}.yaml")
    return cluster_from_dict(fields)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidSweep(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InvalidSweep(f"{path} does not hold a mapping")
    return data
