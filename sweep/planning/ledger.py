"""The plan as rows of the ledger table (`results.tables.schema.LEDGER`), and the ledger as a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweep.grids.columns import PREDICTED
from sweep.planning.plan import Plan
from workloads.spec.errors import InvalidSweep
from workloads.spec.record import config_columns

SUFFIXES = (".parquet", ".csv")
"""What a ledger written by ``plan --out`` may end in."""


def ledger_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each point, numbered in the order of the plan. Values that were not predicted are None."""
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


def check_ledger_path(path: Path) -> None:
    """Raises `InvalidSweep` for a name or a place that `write_ledger_file` cannot write to."""
    if path.suffix not in SUFFIXES:
        names = " or ".join(str(path.with_suffix(suffix)) for suffix in SUFFIXES) if path.name else "plan.parquet"
        raise InvalidSweep(f"--out {path}: the ledger is a Parquet or a CSV file; name it {names}")
    if not path.parent.is_dir():
        raise InvalidSweep(f"--out {path}: there is no folder {path.parent}")


def write_ledger_file(path: Path, plan: Plan) -> None:
    """Write the ledger, every point of the plan, as Parquet or as CSV by the ending of ``path``.

    A Parquet file is what a sweep's own ``ledger.parquet`` is: the schema `results.tables.schema.LEDGER`. In CSV an
    unknown value is an empty cell. Raises `InvalidSweep` when that place cannot be written.
    """
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    from results.tables.rows import table_from_rows
    from results.tables.schema import LEDGER

    check_ledger_path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        table = table_from_rows(ledger_rows(plan), LEDGER)
        if path.suffix == ".csv":
            pc.write_csv(table, temporary)
        else:
            pq.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidSweep(f"--out {path}: {error.strerror or error}") from None
