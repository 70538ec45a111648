"""Finds the processes of ranks on this machine: the standard output of each is its log."""

from __future__ import annotations

import re
from pathlib import Path

_LOG = re.compile(r"rank_(\d+)\.log$")


def rank_pids(folder: Path) -> dict[int, int]:
    """Pid of every rank that runs and writes its log into ``folder`` or, where that is a sweep's folder ``attempts``,
    below it; by rank. Zombies have no output any more."""
    pids = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                output = str((process / "fd" / "1").readlink())
            except OSError:  # it has ended, or is not ours
                continue
            if output.startswith(f"{folder.resolve()}/") and (match := _LOG.search(output)):
                pids[int(match[1])] = int(process.name)
    return pids
