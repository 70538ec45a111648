"""The tables of a sweep on disk: one file for each attempt, merged from time to time.

<sweep>/parts/attempts/<attempt_id>.parquet     one attempt each; any number of pilots may write at once
        parts/steps/<attempt_id>.parquet
        attempts.parquet  steps.parquet         the parts that `compact` has merged
        ledger.parquet                          every grid point with its verdict

An attempt may be in a part, in the merged file, or (after a killed compaction) in both: readers count it once. A file
that cannot be read is skipped with one warning. A folder is a sweep if it has a sweep.json.

Sweeps that came with the program are below a folder with a file SHIPPED (``results/recorded``). Readers of a folder
above it get the user's sweeps, or the shipped ones if there are no others. Readers of that folder, or of one of its
sweeps, get the shipped sweeps.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from results.errors import InvalidResults
from results.tables import files
from results.tables.compaction import compact
from results.tables.files import Table
from results.tables.limits import most_bytes
from results.tables.odd_rows import without_odd_rows
from results.tables.rows import conform, table_from_rows
from results.tables.schema import ATTEMPTS, LEDGER, STEPS
from results.text.numbers import format_bytes

__all__ = [
    "Reading",
    "compact",
    "empty_ledger",
    "find_attempt",
    "is_shipped",
    "ledger_is_of",
    "only_shipped",
    "own_sweep_dirs",
    "read_attempts",
    "read_ledger",
    "read_runs",
    "read_steps",
    "runs_of",
    "scan",
    "shipped_sweep_dirs",
    "sweep_dirs",
    "write_attempt",
    "write_ledger",
    "write_steps",
]
RUN_WORDS = b"ultrasweep.run"
"""Key of a plan file's metadata: the arguments of the command that runs the plan, as one line for a shell."""
_MAX_DEPTH = 5
"""Largest depth of a sweep below the given folder."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """A table, and one line for each file that could not be read into it."""

    table: pa.Table
    problems: tuple[str, ...]


def write_attempt(sweep_dir: Path, attempt: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Path:
    """Stores one attempt and its steps; returns the path of the attempt's part.

    Raises `InvalidResults` with the column and the value before anything is written. The steps are written first, so
    that a reader who sees the attempt finds its steps.
    """
    sweep_dir = Path(sweep_dir)
    attempt_rows = table_from_rows([attempt], ATTEMPTS)
    attempt_id = attempt["attempt_id"]
    if not attempt_id or "/" in attempt_id or attempt_id.startswith("."):
        raise InvalidResults(f"attempts: column attempt_id={attempt_id!r} cannot name a file")
    if steps:
        write_steps(sweep_dir, attempt_id, steps)
    path = files.part_path(sweep_dir, "attempts", attempt_id)
    files.write_parquet(path, attempt_rows)
    return path


def write_steps(sweep_dir: Path, attempt_id: str, steps: Sequence[Mapping[str, Any]]) -> None:
    """Store the steps of one attempt. Raises `InvalidResults` as `write_attempt` does."""
    rows = table_from_rows(steps, STEPS)
    if stray := {step["attempt_id"] for step in steps} - {attempt_id}:
        raise InvalidResults(f"steps: column attempt_id={min(stray)!r} is not that of the attempt, {attempt_id!r}")
    files.write_parquet(files.part_path(Path(sweep_dir), "steps", attempt_id), rows)


def read_attempts(path: Path) -> pa.Table:
    """Returns the rows of ``attempts`` below ``path``: a sweep, a folder that holds sweeps, or one Parquet file.

    Unknown columns are kept, missing ones are null. Files that cannot be read are skipped with one warning each. Raises
    `InvalidResults` if there is no sweep.
    """
    return _warned(scan(path, "attempts"))


def read_runs(path: Path) -> pa.Table:
    """As `read_attempts`, for programs that compute with the rows: rows and values that no run can have
    (`results.tables.odd_rows`) are left out, with a warning each."""
    return runs_of(read_attempts(path), path)


def runs_of(attempts: pa.Table, path: Path) -> pa.Table:
    """As `read_runs`, for some columns of attempts that were read from ``path``; ``attempt_id`` must be one of them."""
    rows, problems = without_odd_rows(attempts)
    for problem in problems:
        _log.warning("%s: %s", path, problem)
    return rows


def find_attempt(sweep_dir: Path, attempt_id: str) -> dict[str, Any] | None:
    """Returns the row of one attempt of a sweep; None if there is none, or only a damaged one. Raises `OSError` if it
    cannot be read now."""
    for path in (files.part_path(sweep_dir, "attempts", attempt_id), files.compacted_path(sweep_dir, "attempts")):
        try:
            rows = files.read_file(path, "attempts")
        except (FileNotFoundError, InvalidResults):
            continue
        for row in rows.filter(pc.equal(rows["attempt_id"], attempt_id)).to_pylist():
            return dict(row)
    return None


def read_steps(path: Path) -> pa.Table:
    """Returns the rows of ``steps`` below ``path``, like `read_attempts`."""
    return _warned(scan(path, "steps"))


def scan(path: Path, table: Table) -> Reading:
    """As `read_attempts` or `read_steps`, but returns the warnings instead of logging them."""
    path = Path(path)
    if path.is_file():
        return Reading(files.read_file(path.resolve(), table), ())
    problems: list[str] = []
    schema = files.nullable(files.SCHEMAS[table])
    seen: set[str] = set()
    pieces: list[pa.Table] = []
    held = 0
    for file in _table_files(path, table):
        rows = files.read_or_report(file, table, problems)
        if rows is None:
            continue
        try:
            schema = pa.unify_schemas([schema, rows.schema], promote_options="permissive")
        except pa.ArrowException as error:
            problems.append(files.unreadable(file, error))
            continue
        ids = set(rows["attempt_id"].to_pylist())
        held += rows.nbytes
        if held > most_bytes():
            problems.append(f"{file} is left out: the rows before it already take {format_bytes(held - rows.nbytes)}")
            held -= rows.nbytes
            continue
        if repeated := ids & seen:
            in_both = pc.is_in(rows["attempt_id"], value_set=pa.array(list(repeated), pa.string()))
            rows = rows.filter(pc.invert(in_both))
        seen |= ids
        pieces.append(rows)
    return Reading(files.concat([schema.empty_table(), *pieces]), tuple(problems))


def sweep_dirs(path: Path) -> list[Path]:
    """Returns ``path`` if it is a sweep, else every sweep below it, sorted: the user's sweeps, or the shipped ones if
    there are no others (then `only_shipped` is true). Raises `InvalidResults` if there is no sweep."""
    path = Path(path)
    if not path.exists():
        raise InvalidResults(f"{path} does not exist")
    user_sweeps, shipped = _find_sweeps(path)
    if not user_sweeps and not shipped:
        raise InvalidResults(f"{path} holds no sweep: no folder in it has a {files.MARKER}")
    return user_sweeps or shipped


def own_sweep_dirs(path: Path) -> list[Path]:
    """As `sweep_dirs`, but without shipped sweeps; empty if there is none or ``path`` does not exist."""
    return _find_sweeps(Path(path))[0]


def shipped_sweep_dirs(path: Path) -> list[Path]:
    """The sweeps below ``path`` that came with the program; empty if ``path`` is the folder of shipped sweeps or inside
    it (see `only_shipped`)."""
    return _find_sweeps(Path(path))[1]


def only_shipped(path: Path) -> bool:
    """Whether ``path`` holds only shipped sweeps, so that readers of ``path`` show those. False if ``path`` is the
    folder of shipped sweeps or inside it: then the user has asked for them."""
    user_sweeps, shipped = _find_sweeps(Path(path))
    return bool(shipped) and not user_sweeps


def is_shipped(path: Path) -> bool:
    """Whether ``path`` is the folder of shipped sweeps, or lies in it."""
    path = Path(path).resolve()
    return any((folder / files.SHIPPED_MARKER).is_file() for folder in (path, *path.parents))


def write_ledger(sweep_dir: Path, rows: Sequence[Mapping[str, Any]], about: Mapping[str, str] | None = None) -> Path:
    """Replaces the ledger of a sweep by ``rows``, one for each grid point; returns the file's path. ``about``: what the
    rows are made from (`ledger_is_of`), kept in the file's metadata."""
    path = Path(sweep_dir) / "ledger.parquet"
    table = table_from_rows(rows, LEDGER)
    kept = {name.encode(): value.encode() for name, value in (about or {}).items()}
    files.write_parquet(path, table.replace_schema_metadata({**(LEDGER.metadata or {}), **kept}))
    return path


