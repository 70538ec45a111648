"""One file with many records of ended attempts, so that a reader opens it instead of each record's own file.

The file is only a copy of records that exist, and is replaced as a whole: of two processes that write at once, the last
one wins. A record that it does not hold, or of which it holds only damaged fields, is read from its own file, as all
are in queues of older versions. A failure of the infrastructure is never copied, because a pilot that was taken for
dead may still replace its record with what it has measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from results.errors import InvalidResults
from results.tables import files
from results.tables.rows import conform
from results.tables.schema import METHODS
from workloads.contract.typed import LATEST

LEAST = 100
"""Smallest number of records that readers open one by one; more of them are worth a new file."""
_NAME = "name"
_TEXT, _WHOLE, _NUMBER = pa.string(), pa.int64(), pa.float64()
_SCHEMA = pa.schema(
    [
        pa.field(_NAME, _TEXT, nullable=False),
        pa.field("attempt_id", _TEXT, nullable=False),
        pa.field("attempt_number", _WHOLE, nullable=False),
        pa.field("pilot_id", _TEXT, nullable=False),
        pa.field("experiment_id", _TEXT, nullable=False),
        pa.field("world_size", _WHOLE, nullable=False),
        pa.field("outcome", _TEXT, nullable=False),
        ("phase", _TEXT),
        ("phase_step", _WHOLE),
        ("failed_rank", _WHOLE),
        ("evidence", _TEXT),
        pa.field("infrastructure", pa.bool_(), nullable=False),
        pa.field("will_retry", pa.bool_(), nullable=False),
        pa.field("started_at", _NUMBER, nullable=False),
        pa.field("ended_at", _NUMBER, nullable=False),
        pa.field("method", _TEXT, nullable=False),
        ("gap_s", _NUMBER),
        ("step_time_s", _NUMBER),
        ("tokens_per_s_per_gpu", _NUMBER),
        ("peak_allocated_bytes", _WHOLE),
        pa.field("nodes", pa.list_(_TEXT), nullable=False),
        ("failed_node", _TEXT),
        pa.field("kind", _TEXT, nullable=False),
        ("backend", _TEXT),
    ]
)
"""The name of a record's file, and the fields of `launchers.state.history.AttemptRecord`."""


def merged_path(history: Path) -> Path:
    """The file that holds records of the folder ``history``."""
    return history.with_name("history.parquet")


def read_merged(history: Path) -> dict[str, dict[str, Any]]:
    """Fields of the merged records, by the name of the record's file. Empty without a file, or when it is damaged.
    Raises `OSError` when it cannot be read now."""
    try:
        names, *columns = map(_values, _read(history).columns)
    except (InvalidResults, pa.ArrowException, UnicodeDecodeError):
        return {}
    fields = _SCHEMA.names[1:]
    return {name: dict(zip(fields, values, strict=True)) for name, *values in zip(names, *columns, strict=True)}


def merge(history: Path, records: Mapping[str, Any]) -> None:
    """Write the merged file anew with ``records``, by the names of their files, if it lacks many of them. Raises
    `OSError`."""
    kept = {name: record for name, record in records.items() if not record.infrastructure}
    if len(kept) <= LEAST or len(kept.keys() - _names(history)) <= LEAST:
        return
    columns = [pa.array([*kept], _TEXT)]
    for field in _SCHEMA.remove(0):
        values = [getattr(record, field.name) for record in kept.values()]
        if field.type == _NUMBER:  # Arrow refuses a whole number that has no exact counterpart
            values = [None if value is None else float(value) for value in values]
        columns.append(pa.array(values, field.type))
    files.write_parquet(merged_path(history), pa.table(columns, schema=_SCHEMA))


def _names(history: Path) -> set[str]:
    try:
        return set(_read(history)[_NAME].to_pylist())
    except (InvalidResults, UnicodeDecodeError):
        return set()


def _read(history: Path) -> pa.Table:
    """The rows of the merged file; none without a file. Raises `InvalidResults` for a damaged one, and `OSError`."""
    try:
        stored = files.read_parquet(merged_path(history), _SCHEMA)
    except FileNotFoundError:
        return _SCHEMA.empty_table()
    return _good(conform(stored, _SCHEMA).select(_SCHEMA.names))


def _good(table: pa.Table) -> pa.Table:
    """The rows that can be records, by the same rules as the records' own files."""
    good = pc.and_(pc.greater(table["world_size"], 0), pc.greater_equal(table["attempt_number"], 0))
    good = pc.and_(good, pc.is_in(table["method"], value_set=pa.array(METHODS)))
    for field in _SCHEMA:
        column = table[field.name]
        if not field.nullable:
            good = pc.and_(good, pc.is_valid(column))
        if field.type == _NUMBER:
            good = pc.and_(good, pc.fill_null(pc.is_finite(column), True))
        if field.name.endswith("_at"):
            good = pc.and_(good, pc.and_(pc.greater_equal(column, 0), pc.less_equal(column, LATEST)))
        if field.name.endswith("_id"):
            good = pc.and_(good, pc.invert(pc.match_substring_regex(column, r"^\.\.?$|[/\x00]")))
    return table.filter(good)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column; equal texts are one object."""
    if column.null_count == len(column):
        return [None] * len(column)
    array = pa.concat_arrays(column.chunks)
    if pa.types.is_list(array.type):
        texts, ends = _values(pa.chunked_array([array.flatten()])), array.value_lengths().to_numpy().cumsum().tolist()
        if None in texts:
            raise InvalidResults("a node has no name")
        return [tuple(texts[start:end]) for start, end in itertools.pairwise([0, *ends])]
    if pa.types.is_string(array.type):
        encoded = array.dictionary_encode()
        texts = [*encoded.dictionary.to_pylist(), None]
        return [texts[place] for place in encoded.indices.fill_null(len(texts) - 1).to_numpy().tolist()]
    return array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False).tolist()
