"""Packs the folders of recorded attempts, one file each instead of several per rank, and merges their rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from launchers.attempt.attempt import START
from results.errors import InvalidResults
from results.shared_filesystem import packed_folder
from results.tables import files
from results.tables.compaction import compact
from workloads.contract.protocol import TRACE_ENDING


def pack_attempt(folder: Path) -> None:
    """Pack the folder of an attempt whose row and record are written, without traces, which a browser opens.

    An error leaves the folder as it is: readers find its files, and the end of a later ``run`` packs it.
    """
    with suppress(OSError, ValueError):
        packed_folder.pack(folder, START, kept=(TRACE_ENDING,))


class Packer:
    """Packs folders and merges tables, one after another, while the pilot goes on: its next point does not wait for a
    file system."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pack")

    def add(self, folder: Path) -> None:
        self._thread.submit(pack_attempt, folder)

    def add_merge(self, sweep: Path, least: int) -> None:
        """Merge the parts of the sweep's tables when the folders before are packed, if there are ``least`` of them."""
        self._thread.submit(_merge_parts, sweep, least)

    def finish(self) -> None:
        """Wait until every folder is packed. Nothing may be added afterwards."""
        self._thread.shutdown()


def _merge_parts(sweep: Path, least: int) -> None:
    with suppress(OSError, InvalidResults):  # the parts stay readable; the pilot merges them again at its end
        if len(files.part_paths(sweep, "attempts")) >= least:
            compact(sweep, wait_s=0.0)
