"""The last log lines of the failed rank, for each failed attempt whose log still exists next to the results."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from results.errors import InvalidResults
from results.shared_filesystem import packed_folder
from results.tables import store
from results.text.log_tail import read_tail

LINES = 15
MOST_BYTES = 1_000_000
"""Limit for all tails together: a page with logs of thousands of failures would not open."""
_LINE_CHARACTERS = 400
_UNFAILED = ("ok", "cancelled")


def tails(path: Path, frame: pd.DataFrame) -> dict[int, dict[str, str]]:
    """Log ``name`` and last `LINES` lines, for the rows of ``frame`` (by position) that failed and have a log.

    ``path`` is where the rows were read from: a sweep or a folder of sweeps. Rows of a single file have no logs. Rows
    are served in order until `MOST_BYTES` are used.
    """
    if frame.empty or "outcome" not in frame or not path.is_dir():
        return {}
    try:
        folders = {folder.resolve().name: folder.resolve() for folder in store.sweep_dirs(path)}
    except InvalidResults:
        return {}
    wanted = ~frame["outcome"].isin(_UNFAILED) & frame["log_dir"].notna()
    columns = frame.loc[wanted, ["sweep", "log_dir", "failed_rank"]]
    renamed = [folder for name, folder in folders.items() if name not in set(frame["sweep"].dropna().unique())]
    positions = wanted.to_numpy().nonzero()[0].tolist()
    tail_of_row: dict[int, dict[str, str]] = {}
    left = MOST_BYTES
    for position, (sweep, log_dir, rank) in zip(positions, columns.itertuples(index=False), strict=True):
        homes = [folders[sweep]] if sweep in folders else renamed
        logs = (_log(home, str(log_dir), None if pd.isna(rank) else int(rank)) for home in homes)
        log = next((found_log for found_log in logs if found_log is not None), None)
        text = _tail(log) if log is not None else ""
        if log is None or not text:
            continue
        left -= len(text)
        if left < 0:
            break
        tail_of_row[position] = {"name": f"{sweep}/{log_dir}/{log.name}", "text": text}
    return tail_of_row


def _log(sweep: Path, log_dir: str, rank: int | None) -> Path | None:
    """Log of the failed rank; if that rank is unknown, of the first rank whose log is not empty."""
    folder = (sweep / log_dir).resolve()
    if not folder.is_relative_to(sweep):
        return None
    try:
        sizes = packed_folder.sizes(folder)
    except (OSError, ValueError):
        return None
    logs = {
        int(found[1]): (folder / name, size)
        for name, size in sizes.items()
        if (found := re.fullmatch(r"rank_(\d+)\.log", name))
    }
    if rank is not None:
        return logs[rank][0] if rank in logs else None
    return next((log for _, (log, size) in sorted(logs.items()) if size), None)


def _tail(log: Path) -> str:
    try:
        return "\n".join(line[:_LINE_CHARACTERS] for line in read_tail(log, LINES).lines)
    except OSError:
        return ""
