"""The measured values of an attempt that ``explain`` and ``diff`` print, with their names and units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results.text.numbers import device_noun, format_bytes

MEASURED = (
    ("outcome", "", 1.0, "s"),
    ("step time", "step_time_s", 1e3, ",.1f ms"),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", 1.0, ",.0f"),
    ("MFU (PaLM)", "mfu_palm", 100.0, ".1f %"),
    ("peak allocated", "peak_allocated_bytes", 1.0, "bytes"),
    ("peak reserved", "peak_reserved_bytes", 1.0, "bytes"),
)
"""Values shown for an attempt: name, column (empty: the outcome), factor to the unit shown, and format."""


def named(name: str, row: Mapping[str, Any] | None) -> str:
    """The name of a value, with GPUs replaced by the noun for the row's devices."""
    return name.replace("GPU", device_noun(row["backend"] if row is not None else None))


def formatted(row: Mapping[str, Any] | None, column: str, factor: float, form: str) -> str:
    if row is None:
        return ""
    if not column:
        return str(row["outcome"])
    value = row[column]
    if value is not None and form == "bytes":
        return format_bytes(value, 2)
    number, _, unit = form.partition(" ")
    return f"{value * factor:{number}} {unit}".strip() if value is not None else ""
