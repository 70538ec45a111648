"""CSV files have the bytes of pandas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.page import csv_file

COLUMNS = {
    "float": [1.0, np.nan, 1e-7, 1e22, np.inf, -0.0, 0.1, 0.0],
    "int": range(8),
    "flag": [True, False] * 4,
    "text": pd.Series(["x", None, 'a "quote"', "a,b", "two\nlines", "", "a\rb", "é"], dtype="str"),
    "any, with a comma": [1, True, 1.0, None, [1, 2], np.array([1.5]), float("nan"), "a,b"],
    "count": pd.array([1, None, 3, 1] * 2, dtype="Int64"),
    "gaps": pd.array([True, None, False, True] * 2, dtype="boolean"),
    "time": pd.to_datetime(["2025-01-01T00:00:00Z", None, "2025-01-01T00:00:00.25Z", None] * 2, format="ISO8601"),
    "day": pd.to_datetime(["2025-01-01"] * 8),
    "short": np.array([0.1] * 8, dtype="float32"),
}


@pytest.mark.parametrize("names", [list(COLUMNS), ["day", "time"], ["float"], ["text"]])
@pytest.mark.parametrize("rows", [8, 1, 0])
def test_files_are_those_of_pandas(tmp_path: Path, names: list[str], rows: int) -> None:
    frame = pd.DataFrame({name: COLUMNS[name] for name in names}).head(rows)
    csv_file.write(frame, tmp_path / "table.csv")
    frame.to_csv(tmp_path / "theirs.csv", index=False)
    assert (tmp_path / "table.csv").read_bytes() == (tmp_path / "theirs.csv").read_bytes()


def test_rows_of_several_chunks_and_equal_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "_CHUNK", 3)
    frame = pd.DataFrame([[row, row / 3, "x"] for row in range(8)], columns=["a", "a", "b"])
    csv_file.write(frame, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == frame.to_csv(index=False)
