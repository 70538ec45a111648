"""Reads rows of any results in one schema: today's columns, whichever version of this program wrote the files.

Notebooks and other programs start with `results.tables.load.load(folder)`; ``python -m results.export`` writes the same
table to one file. Files of older versions are upgraded when they are read: a missing column is computed from other
columns where that is possible, otherwise it is null. Rows of a newer version are read as far as this program knows
their columns, with a line in ``problems``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from results.errors import InvalidResults
from results.shared_filesystem.lease import Lease
from results.shared_filesystem.whole_files import NotAFile, open_regular, path_of
from results.tables import files, store
from results.tables.rows import conform
from results.tables.schema import ATTEMPTS, LEDGER, SCHEMA_VERSION, STEPS
from results.tables.store import Reading
from results.text.numbers import listed, plural

Table = Literal["attempts", "steps", "ledger"]
SCHEMAS: dict[Table, pa.Schema] = {"attempts": ATTEMPTS, "steps": STEPS, "ledger": LEDGER}


def load(path: Path | str, table: Table = "attempts") -> Reading:
    """Reads one table of every sweep at or below ``path`` (or of one Parquet file), with exactly the columns of today's
    schema.

    ``problems`` of the result has a line for each file that could not be read, for rows of a newer version, and for
    unknown columns, which are left out. Raises `InvalidResults` if there is no sweep.
    """
    path = Path(path)
    problems: list[str] = []
    if table == "ledger":
        rows = store.read_ledger(path)
    else:
        reading = store.scan(path, table)
        rows, problems = reading.table, list(reading.problems)
    if table == "attempts":
        rows, version_problems = upgraded(rows)
        problems += version_problems
    else:
        problems += _newer_files(path, table)
        if table == "ledger":
            rows = upgraded_ledger(rows)
    schema = SCHEMAS[table]
    if others := [name for name in rows.column_names if name not in schema.names]:
        problems.append(f"left out {plural(len(others), 'column')} that this version does not know: {listed(others)}")
    return Reading(conform(rows, schema).select(schema.names), tuple(problems))


def upgraded(attempts: pa.Table) -> tuple[pa.Table, list[str]]:
    """Returns attempts of any version with every column of today's schema and their extra ones, and a line if some rows
    are of a newer version.

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
    """``table`` with null values of a column replaced by those of ``otherwise``."""
    place = table.schema.get_field_index(column)
    return table.set_column(place, table.schema.field(place), pc.coalesce(table[column], otherwise))


LATER_CHOICES = {
    "recompute_every": 1,
    "etp": 1,
    "routing": "balanced",
    "routing_imbalance": 1.0,
    "cuda_graph": "none",
    "gradient_accumulation_fusion": False,
    "grad_reduce": "fp32",
    "optimizer": "adamw",
    "optimizer_states": "fp32",
    "master_weights": "fp32",
    "optimizer_offload": 0.0,
    "recurrence": "torch",
    "document_balance": "none",
    "activation_offload": "none",
}
"""Values for rows that are older than these columns (schema 7, 8, 15, 17 and 18): every layer was recomputed, or none;
no experts ran; no step was captured, and this engine's products added to no sums; AdamW updated weights, and all of it
was in fp32 on the device, as were activations; torch computed recurrences; sequences were dealt in order."""


def _with_later_choices(table: pa.Table) -> pa.Table:
    """Sets `LATER_CHOICES` in rows that are older than these columns, if a row has a layout."""
    for column, before in LATER_CHOICES.items():
        kind = table.schema.field(column).type
        defaults = pc.if_else(pc.is_valid(table["recompute"]), pa.scalar(before, kind), pa.scalar(None, kind))
        table = _with(table, column, defaults)
    return table


def _backend(attempts: pa.Table) -> pa.ChunkedArray:
    """``backend`` of measured rows that are older than the column (schema 4). The driver of a GPU reports its memory; a
    CPU has only a name. Null if a row has neither."""
    known = pc.and_(pc.is_valid(attempts["device_name"]), pc.fill_null(pc.equal(attempts["method"], "measured"), False))
    backend = pc.if_else(pc.is_valid(attempts["device_memory_bytes"]), "cuda", "cpu")
    return pc.if_else(known, backend, pa.scalar(None, pa.string()))


def upgraded_ledger(ledger: pa.Table) -> pa.Table:
    """Returns a ledger of any version with every column of today's schema and its extra ones."""
    ledger = conform(ledger, LEDGER)
    return _with_later_choices(ledger) if ledger.num_rows else ledger


def _newer_files(path: Path, table: Table) -> list[str]:
    """A line for each merged file of a newer version; rows of steps and ledgers have no version of their own."""
    paths = [path] if path.is_file() else [sweep / f"{table}.parquet" for sweep in store.sweep_dirs(path)]
    problems = []
    for file in paths:
        try:
            with open_regular(file.resolve() if file == path else file) as opened:
                metadata = pq.read_schema(path_of(opened)).metadata or {}
        except (OSError, NotAFile, pa.ArrowException):
            continue  # the reader of the rows reports it
        version = metadata.get(b"schema_version", b"0")
        if version.isdigit() and int(version) > SCHEMA_VERSION:
            problems.append(
                f"{file} is of a newer version of ultrasweep (schema {int(version)}, this one knows {SCHEMA_VERSION}): "
                "new or changed columns may be missing or misread; update ultrasweep"
            )
    return problems


def rewrite(sweep_dir: Path, table: Table, lease: Lease) -> bool:
    """Bring the merged file of one table of a sweep to today's schema, in place, under the lease of those who merge it.
    Returns False if nothing had to be changed, or if the sweep has no such file. Raises `InvalidResults` if the file
    cannot be read, or if another process merges it meanwhile."""
    path = sweep_dir / f"{table}.parquet"
    if not path.exists():
        return False
    stored = files.read_parquet(path)
    if table == "attempts":
        rows = upgraded(stored)[0]
    else:
        rows = upgraded_ledger(stored) if table == "ledger" else conform(stored, SCHEMAS[table])
    version = (stored.schema.metadata or {}).get(b"schema_version")
    if rows.schema.equals(stored.schema) and version == str(SCHEMA_VERSION).encode() and rows.equals(stored):
        return False
    if not files.replace_while_held(lease, path, rows.schema, [rows]):
        raise InvalidResults(f"{path} has been merged by another process meanwhile; try again")
    return True
