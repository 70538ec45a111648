"""Training curves as a table: one row per step of a run, in one Parquet file written by `python -m
docs.tools.curves`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from results.errors import InvalidResults
from results.tables.files import read_parquet, write_parquet
from results.tables.rows import conform, table_from_rows
from results.tables.schema import Column

_S, _I, _F, _B, _L = pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.float64())
CURVE_COLUMNS: tuple[Column, ...] = (
    Column("run", _S, "Name of the run: model, precision and layout", nullable=False),
    Column("experiment_id", _S, "The experiment that was trained", nullable=False),
    Column("model", _S, "Name of the model shape", nullable=False),
    Column("precision", _S, "Precision of the run", nullable=False),
    Column("layout", _S, "Its layout, by the name that the curves have for it", nullable=False),
    Column("world_size", _I, "Ranks", nullable=False),
    Column("device", _S, "Name of the device of rank 0"),
    Column("torch_version", _S, "Version of torch"),
    Column("git_commit", _S, "Commit of the code; null where files differed from it"),
    Column("step", _I, "Optimizer step, from 0", nullable=False),
    Column("learning_rate", _F, "Of the step's update"),
    Column("loss", _F, "Mean loss of the global batch before the update", "nat/token"),
    Column("grad_norm", _F, "Norm of the whole gradient before clipping; null where it overflowed"),
    Column("loss_scale", _F, "By what the step's gradients were scaled; fp16 only"),
    Column("skipped", _B, "Gradients overflowed, and nothing was updated; fp16 only"),
    Column("load_entropy", _L, "Of each layer that learns to route: entropy of its tokens over the experts, even is 1"),
    Column("load_imbalance", _L, "Of the same layers: tokens of the most loaded expert over the mean"),
    Column("held_out_loss", _F, "Mean loss of the held-out text after the update; of a run's last step", "nat/token"),
)
CURVES = pa.schema([column.field() for column in CURVE_COLUMNS], metadata={"table": "curves"})
KEYS = ("run", "step")


def write_curves(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file by ``rows``, in the order of `CURVE_COLUMNS`. Raises `InvalidResults` on the first bad cell."""
    write_parquet(path, table_from_rows(rows, CURVES))


def read_curves(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. Raises `InvalidResults` if it is missing, damaged, empty or holds something else."""
    try:
        stored = read_parquet(path)
    except FileNotFoundError:
        raise InvalidResults(f"{path}: no such file") from None
    if missing := [name for name in KEYS if name not in stored.column_names]:
        raise InvalidResults(f"{path} is no table of training curves: it has no column {missing[0]}")
    if not stored.num_rows:
        raise InvalidResults(f"{path} has no rows")
    rows: list[dict[str, Any]] = conform(stored, CURVES).to_pylist()
    return rows


def by_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each run in order of steps; runs in the order of the rows."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    for rows_of_run in runs.values():
        rows_of_run.sort(key=lambda row: row["step"])
    return runs
