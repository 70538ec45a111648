"""The last lines of the rank that failed, for each failed attempt whose log still lies beside the results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from results.errors import InvalidResults
from results.tables import store
from results.text.log_tail import read_tail

LINES = 15
MOST_BYTES = 1_000_000
"""Of all tails together: a page with logs of thousands of failures would not open."""
_LINE_CHARACTERS = 400
_UNFAILED = ("ok", "cancelled")


def tails(path: Path, frame: pd.DataFrame) -> dict[int, dict[str, str]]:
    """For the rows of ``frame`` (by position) that failed and have a log: its ``name`` and its last `LINES` lines.

    ``path`` is what the rows were read from: a sweep or a folder of sweeps. Rows of a single file have no logs.
    The first rows get theirs until `MOST_BYTES` are full.
    """
    if frame.empty or "outcome" not in frame or not path.is_dir():
        return {}
    try:
        folders = {folder.resolve().name: folder.resolve() for folder in store.sweep_dirs(path)}
    except InvalidResults:
        return {}
    wanted = ~frame["outcome"].isin(_UNFAILED) & frame["log_dir"].notna()
    columns = frame.loc[wanted, ["sweep", "log_dir", "failed_rank"]]
    renamed = [folder for name, folder in folders.items() if name not in set(frame["sweep"].dropna())]
    positions = wanted.to_numpy().nonzero()[0].tolist()
    found: dict[int, dict[str, str]] = {}
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
        found[position] = {"name": f"{sweep}/{log_dir}/{log.name}", "text": text}
    return found


def _log(sweep: Path, log_dir: str, rank: int | None) -> Path | None:
    """The log of the rank that failed; of the first rank that wrote anything where it is not known which failed."""
    folder = (sweep / log_dir).resolve()
    if not folder.is_relative_to(sweep) or not folder.is_dir():
        return None
    logs = {
        int(number): log
        for log in folder.glob("rank_*.log")
        if (number := log.stem.removeprefix("rank_")).isdecimal() and log.is_file()
    }
    if rank is not None:
        return logs.get(rank)
    return next((log for _, log in sorted(logs.items()) if log.stat().st_size), None)


def _tail(log: Path) -> str:
    try:
        return "\n".join(line[:_LINE_CHARACTERS] for line in read_tail(log, LINES).lines)
    except OSError:
        return ""
