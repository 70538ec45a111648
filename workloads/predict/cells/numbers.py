"""Numbers in the cells of a table of `workloads.predict.table`."""

from __future__ import annotations

import math
from typing import Any

from workloads.predict.cells.words import Refused, text_of
from workloads.predict.experts.columns import EXPERT_COLUMNS
from workloads.spec.checks import MOST, shown


def count_of(name: str, value: Any) -> float | None:
    """The number in a cell; None if it is empty, or 0 where that says no more. Raises `Refused` for anything but a
    count, and for 0 of what every row has."""
    text = text_of(value)
    if not text:
        return None
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        raise Refused(f"{name} = {shown(text)} is not a number") from None
    if not math.isfinite(number) or number < 0 or (number != round(number) and name not in ("mbs", "ffn", "vocab")):
        raise Refused(f"{name} = {number:g} is not a whole number above 0")
    if number > MOST:
        raise Refused(f"{name} = {number:g} is above {MOST:,}")
    if number == 0:
        if name in ("shared_experts", "dense_layers"):
            return 0.0
        if name in ("vpp", "cp", "ep", "tp", "pp", "kv_heads", "head_dim", *EXPERT_COLUMNS):
            return None
        raise Refused(f"{name} = 0")
    return number


def positive_of(name: str, value: Any, note: list[str]) -> float:
    """``value`` as a positive number; NaN, with a note, if it is none."""
    text = text_of(value)
    try:
        number = float(text.replace(",", "")) if text else math.nan
    except ValueError:
        number = -1.0
    if math.isnan(number) or 0 < number < math.inf:
        return number
    note.append(f"{name} = {text!r} is not a number above 0: ignored")
    return math.nan


def not_missing(value: float | None) -> float:
    """A number that is not missing by now."""
    assert value is not None
    return value
