"""Finished attempts in the results folder, which a plan need not run again.

A sweep's rows always count for that sweep: that is how a run resumes. Rows of other sweeps count only with
``plan.reuse=true``, because a new sweep is expected to measure. Shipped sweeps never count.

A row may have an id that a new run of its experiment would not get (`workloads.spec.experiment.canonical_id`). It
counts under both ids, and a sweep that was begun under such ids goes on under them (`begun_experiments`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from results.errors import InvalidResults
from sweep.composing.config import SweepConfig
from workloads.contract.protocol import Method
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidExperiment, InvalidSweep
from workloads.spec.experiment import Experiment, canonical_id, from_dict
from workloads.spec.model_spec import canonical_model, checked_model


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAttempt:
    """An attempt whose outcome another try would only repeat."""

    attempt_id: str
    sweep: str
    """Name of the sweep's folder."""
    outcome: str


def find_finished(config: SweepConfig, method: Method) -> dict[str, FinishedAttempt]:
    """Finished attempts that the sweep ``config`` may use instead of running a point, by experiment id.

    Finished outcomes are ``ok``, and ``oom`` (which repeats). Rehearsed rows must name the same cluster file, because
    it sets their communication times; a measured row may also come from another file for the same device. If several
    sweeps have an attempt, this sweep's attempt wins. Raises `InvalidSweep` when ``results_dir`` is a file.
    """
    if config.results_dir.exists() and not config.results_dir.is_dir():
        raise InvalidSweep(f"results_dir={config.results_dir} is a file; give the folder that holds the sweeps")
    finished: dict[str, FinishedAttempt] = {}
    for folder in _folders(config):
        for experiment_id, text, attempt in _finished_in(folder, method, config.cluster):
            finished.setdefault(experiment_id, attempt)
            if (stored := _renamed(text)) is not None:
                finished.setdefault(canonical_id(stored), attempt)
    return finished


def begun_experiments(config: SweepConfig) -> dict[str, Experiment]:
    """Experiments that the sweep ``config`` holds under an id that a new run would not get, by the id that it would
    get. The sweep goes on under the old ids, so that its queue, ledger and rows stay one."""
    from results.tables.store import read_attempts, read_ledger

    folder = config.sweep_dir
    if not (folder / "sweep.json").is_file():
        return {}
    texts: dict[str, None] = {}
    if (folder / "ledger.parquet").is_file():
        with contextlib.suppress(InvalidResults):  # a damaged ledger is written again; the rows remain
            texts |= dict.fromkeys(read_ledger(folder / "ledger.parquet")["config_json"].to_pylist())
    texts |= dict.fromkeys(read_attempts(folder)["config_json"].to_pylist())
    begun: dict[str, Experiment] = {}
    for text in texts:
        if (stored := _renamed(text)) is not None:
            begun.setdefault(canonical_id(stored), stored)
    return begun


def _renamed(text: str | None) -> Experiment | None:
    """The experiment of a row's ``config_json`` if a new run of it would get another id; None for all others, and for
    rows that this version cannot read."""
    if not text or ('"moe": null' in text and '"mla": null' in text):  # every field of a dense model has an effect
        return None
    try:
        fields = json.loads(text)
        return from_dict(fields) if _is_renamed(json.dumps(fields["model"])) else None
    except (InvalidExperiment, ValueError, TypeError, KeyError):
        return None


@lru_cache(maxsize=256)
def _is_renamed(model_json: str) -> bool:
    """Whether a stored model has other values than new ones in fields without effect. Many rows have one model."""
    model = checked_model("stored model", json.loads(model_json))
    return canonical_model(model) is not model


def _folders(config: SweepConfig) -> list[Path]:
    """Folders of the sweeps whose rows count, this sweep's folder first."""
    from results.tables.store import own_sweep_dirs

    sweep_folders = own_sweep_dirs(config.sweep_dir)
    if not config.plan.reuse:
        return sweep_folders
    return [*sweep_folders, *(folder for folder in own_sweep_dirs(config.results_dir) if folder not in sweep_folders)]


def _finished_in(
    folder: Path, method: Method, cluster: ClusterSpec
) -> Iterator[tuple[str, str | None, FinishedAttempt]]:
    """Ids, configurations and attempts of the finished rows that count for this method and cluster."""
    from results.tables.schema import MEASUREMENT_VERSION
    from results.tables.store import read_attempts

    columns = ["experiment_id", "attempt_id", "outcome", "method", "cluster", "device_name", "measurement_version"]
    columns.append("config_json")
    device_names = {cluster.device.name, *cluster.device.driver_names}
    for row in read_attempts(folder).select(columns).to_pylist():
        same_device = row["cluster"] == cluster.name or (method == "measured" and row["device_name"] in device_names)
        if (
            row["method"] == method
            and row["measurement_version"] == MEASUREMENT_VERSION
            and row["outcome"] in ("ok", "oom")
            and same_device
        ):
            yield (
                row["experiment_id"],
                row["config_json"],
                FinishedAttempt(attempt_id=row["attempt_id"], sweep=folder.name, outcome=row["outcome"]),
            )
