"""JSON documents that commands print with ``--json``: named, with a version, and null for whatever is unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

_NULLS = ("<NA>", "NaT")
"""Of pandas, which this room does not import."""


def json_document(name: str, version: int, fields: Mapping[str, Any]) -> str:
    """The text of one document; ``schema`` and ``schema_version`` are its first fields.

    NaN, infinity and pandas' nulls become null, points in time seconds since 1970 (UTC), numbers of numpy plain
    numbers.
    """
    head = {"schema": f"ultrasweep.{name}/{version}", "schema_version": version}
    return json.dumps(plain({**head, **fields}), indent=2, allow_nan=False, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value of rows and dataclasses as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if hasattr(value, "tolist"):  # an array or a scalar of numpy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if str(value) in _NULLS:
        return None
    assert isinstance(value, datetime), f"{value!r} has no form in JSON"
    return value.timestamp()