def ledger_is_of(sweep_dir: Path, about: Mapping[str, str]) -> bool:
    """Whether the sweep has a good ledger with today's columns that was written with the same ``about``."""
    try:
        table = files.read_parquet(Path(sweep_dir) / "ledger.parquet", LEDGER)
    except (OSError, InvalidResults):
        return False
    stored = table.schema.metadata or {}
    same = all(stored.get(name.encode()) == value.encode() for name, value in about.items())
    return same and table.schema.equals(LEDGER)


def read_ledger(path: Path) -> pa.Table:
    """Returns the rows of every ledger below ``path`` (or of one Parquet file); empty if the sweeps have none."""
    path = Path(path)
    if path.is_file():
        return conform(files.read_parquet(path.resolve(), LEDGER), LEDGER)
    tables = [empty_ledger()]
    for sweep in sweep_dirs(path):
        try:
            tables.append(conform(files.read_parquet(sweep / "ledger.parquet", LEDGER), LEDGER))
        except FileNotFoundError:
            continue
        except (InvalidResults, OSError) as error:
            _log.warning("%s", error)
    return files.concat(tables)


def empty_ledger() -> pa.Table:
    return files.nullable(LEDGER).empty_table()


def _table_files(path: Path, table: Table) -> Iterator[Path]:
    """Yields the files of one table, each when it is needed.

    Parts come before the merged file. A compaction removes a part only after its rows are in that file, so a reader
    that misses a part finds its rows in the merged file, which it opens later.
    """
    for sweep in sweep_dirs(path):
        yield from files.part_paths(sweep, table)
        yield files.compacted_path(sweep, table)


