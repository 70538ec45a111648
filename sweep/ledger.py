"""The plan as rows of the ledger table (`results.schema.LEDGER`), and the ledger as a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweep.plan import Plan
from workloads.errors import InvalidSweep
from workloads.record import config_columns


def ledger_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each point, numbered in the order of the plan. Values that were not predicted are None."""
    limit = plan.config.cluster.usable_bytes
    rows = []
    for number, point in enumerate(plan.points):
        cost = point.price
        rows.append(
            {
                "sweep": plan.config.name,
                "grid": point.grid,
                "point": number,
                "verdict": point.verdict,
                "rule": point.rule,
                "detail": point.detail,
                "predicted_peak_bytes": point.peak_bytes,
                "limit_bytes": limit,
                "predicted_step_time_s": point.time.step_time_s if point.time is not None else None,
                "predicted_tokens_per_s_per_gpu": point.tokens_per_s_per_gpu,
                "expected_gpu_hours": cost.expected_h if cost is not None else None,
                "worst_gpu_hours": cost.worst_h if cost is not None else None,
                "cached_attempt": point.cached_attempt,
                "cached_sweep": point.cached_sweep,
                **config_columns(point.experiment),
            }
        )
    return rows


def write_ledger_file(path: Path, plan: Plan) -> None:
    """Write the ledger to ``path`` (Parquet). Raises `InvalidSweep` when that place cannot be written."""
    import pyarrow.parquet as pq

    from results.rows import table_from_rows
    from results.schema import LEDGER

    if path.suffix != ".parquet":
        raise InvalidSweep(f"--out {path}: the ledger is a Parquet file; name it {path.with_suffix('.parquet')}")
    if not path.parent.is_dir():
        raise InvalidSweep(f"--out {path}: there is no folder {path.parent}")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table_from_rows(ledger_rows(plan), LEDGER), temporary, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidSweep(f"--out {path}: {error.strerror or error}") from None
