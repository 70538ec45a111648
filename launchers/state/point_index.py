"""One file with the points of a large addition to a queue, so that a pilot reads it instead of every point's own file.

An index file is written before the files of its points and never changes. It is only a copy: a point that no index
holds, or only a damaged one, is read from its own file, as in queues of older versions. A point may leave the queue and
come back under the same name with other contents, for example another deadline. So the newest index that holds a name
counts, an addition that repeats such a name writes an index whatever its size, and a pilot reads the file of a point
that it has claimed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from results.errors import InvalidResults
from results.tables import files
from results.tables.rows import conform
from results.tables.schema import METHODS
from workloads.spec import experiment as ex
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, checked_model

LEAST = 100
"""Smallest addition that gets an index; the points of smaller ones are read from their files."""
MOST_FILES = 8
"""Number of index files that are replaced by one with the next addition."""
_BEGIN, _END = "points-", ".parquet"
_AS_THEY_ARE = ("index", "grid", "method", "deadline_s", "slow_step_s", "ran_on")
_PREDICTED = tuple(f"predicted_{name}" for name in ("peak_bytes", "step_time_s", "step_time_low_s", "step_time_high_s"))
_SCHEMA = pa.schema(
    [
        ("stem", pa.string()),
        ("index", pa.int64()),
        ("grid", pa.string()),
        ("method", pa.string()),
        ("model", pa.string()),
        ("experiment", pa.string()),
        ("predicted_peak_bytes", pa.int64()),
        ("predicted_step_time_s", pa.float64()),
        ("predicted_step_time_low_s", pa.float64()),
        ("predicted_step_time_high_s", pa.float64()),
        ("deadline_s", pa.float64()),
        ("slow_step_s", pa.float64()),
        ("ran_on", pa.list_(pa.string())),
    ]
)
"""Columns of an index: the fields of a point, with its experiment as JSON, and that of the model apart."""


def write_index(queue: Path, added: Mapping[str, Mapping[str, Any]], kept: Collection[str]) -> None:
    """Write the index of points that are about to be added to the folder ``queue``, if they are many or replace points
    of an index. Only one process at a time may call this. Raises `OSError`.

    ``added``: plain data of each point, by the stem of its file. ``kept``: stems of the points that stay in the queue.
    """
    paths = _paths(queue)
    if len(added) < LEAST and not any(not added.keys().isdisjoint(_stems(path)) for path in paths):
        return
    pieces = [_table(added)]
    if merge := len(paths) >= MOST_FILES:
        seen = set(added)
        for path in reversed(paths):
            with suppress(InvalidResults, FileNotFoundError):
                table = _read(path)
                places = [at for at, stem in enumerate(table["stem"].to_pylist()) if stem in kept and stem not in seen]
                pieces.append(table.take(places))
                seen.update(pieces[-1]["stem"].to_pylist())
    number = 1 + max((_number(path) for path in paths), default=0)
    files.write_parquet(
        queue / f"{_BEGIN}{number:06d}-{secrets.token_hex(4)}{_END}", pa.concat_tables(pieces).cast(_SCHEMA)
    )
    for path in paths if merge else ():
        path.unlink(missing_ok=True)


class PointIndex:
    """Reads the index files of one queue. Each is read once, since it never changes."""

    def __init__(self, queue: Path) -> None:
        self._queue = queue
        self._known: set[Path] = set()
        self._rows: dict[str, dict[str, Any]] = {}
        """Plain data of the points that were not asked for yet, by stem."""

    def refresh(self) -> None:
        """Read new index files: one listing of the folder, and each new file. Damaged ones count as missing. Raises
        `OSError`."""
        for path in _paths(self._queue):
            if path not in self._known:
                with suppress(InvalidResults, FileNotFoundError):
                    self._rows |= {row["stem"]: row for row in _read(path).to_pylist()}
                self._known.add(path)

    def take(self, stem: str, known: Experiment | None = None) -> dict[str, Any] | None:
        """The fields of the point of this name, with its experiment, for `launchers.state.sweep_dir.Point`; None
        without an index that holds it. A second call for the same point returns None.

        ``known``: the experiment, if the caller has it; it is read otherwise.
        """
        row = self._rows.pop(stem, None)
        if row is None:
            return None
        try:
            fields = {name: row[name] for name in (*_AS_THEY_ARE, *_PREDICTED)}
            experiment = known or ex.from_dict({**json.loads(row["experiment"]), "model": _model(row["model"])})
            return {**fields, "experiment": experiment, "ran_on": tuple(fields["ran_on"])}
        except (ValueError, TypeError, KeyError, RecursionError, InvalidExperiment):
            return None


def _table(points: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    last: Any = None
    text = ""  # of `last`: points that follow each other mostly have one model
    for stem, point in points.items():
        experiment = dict(point["experiment"])
        model = experiment.pop("model")
        if model != last:
            last, text = model, json.dumps(model)
        rows.append({**point, "stem": stem, "model": text, "experiment": json.dumps(experiment)})
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _read(path: Path) -> pa.Table:
    """The rows of an index file that can be points. Raises `InvalidResults` for a damaged file, and `OSError`."""
    table = conform(files.read_parquet(path, _SCHEMA), _SCHEMA).select(_SCHEMA.names)
    needed = ("stem", "index", "grid", "method", "model", "experiment", "deadline_s", "ran_on")
    good = pc.and_(pc.greater_equal(table["index"], 0), pc.greater(table["deadline_s"], 0))
    good = pc.and_(good, pc.is_in(table["method"], value_set=pa.array(METHODS)))
    for name in needed:
        good = pc.and_(good, pc.is_valid(table[name]))
    for field in _SCHEMA:
        if pa.types.is_floating(field.type):
            good = pc.and_(good, pc.fill_null(pc.is_finite(table[field.name]), True))
    return table.filter(good)


def _stems(path: Path) -> set[str]:
    with suppress(InvalidResults, FileNotFoundError):
        return set(_read(path)["stem"].to_pylist())
    return set()


def _paths(queue: Path) -> list[Path]:
    """The index files, oldest first."""
    return sorted(path for path in queue.iterdir() if path.name.startswith(_BEGIN) and path.suffix == _END)


def _number(path: Path) -> int:
    digits = path.name.removeprefix(_BEGIN).partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


@lru_cache(maxsize=64)
def _model(text: str) -> ModelSpec:
    """The model of many points. Equal texts are equal models."""
    return checked_model("stored model", json.loads(text))
