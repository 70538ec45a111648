"""The paths of a sweep's tables, and reading and writing of one Parquet file. `results.tables.store` describes the
layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from results.errors import InvalidResults
from results.shared_filesystem.lease import Lease
from results.shared_filesystem.patience import may_pass, repeated
from results.shared_filesystem.whole_files import NotAFile, create, temporary_path
from results.tables import limits
from results.tables.rows import conform
from results.tables.schema import ATTEMPTS, STEPS

Table = Literal["attempts", "steps"]
SCHEMAS: dict[Table, pa.Schema] = {"attempts": ATTEMPTS, "steps": STEPS}
MARKER = "sweep.json"
"""Name of the file that makes a folder a sweep."""
SHIPPED_MARKER = "SHIPPED"
"""Name of the file that marks a folder of shipped sweeps: all sweeps below it came with the program."""


def compacted_path(sweep_dir: Path, table: Table) -> Path:
    return sweep_dir / f"{table}.parquet"


def part_path(sweep_dir: Path, table: Table, attempt_id: str) -> Path:
    return sweep_dir / "parts" / table / f"{attempt_id}.parquet"


def part_paths(sweep_dir: Path, table: Table) -> list[Path]:
    """The parts of a table. A link in the place of their folder counts as one part, which readers report and leave
    out: merging would remove the parts of the sweep to which it leads."""
    folder = sweep_dir / "parts" / table
    for path in (folder, folder.parent):
        if path.is_symlink():
            return [path]
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def read_parquet(path: Path, schema: pa.Schema | None = None, *, most: int | None = None) -> pa.Table:
    """Reads the whole file. Raises `FileNotFoundError`, another `OSError` if it cannot be read now, or `InvalidResults`
    if it is damaged, not a Parquet file, or takes more than ``most`` bytes in memory (by default
    `results.tables.limits.most_bytes`).

    ``schema``: the columns that the caller will add where they are missing.
    """
    try:
        return repeated(lambda: limits.read_parquet(path, schema, most))
    except (FileNotFoundError, InvalidResults):
        raise
    except (OSError, NotAFile, pa.ArrowException) as error:
        if isinstance(error, OSError) and may_pass(error):
            raise
        raise InvalidResults(unreadable(path, error)) from None


def read_file(path: Path, table: Table) -> pa.Table:
    """Reads one part or merged file, with every column of today's schema and its extra ones. Raises as
    `read_parquet`."""
    stored = read_parquet(path, SCHEMAS[table])
    if "attempt_id" not in stored.column_names:
        raise InvalidResults(f"{path} is not a table of {table}: it has no column attempt_id")
    try:
        return conform(stored, SCHEMAS[table])
    except InvalidResults as error:
        raise InvalidResults(unreadable(path, error)) from None


def read_or_report(path: Path, table: Table, problems: list[str]) -> pa.Table | None:
    """As `read_file`, but returns None for a missing file, and for one that cannot be read, with a line in
    ``problems``."""
    try:
        return read_file(path, table)
    except FileNotFoundError:
        return None
    except InvalidResults as error:
        problems.append(str(error))
        return None
    except OSError as error:
        problems.append(unreadable(path, error))
        return None


def unreadable(path: Path, error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{path} cannot be read and is left out: {lines[0] if lines else type(error).__name__}"


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write ``table`` so that readers see the old file or the whole new one, even after a power cut."""
    repeated(lambda: _write(path, table))


def _write(path: Path, table: pa.Table) -> None:
    temporary = temporary_path(path)
    try:
        try:
            file = create(temporary)
        except FileNotFoundError:  # creating the folder first would cost a call for every file
            path.parent.mkdir(parents=True, exist_ok=True)
            file = create(temporary)
        with file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
    except (Exception, KeyboardInterrupt):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_while_held(lease: Lease, path: Path, schema: pa.Schema, pieces: Iterable[pa.Table]) -> bool:
    """Write ``pieces`` to a merged file that processes replace in turn, each under ``lease``. Returns False if the
    lease was lost before the new file was in place.

    The new file is removed with a lease that counts as dead. So a process that stood still cannot put it in the place
    of a later one, whose parts are gone.
    """
    temporary = temporary_path(lease.path / path.name)
    try:
        with create(temporary) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for piece in pieces:
                writer.write_table(piece)
                if not lease.held():
                    return False
        if not lease.held():
            return False
        publish(temporary, path)
    except FileNotFoundError:
        if lease.held():
            raise
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def publish(temporary: Path, path: Path) -> None:
    """Flush ``temporary`` to disk, rename it to ``path``, and flush the renaming too."""
    _sync(temporary)
    _replace(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    """Rename a file that is on disk, and flush the renaming."""
    temporary.replace(path)
    with suppress(OSError):  # some filesystems cannot sync a folder
        _sync(path.parent)


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables; a column that a table lacks is null in its rows."""
    return pa.concat_tables(tables, promote_options="permissive")


def nullable(schema: pa.Schema) -> pa.Schema:
    """``schema`` for reading, with every column nullable: an old file may lack a column that is required today."""
    return pa.schema([field.with_nullable(True) for field in schema], metadata=schema.metadata)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
