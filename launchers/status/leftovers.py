"""Tidies the folder of a finished sweep after killed processes: temporary files, parts of tables, loose attempts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from launchers.attempt.packing import pack_attempt
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import SweepStatus
from results.errors import InvalidResults
from results.shared_filesystem.lease import filesystem_time
from results.tables import files, store

LEAST_AGE_S = 10.0
"""A younger file may be in the hands of a process that still writes it."""
_MOST_PACKED = 1_000
"""Number of loose attempts that one call packs. A sweep of an earlier version may have thousands."""
_TEMPORARY = re.compile(
    r"\..+\.[0-9a-f]{16}\.tmp|\..+\.[0-9]+\.[0-9a-f]{6}\.tmp|\.clock\.[0-9a-f]{32}|\.[0-9a-f]{16}\.[0-9a-f]{8}|.+\.[0-9]+\.[0-9a-f]{32}"
)
"""Names that writers of JSON, tables, clocks, copies of the code and leases use before they rename."""


def remove_leftovers(sweep: SweepDir, status: SweepStatus, report: Callable[[str], None]) -> None:
    """Merge the parts of the tables, pack recorded attempts and remove temporary files, if no point and no pilot is
    left.

    ``report`` takes a line for the user. An error of the file system ends the work: what is left disturbs nobody.
    """
    if status.left or status.pilots:
        return
    with contextlib.suppress(OSError):
        if any(files.part_paths(sweep.path, table) for table in files.SCHEMAS):
            try:
                store.compact(sweep.path)
            except InvalidResults as error:
                report(f"the tables are not compacted (nothing is lost): {error}")
        recorded = {record.attempt_id for record in status.attempts}
        for folder in [folder for folder in _loose(sweep) if folder.name in recorded][:_MOST_PACKED]:
            pack_attempt(folder)
        now = filesystem_time(sweep.path)
        for entry in _temporaries(sweep, status):
            if now - entry.stat(follow_symlinks=False).st_mtime < LEAST_AGE_S:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


def _temporaries(sweep: SweepDir, status: SweepStatus) -> Iterator[os.DirEntry[str]]:
    for folder in _folders(sweep, status):
        if folder.is_symlink():
            continue
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            yield from [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]


def _folders(sweep: SweepDir, status: SweepStatus) -> Iterator[Path]:
    """Folders in which files are written. Of the attempts only those that did not succeed, since a sweep may have
    thousands."""
    queue = sweep.todo.parent
    yield from (sweep.path, queue, sweep.todo, sweep.claimed, sweep.done, sweep.history, sweep.pilots)
    yield from (sweep.stages, sweep.losses, *(sweep.path / name for name in ("code", "nodes", "submissions")))
    yield from (sweep.path / "parts" / table for table in files.SCHEMAS)
    good = {record.attempt_id for record in status.attempts if record.outcome == "ok"}
    yield sweep.attempts
    yield from (folder for folder in _loose(sweep) if folder.name not in good)


def _loose(sweep: SweepDir) -> list[Path]:
    """Folders of attempts that are not packed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(sweep.attempts) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
