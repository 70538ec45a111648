"""Rows of any results in one schema: today's columns, whichever version of this program wrote the files.

`results.tables.load.load(folder)` is what notebooks and other programs start from; ``python -m results.export``
writes the same to one file. Files of older versions are upgraded as they are read: a column that they lack is worked
out where it follows from others, else it is null. Rows of a newer version are read as far as this program knows them,
and a line says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from results.tables import files, store
from results.tables.rows import conform
from results.tables.schema import ATTEMPTS, LEDGER, SCHEMA_VERSION, STEPS
from results.tables.store import Reading
from results.text.numbers import listed, plural

Table = Literal["attempts", "steps", "ledger"]
SCHEMAS: dict[Table, pa.Schema] = {"attempts": ATTEMPTS, "steps": STEPS, "ledger": LEDGER}


def load(path: Path | str, table: Table = "attempts") -> Reading:
    """One table of every sweep at or below ``path`` (or of one Parquet file): exactly the columns of today's schema.

    ``problems`` of the answer has a line for each file that could not be read, for rows of a newer version, and for
    columns that are not of the schema and are left out. Raises `InvalidResults` when there is no sweep.
    """
    path = Path(path)
    problems: list[str] = []
    if table == "ledger":
        found = store.read_ledger(path)
    else:
        reading = store.scan(path, table)
        found, problems = reading.table, list(reading.problems)
    if table == "attempts":
        found, said = upgraded(found)
        problems += said
    else:
        problems += _newer_files(path, table)
        if table == "ledger":
            found = upgraded_ledger(found)
    schema = SCHEMAS[table]
    if others := [name for name in found.column_names if name not in schema.names]:
        problems.append(f"left out {plural(len(others), 'column')} that this version does not know: {listed(others)}")
    return Reading(conform(found, schema).select(schema.names), tuple(problems))


def upgraded(attempts: pa.Table) -> tuple[pa.Table, list[str]]:
    """Attempts of any version with every column of today's and their own extra ones, and a line on rows of a newer one.

    ``schema_version`` stays that of the program that wrote the row.
    """
    attempts = conform(attempts, ATTEMPTS)
    if not attempts.num_rows:
        return attempts, []
    version = attempts["schema_version"]
    newer = pc.filter(version, pc.fill_null(pc.greater(version, SCHEMA_VERSION), False))
    problems = []
    if len(newer):
        problems.append(
            f"{plural(len(newer), 'row')} of a newer version of ultrasweep (schema {pc.max(newer).as_py()}, this one "
            f"knows {SCHEMA_VERSION}): new or changed columns may be missing or misread; update ultrasweep"
        )
    attempts = _with(attempts, "backend", _backend(attempts))
    return _with_later_choices(attempts), problems


def _with(table: pa.Table, column: str, otherwise: pa.ChunkedArray) -> pa.Table:
    """``table`` with the values of ``otherwise`` where a column has none."""
    place = table.schema.get_field_index(column)
    return table.set_column(place, table.schema.field(place), pc.coalesce(table[column], otherwise))


LATER_CHOICES = {"recompute_every": 1, "etp": 1, "routing": "balanced", "routing_imbalance": 1.0}
"""What rows did that are older than these columns (schema 7 and 8): every layer was recomputed, or none; no expert
ran."""


def _with_later_choices(table: pa.Table) -> pa.Table:
    """`LATER_CHOICES` in rows that are older than these columns, where a row tells its layout at all."""
    for column, before in LATER_CHOICES.items():
        kind = table.schema.field(column).type
        found = pc.if_else(pc.is_valid(table["recompute"]), pa.scalar(before, kind), pa.scalar(None, kind))
        table = _with(table, column, found)
    return table


def _backend(attempts: pa.Table) -> pa.ChunkedArray:
    """``backend`` of measured rows that are older than the column (schema 4): the driver of a GPU reports its memory, a
    CPU has a name alone. Null where the ranks told neither."""
    told = pc.and_(pc.is_valid(attempts["device_name"]), pc.fill_null(pc.equal(attempts["method"], "measured"), False))
    found = pc.if_else(pc.is_valid(attempts["device_memory_bytes"]), "cuda", "cpu")
    return pc.if_else(told, found, pa.scalar(None, pa.string()))


def upgraded_ledger(ledger: pa.Table) -> pa.Table:
    """A ledger of any version with every column of today's and its own extra ones."""
    ledger = conform(ledger, LEDGER)
    return _with_later_choices(ledger) if ledger.num_rows else ledger


def _newer_files(path: Path, table: Table) -> list[str]:
    """A line for each merged file of a newer version; rows of steps and ledgers do not say theirs."""
    paths = [path] if path.is_file() else [sweep / f"{table}.parquet" for sweep in store.sweep_dirs(path)]
    found = []
    for file in paths:
        try:
            metadata = pq.read_schema(file).metadata or {}
        except (OSError, pa.ArrowException):
            continue  # told by whoever reads its rows
        version = metadata.get(b"schema_version", b"0")
        if version.isdigit() and int(version) > SCHEMA_VERSION:
            found.append(
                f"{file} is of a newer version of ultrasweep (schema {int(version)}, this one knows {SCHEMA_VERSION}): "
                "new or changed columns may be missing or misread; update ultrasweep"
            )
    return found


def rewrite(sweep_dir: Path, table: Table) -> bool:
    """Bring the merged file of one table of a sweep to today's schema, in place. False when it is there already, or
    when the sweep has no such file. Raises `InvalidResults` when it cannot be read."""
    path = sweep_dir / f"{table}.parquet"
    if not path.exists():
        return False
    stored = files.read_parquet(path)
    if table == "attempts":
        found = upgraded(stored)[0]
    else:
        found = upgraded_ledger(stored) if table == "ledger" else conform(stored, SCHEMAS[table])
    version = (stored.schema.metadata or {}).get(b"schema_version")
    if found.schema.equals(stored.schema) and version == str(SCHEMA_VERSION).encode() and found.equals(stored):
        return False
    files.write_parquet(path, found)
    return True