def _warned(reading: Reading) -> pa.Table:
    for problem in reading.problems:
        _log.warning("%s", problem)
    return reading.table


def _find_sweeps(path: Path) -> tuple[list[Path], list[Path]]:
    """Returns the user's sweeps at and below ``path``, and the shipped ones, both sorted. A folder that several links
    lead to counts once."""
    user_sweeps: list[Path] = []
    shipped: list[Path] = []
    visited: set[tuple[int, int]] = set()
    # Folders without links come first, then by depth, so that no link hides a folder or cuts off what is below it.
    waiting: list[tuple[bool, int, Path, bool]] = [(False, 0, path, False)] if path.is_dir() else []
    while waiting:
        linked, depth, folder, is_shipped = heapq.heappop(waiting)
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            is_shipped = is_shipped or (folder != path and (folder / files.SHIPPED_MARKER).is_file())
            if (folder / files.MARKER).is_file():
                (shipped if is_shipped else user_sweeps).append(folder)
            elif depth < _MAX_DEPTH:
                for child in folder.iterdir():
                    if not child.name.startswith(".") and child.is_dir():
                        heapq.heappush(waiting, (linked or child.is_symlink(), depth + 1, child, is_shipped))
        except OSError:  # not readable, or removed meanwhile
            continue
    return sorted(user_sweeps), sorted(shipped)
