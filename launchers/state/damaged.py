"""Points whose file in the queue is damaged: restored from the ledger, or set aside for inspection.

The name of a point's file identifies the point, and the ledger holds all its data. So an emptied or garbled file costs
nothing, as long as the plan it came from is the sweep's last one. A file that holds no point and whose name is not in
the ledger is moved to ``queue/broken``. `SweepStatus` counts it, so that the sweep does not look finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from launchers.state.sweep_dir import Point, SweepDir, entry_names, key_of, read_point, split_name
from results.errors import InvalidResults
from results.tables.store import read_ledger
from workloads.contract.protocol import Method
from workloads.spec import experiment as ex

_METHODS: tuple[Method, ...] = ("measured", "rehearsed", "rehearsed_fake")


def read_or_rebuild(sweep: SweepDir, path: Path, report: Callable[[str], None]) -> Point | None:
    """The point in one of the queue's files, or from the ledger if the file is damaged. None when neither has the
    point: then the file is set aside. ``report`` gets one line about every damaged file.

    Raises `FileNotFoundError` when the file does not exist, and `OSError` when it cannot be read now.
    """
    try:
        return read_point(path)
    except InvalidResults as error:
        point = point_from_ledger(sweep, path.name)
        if point is not None:
            report(f"{error}; the point is taken from the ledger")
            return point
        report(f"{error}; it is not in the ledger either: moved to {_set_aside(sweep, path)}")
        return None


def point_from_ledger(sweep: SweepDir, name: str) -> Point | None:
    """The point whose file has this ``name``, from the sweep's ledger; None when the ledger lacks it. Raises
    `OSError`."""
    number, key = split_name(name)[0].partition("-")[0], key_of(name)
    experiment_id, _, suffix = key.partition("+")
    method = next((method for method in _METHODS if method == (suffix or "measured")), None)
    if not number.isdecimal() or method is None:
        return None
    try:
        table = read_ledger(sweep.path / "ledger.parquet")
    except (FileNotFoundError, InvalidResults):
        return None
    for row in table.filter(pc.equal(table["experiment_id"], experiment_id)).to_pylist():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return _point(row, int(number), experiment_id, method)
    return None


def damaged_names(sweep: SweepDir) -> list[str]:
    """Names of the files that were set aside."""
    try:
        return entry_names(_folder(sweep))
    except FileNotFoundError:
        return []


def _point(row: dict[str, Any], index: int, experiment_id: str, method: Method) -> Point:
    """The point of a row of the ledger. Raises `ValueError`, `TypeError` or `KeyError` for an incomplete row."""
    experiment = ex.from_json(row["config_json"])
    if experiment.id != experiment_id:
        raise ValueError(f"{experiment_id} is the id of another experiment")
    devices = experiment.world_size if method == "measured" else 1
    return Point(
        index=index,
        grid=row["grid"],
        experiment=experiment,
        predicted_peak_bytes=row["predicted_peak_bytes"],
        predicted_step_time_s=row["predicted_step_time_s"],
        predicted_step_time_low_s=row["predicted_step_time_low_s"],
        predicted_step_time_high_s=row["predicted_step_time_high_s"],
        deadline_s=row["worst_gpu_hours"] * 3600 / devices,
        method=method,
    )


def _set_aside(sweep: SweepDir, path: Path) -> Path:
    """Move a file that holds no point to the folder ``broken``, and return that folder."""
    broken = _folder(sweep)
    broken.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another pilot was faster
        path.rename(broken / path.name)
    return broken


def _folder(sweep: SweepDir) -> Path:
    return sweep.path / "queue" / "broken"
