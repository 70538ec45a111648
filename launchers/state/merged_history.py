"""One file with many records of ended attempts, so that a reader opens it instead of each record's own file.

The file is only a copy of records that exist, and is replaced as a whole: of two processes that write at once, the last
one wins. A record that it does not hold, or with odd values, is read from its own file, as all are in queues of older
versions. A failure of the infrastructure is never copied, because a pilot that was taken for dead may still replace its
record with what it has measured.

It is JSON of one list for each field, because Python reads and checks that faster than a row for each record, and
faster than Arrow makes Python's values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results.tables.schema import METHODS
from workloads.contract.protocol import read_json, write_json
from workloads.contract.typed import LATEST

LEAST = 100
"""Number of records that readers may open one by one; more of them are worth a new file."""
_NONE = type(None)
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "attempt_id": (str,),
    "attempt_number": (int,),
    "pilot_id": (str,),
    "experiment_id": (str,),
    "world_size": (int,),
    "outcome": (str,),
    "phase": (str, _NONE),
    "phase_step": (int, _NONE),
    "failed_rank": (int, _NONE),
    "evidence": (str, _NONE),
    "infrastructure": (bool,),
    "will_retry": (bool,),
    "started_at": (float, int),
    "ended_at": (float, int),
    "method": (str,),
    "gap_s": (float, int, _NONE),
    "step_time_s": (float, int, _NONE),
    "tokens_per_s_per_gpu": (float, int, _NONE),
    "peak_allocated_bytes": (int, _NONE),
    "nodes": (list,),
    "failed_node": (str, _NONE),
    "kind": (str,),
    "backend": (str, _NONE),
}
"""The fields of `launchers.state.history.AttemptRecord`, with the types of their values."""
_NAME = "name"
_MOST = 2**63 - 1
_LEAST_VALUES = {"world_size": 1, "attempt_number": 0}


def merged_path(history: Path) -> Path:
    """The file that holds records of the folder ``history``."""
    return history.with_name("history.json")


def read_merged(history: Path) -> dict[str, dict[str, Any]]:
    """Fields of the merged records, by the name of the record's file. Empty where that file cannot be read."""
    try:
        columns = read_json(merged_path(history))
    except (OSError, ValueError):
        return {}
    if not isinstance(columns, dict) or columns.keys() != {_NAME, *_FIELDS}:  # perhaps of another version
        return {}
    if not all(isinstance(values, list) for values in columns.values()) or len({*map(len, columns.values())}) != 1:
        return {}
    odd = {place for name, kinds in _FIELDS.items() for place in _odd(name, kinds, columns[name])}
    odd.update(_odd(_NAME, (str,), columns[_NAME]))
    columns["nodes"] = [tuple(nodes) if isinstance(nodes, list) else () for nodes in columns["nodes"]]
    values = zip(*(columns[name] for name in _FIELDS), strict=True)
    return {
        columns[_NAME][place]: dict(zip(_FIELDS, record, strict=True))
        for place, record in enumerate(values)
        if place not in odd
    }


def merge(history: Path, records: Mapping[str, Any]) -> None:
    """Write the merged file anew with ``records``, by the names of their files, if it lacks many of them. Raises
    `OSError`."""
    kept = {name: record for name, record in records.items() if not record.infrastructure}
    if len(kept) > LEAST and len(kept.keys() - read_merged(history)) > LEAST:
        columns = {name: [getattr(record, name) for record in kept.values()] for name in _FIELDS}
        write_json(merged_path(history), {_NAME: [*kept], **columns})


def _odd(name: str, kinds: tuple[type, ...], values: Sequence[Any]) -> list[int]:
    """Places of the values that cannot be in a record."""
    if _are_good(name, kinds, values):
        return []
    return [place for place, value in enumerate(values) if not _are_good(name, kinds, [value])]


def _are_good(name: str, kinds: tuple[type, ...], values: Sequence[Any]) -> bool:
    """Whether all values of a field keep the rules for the records' own files (`workloads.contract.typed`)."""
    if not {*map(type, values)} <= {*kinds}:
        return False
    given = [value for value in values if value is not None]
    if list in kinds:
        return _are_good("", (str,), [node for nodes in given for node in nodes])
    if str in kinds:
        try:
            text = "\n".join(given).encode()
        except UnicodeEncodeError:
            return False
        if name.endswith("_id"):
            return b"/" not in text and b"\0" not in text and {*given}.isdisjoint((".", ".."))
        return name != "method" or {*given} <= {*METHODS}
    if name.endswith("_at"):
        return all(0 <= value <= LATEST for value in given)
    least = _LEAST_VALUES.get(name, -_MOST)
    return all(least <= value <= _MOST if type(value) is int else math.isfinite(value) for value in given)
