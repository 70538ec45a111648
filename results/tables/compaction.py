"""Merges the parts of a sweep into one file per table. One process at a time does so; a kill at any moment loses
nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from results.errors import InvalidResults
from results.shared_filesystem.lease import Lease, acquire
from results.shared_filesystem.patience import repeated
from results.shared_filesystem.whole_files import NotAFile, open_regular, path_of
from results.tables import files
from results.tables.files import Table

_LOCK = ".compact.lock"
_STALE_AFTER_S = 120.0
_ROWS_PER_GROUP = 50_000
_log = logging.getLogger(__name__)


def compact(sweep_dir: Path, *, wait_s: float = 10.0) -> bool:
    """Merge the parts into ``attempts.parquet`` and ``steps.parquet``. Returns False if another process is doing so.

    A part is removed only after the file that holds its rows is safe on disk. A part that cannot be read stays, with a
    warning. ``wait_s``: seconds to wait for another process. Raises `InvalidResults` if ``sweep_dir`` is not a sweep,
    or if a merged file is damaged.
    """
    sweep_dir = Path(sweep_dir)
    if not repeated((sweep_dir / files.MARKER).is_file):
        raise InvalidResults(f"{sweep_dir} is not a sweep: it has no {files.MARKER}")
    with acquire(sweep_dir / _LOCK, stale_after_s=_STALE_AFTER_S, wait_s=wait_s) as lease:
        return lease is not None and all(_compact_table(sweep_dir, table, lease) for table in files.SCHEMAS)


def _compact_table(sweep_dir: Path, table: Table, lease: Lease) -> bool:
    """Merge the parts of one table. Returns False if the lease was lost before the new file replaced the old one."""
    target = files.compacted_path(sweep_dir, table)
    before = _inodes(sweep_dir, table)
    old = _open(target)
    try:
        schema = files.nullable(files.SCHEMAS[table])
        if old is not None:
            schema = pa.unify_schemas([schema, files.nullable(old.schema_arrow)], promote_options="permissive")
        parts, fresh = _read_parts(sweep_dir, table, schema)
        if not parts:
            return True
        pieces = _regrouped([*_without(old, fresh["attempt_id"], fresh.schema), fresh])
        if not files.replace_while_held(lease, target, fresh.schema, pieces):
            return False
    except pa.ArrowException as error:
        raise InvalidResults(f"{target} cannot be merged with its parts: {str(error).splitlines()[0]}") from None
    finally:
        if old is not None:
            old.close()
    after = _inodes(sweep_dir, table)
    for part in parts:
        if after.get(part.name) == before.get(part.name):  # otherwise its pilot has written it anew since
            repeated(partial(part.unlink, missing_ok=True))
    return True


def _inodes(sweep_dir: Path, table: Table) -> dict[str, int]:
    """The inode of every part, by name: a part that is written anew is another file."""
    try:
        with os.scandir(files.part_path(sweep_dir, table, "").parent) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _read_parts(sweep_dir: Path, table: Table, schema: pa.Schema) -> tuple[list[Path], pa.Table]:
    """The parts that can be merged, and their rows with every column of ``schema`` and of any part."""
    problems: list[str] = []
    parts: list[Path] = []
    tables: list[pa.Table] = []
    for part in repeated(lambda: files.part_paths(sweep_dir, table)):
        rows = files.read_or_report(part, table, problems)
        if rows is None:
            continue
        if not rows.schema.equals(schema):
            try:
                schema = pa.unify_schemas([schema, rows.schema], promote_options="permissive")
            except pa.ArrowException as error:
                problems.append(files.unreadable(part, error))
                continue
        parts.append(part)
        tables.append(rows)
    for problem in problems:
        _log.warning("%s", problem)
    return parts, files.concat([schema.empty_table(), *tables])


def _open(path: Path) -> Any:
    def opened() -> Any:
        with open_regular(path) as file:
            return pq.ParquetFile(path_of(file))

    try:
        return repeated(opened)
    except FileNotFoundError:
        return None
    except (OSError, NotAFile, pa.ArrowException) as error:
        raise InvalidResults(f"{files.unreadable(path, error)}; move it away and compact again") from None


def _without(old: Any, attempt_ids: pa.ChunkedArray, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yields the rows of the old merged file except those of ``attempt_ids``, in pieces, in the new schema."""
    if old is None:
        return
    for batch in old.iter_batches(batch_size=_ROWS_PER_GROUP):
        piece = pa.Table.from_batches([batch])
        kept = pc.invert(pc.is_in(piece["attempt_id"], value_set=attempt_ids.unique()))
        yield files.concat([schema.empty_table(), piece.filter(kept)])


def _regrouped(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yields the rows in tables of at least `_ROWS_PER_GROUP` rows (except the last), because small row groups are slow
    to read."""
    group: list[pa.Table] = []
    for piece in pieces:
        group.append(piece)
        if sum(table.num_rows for table in group) >= _ROWS_PER_GROUP:
            yield files.concat(group)
            group = []
    if group:
        yield files.concat(group)
