"""Rows of other sweeps that answer points of a plan (``plan.reuse=true``); the plan's ledger names attempt and
sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from results.errors import InvalidResults
from results.tables import files, store
from results.text.numbers import listed, plural


@dataclass(frozen=True, slots=True)
class Answers:
    """Result of `from_other_sweeps`. ``found`` and ``missing`` have one line for each other sweep."""

    rows: pa.Table | None
    """Attempts with the columns of their own files; None if there are none."""
    folders: tuple[Path, ...]
    found: tuple[str, ...]
    missing: tuple[str, ...]


def from_other_sweeps(ledger: pd.DataFrame, attempts: pd.DataFrame, folders: Sequence[Path]) -> Answers:
    """Attempts that ``ledger`` names as answers and that are not among ``attempts``, the rows of ``folders``.

    The other sweeps are searched for in and below the parents of ``folders``.
    """
    cached = ledger[(ledger["verdict"] == "cached") & ledger["cached_attempt"].notna() & ledger["cached_sweep"].notna()]
    wanted = cached[~cached["cached_attempt"].isin(attempts["attempt_id"])]
    tables, homes, shown, missing = [], [], [], []
    for name, rows in wanted.groupby("cached_sweep"):
        points = plural(len(rows), "point")
        home = _beside(str(name), folders)
        table = None if home is None else _rows(home, list(rows["cached_attempt"]))
        if home is not None and table is not None and table.num_rows:
            tables.append(table)
            homes.append(home)
            shown.append(f"{points} of this plan have run in the sweep {name} ({home}): its rows are shown here.")
        else:
            where = listed(sorted({str(folder.resolve().parent) for folder in folders}))
            missing.append(
                f"{points} of this plan have run in the sweep {name}, whose rows are not below {where}: they are "
                "missing here"
            )
    rows_found = pa.concat_tables(tables, promote_options="permissive") if tables else None
    return Answers(rows_found, tuple(homes), tuple(shown), tuple(missing))


def _beside(name: str, folders: Sequence[Path]) -> Path | None:
    """The sweep of this name in the parent of one of ``folders``, or below it; None if there is none."""
    for parent in dict.fromkeys(folder.resolve().parent for folder in folders):
        if (parent / name / files.MARKER).is_file():
            return parent / name
        for sweep in store.own_sweep_dirs(parent):
            if sweep.name == name:
                return sweep
    return None


def _rows(sweep: Path, attempt_ids: list[str]) -> pa.Table | None:
    try:
        table = store.scan(sweep, "attempts").table
    except InvalidResults:
        return None
    return table.filter(pc.is_in(table["attempt_id"], value_set=pa.array(attempt_ids, pa.string())))
