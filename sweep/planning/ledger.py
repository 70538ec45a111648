"""The plan as rows of the ledger table (`results.tables.schema.LEDGER`), and writing it to a separate file."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results.shared_filesystem.whole_files import output_file
from results.tables.store import RUN_WORDS
from sweep.grids.columns import PREDICTED
from sweep.planning.earlier_peaks import MEMORY_MODEL, memory_model
from sweep.planning.plan import Plan
from workloads.spec.errors import InvalidSweep
from workloads.spec.record import config_columns

SUFFIXES = (".parquet", ".csv")
"""File endings that ``plan --out`` accepts."""


def ledger_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each point, numbered in plan order. Values that were not predicted are None."""
    rows = []
    for number, point in enumerate(plan.points):
        rows.append(
            {
                "sweep": plan.config.name,
                "grid": point.grid,
                "point": number,
                "verdict": point.verdict,
                "rule": point.rule,
                "detail": point.detail,
                **{name: value(point) for name, value in PREDICTED.items()},
                "predicted_with": plan.predicted_with if point.time is not None and plan.predicted_with else None,
                "cached_attempt": point.cached_attempt,
                "cached_sweep": point.cached_sweep,
                **config_columns(point.experiment),
            }
        )
    return rows


def origin_of(plan: Plan) -> dict[str, str]:
    """What `ledger_rows` makes its rows from, as digests, which take far less time than the rows."""
    parts = [
        (
            point.grid,
            point.experiment.model.name,
            point.experiment.id,
            point.verdict,
            point.rule,
            point.detail,
            [value(point) for value in PREDICTED.values()],
            point.cached_attempt,
            point.cached_sweep,
        )
        for point in plan.points
    ]
    digest = hashlib.sha256(repr((plan.config.name, plan.predicted_with, parts)).encode()).hexdigest()
    return {"plan": digest, MEMORY_MODEL: memory_model(plan.config.cluster)}


def check_ledger_path(path: Path) -> None:
    """Raises `InvalidSweep` if ``path`` has another ending or its folder does not exist."""
    if path.suffix not in SUFFIXES:
        names = " or ".join(str(path.with_suffix(suffix)) for suffix in SUFFIXES) if path.name else "plan.parquet"
        raise InvalidSweep(f"--out {path}: the ledger is a Parquet or a CSV file; name it {names}")
    if not path.parent.is_dir():
        raise InvalidSweep(f"--out {path}: there is no folder {path.parent}")


def write_ledger_file(path: Path, plan: Plan, words: Sequence[str] = ()) -> None:
    """Write the ledger, every point of the plan, as Parquet or CSV according to the ending of ``path``.

    ``words``: arguments after ``run`` of the command that runs this plan, which the Parquet file keeps in its metadata.

    The Parquet file has the schema of a sweep's ``ledger.parquet``, `results.tables.schema.LEDGER`. In CSV an unknown
    value is an empty cell. Raises `InvalidSweep` if the file cannot be written.
    """
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    from results.tables.rows import table_from_rows
    from results.tables.schema import LEDGER

    check_ledger_path(path)
    table = table_from_rows(ledger_rows(plan), LEDGER)
    if words:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), RUN_WORDS: shlex.join(words)})
    try:
        with output_file(path) as file:
            if path.suffix == ".csv":
                pc.write_csv(table, file)
            else:
                pq.write_table(table, file, compression="zstd")
    except OSError as error:
        raise InvalidSweep(f"--out {path}: {error.strerror or error}") from None
