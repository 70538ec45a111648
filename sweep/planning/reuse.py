"""Finished attempts in the results folder, which a plan need not run again.

A sweep's rows always count for that sweep: that is how a run resumes. Rows of other sweeps count only with
``plan.reuse=true``, because a new sweep is expected to measure. Shipped sweeps never count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sweep.composing.config import SweepConfig
from workloads.contract.protocol import Method
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep


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
        for experiment_id, attempt in _finished_in(folder, method, config.cluster):
            finished.setdefault(experiment_id, attempt)
    return finished


def _folders(config: SweepConfig) -> list[Path]:
    """Folders of the sweeps whose rows count, this sweep's folder first."""
    from results.tables.store import own_sweep_dirs

    sweep_folders = own_sweep_dirs(config.sweep_dir)
    if not config.plan.reuse:
        return sweep_folders
    return [*sweep_folders, *(folder for folder in own_sweep_dirs(config.results_dir) if folder not in sweep_folders)]


def _finished_in(folder: Path, method: Method, cluster: ClusterSpec) -> Iterator[tuple[str, FinishedAttempt]]:
    from results.tables.schema import MEASUREMENT_VERSION
    from results.tables.store import read_attempts

    columns = ["experiment_id", "attempt_id", "outcome", "method", "cluster", "device_name", "measurement_version"]
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
                FinishedAttempt(attempt_id=row["attempt_id"], sweep=folder.name, outcome=row["outcome"]),
            )
