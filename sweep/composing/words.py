"""Python values as overrides of the command line: ``word("grid.axes.tp", [1, 2])`` is ``grid.axes.tp=[1,2]``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from sweep.composing.composition import quoted
from workloads.spec.errors import InvalidSweep

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*")
"""Texts that Hydra's grammar reads as themselves, except for `_OTHERS`."""
_OTHERS = ("null", "true", "false", "inf", "nan")


def word(name: str, value: object) -> str:
    """One override. Raises `InvalidSweep` for a value that no option takes, such as a function."""
    return f"{name}={_text(name, value)}"


def _text(name: str, value: object) -> str:
    value = value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value  # a scalar of numpy
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Path):
        return _text(name, str(value) if "/" in str(value) else f"./{value}")
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _OTHERS else quoted(value)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(name, one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(_text(name, one) for one in value) + "]"
    raise InvalidSweep(f"{name}={value!r}: give a number, a text, true or false, None, or a list of these")
