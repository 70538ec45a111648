"""Addresses of the traces of profiled steps, relative to the page that links to them."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from results.errors import InvalidResults
from results.tables import store


def links(path: Path, frame: pd.DataFrame, page_folder: Path) -> dict[int, str]:
    """Relative addresses of the traces of ``frame``'s rows (by position), for traces that still exist next to the
    results.

    ``path`` is where the rows were read from: a sweep or a folder of sweeps. Rows of a single file have no traces. Only
    files inside their sweep are linked.
    """
    if frame.empty or "trace_file" not in frame or not path.is_dir():
        return {}
    try:
        sweeps = {folder.resolve().name: folder.resolve() for folder in store.sweep_dirs(path)}
    except InvalidResults:
        return {}
    here = page_folder.resolve()
    address_of_row: dict[int, str] = {}
    named = frame["trace_file"].notna().to_numpy().nonzero()[0].tolist()
    names, files = frame["sweep"].to_list(), frame["trace_file"].to_list()
    for position in named:
        sweep = sweeps.get(names[position])
        if sweep is None:
            continue
        trace = (sweep / str(files[position])).resolve()
        if trace.is_relative_to(sweep) and trace.is_file():
            address_of_row[position] = quote(Path(os.path.relpath(trace, here)).as_posix())
    return address_of_row
