"""JSON documents of commands: strict JSON, whatever tables hold."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from results.text.json_document import json_document, plain


def test_what_is_unknown_is_null() -> None:
    unknown = (None, float("nan"), float("inf"), np.float64("nan"), pd.NA, pd.NaT)
    assert [plain(value) for value in unknown] == [None] * len(unknown)


def test_values_of_tables_become_plain() -> None:
    given = {"n": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "l": np.array([1.0, np.nan]), "t": (1, "a")}
    given |= {"p": Path("a/b"), "d": datetime(2026, 1, 2, tzinfo=UTC), "s": pd.Timestamp("2026-01-02", tz="UTC")}
    read = json.loads(json_document("some", 2, {"x": given}))
    assert (read["schema"], read["schema_version"]) == ("ultrasweep.some/2", 2)
    at = datetime(2026, 1, 2, tzinfo=UTC).timestamp()
    plain_values = {"n": 3, "f": 0.5, "b": True, "l": [1.0, None], "t": [1, "a"], "p": "a/b", "d": at, "s": at}
    assert read["x"] == plain_values


def test_a_value_without_a_form_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="has no form in JSON"):
        plain({"x": object()})
