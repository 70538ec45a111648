"""``diff``: prints how two points differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from results.tables.schema import METHODS
from results.text.numbers import format_bytes
from results.text.terminal import plain_table
from sweep.inspecting.lookup import Record
from sweep.inspecting.measured_values import MEASURED, formatted, named
from workloads.spec.experiment import to_dict


def print_difference(first: Record, second: Record, console: Console) -> None:
    """Print a table of the two: fields that differ, predictions, and the newest attempt of each.

    Finished attempts obtained by the same method are preferred.
    """
    table = plain_table()
    table.add_column("")
    table.add_column(first.id, overflow="fold")
    table.add_column(second.id, overflow="fold")
    left, right = _flat(to_dict(first.experiment)), _flat(to_dict(second.experiment))
    for key in [key for key in {**left, **right} if left.get(key) != right.get(key)]:
        table.add_row(key, str(left.get(key)), str(right.get(key)))
    if not table.row_count:
        console.print("the same experiment")
        return
    derived = (
        ("world_size", first.experiment.world_size, second.experiment.world_size),
        ("num_microbatches", first.experiment.num_microbatches, second.experiment.num_microbatches),
        ("predicted peak", *(_peak(record) for record in (first, second))),
        ("predicted step", *(_predicted_step(record) for record in (first, second))),
    )
    for name, a, b in derived:
        if a != b:
            table.add_row(name, str(a), str(b))
    rows = _compared(first, second)
    if any(row is not None and row["method"] != "measured" for row in rows):
        table.add_row("method", *(row["method"] if row is not None else "" for row in rows))
    for name, column, factor, form in MEASURED:
        values = [formatted(row, column, factor, form) for row in rows]
        if any(values):
            table.add_row(named(name, rows[0] or rows[1]), *values)
    console.print(table)


def _compared(first: Record, second: Record) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The newest attempt of each, obtained by the same method if possible."""
    for outcome in ("ok", None):
        for method in METHODS:
            pair = _newest(first, method, outcome), _newest(second, method, outcome)
            if all(pair):
                return pair
    left, right = (
        next(filter(None, (_newest(record, method, outcome) for outcome in ("ok", None) for method in METHODS)), None)
        for record in (first, second)
    )
    return left, right


def _newest(record: Record, method: str, outcome: str | None) -> Mapping[str, Any] | None:
    """The newest attempt of one method with this outcome; None: any outcome."""
    rows = (row for row in reversed(record.attempts) if row["method"] == method and outcome in (None, row["outcome"]))
    return next(rows, None)


def _peak(record: Record) -> str:
    peaks = {row["predicted_peak_bytes"] for row in record.ledger if row["predicted_peak_bytes"]}
    return format_bytes(max(peaks), 2) if peaks else ""


def _predicted_step(record: Record) -> str:
    times = [row["predicted_step_time_s"] for row in record.ledger if row["predicted_step_time_s"]]
    return f"{times[-1] * 1e3:,.1f} ms" if times else ""


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
