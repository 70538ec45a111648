"""Tables that would take too much memory, each with a small limit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from results.errors import InvalidResults
from results.tables import limits, store
from results.tables.files import read_parquet
from results.tables.schema import ATTEMPTS
from tests.results.helpers import attempt, make_sweep, steps

LIMIT = 2**20
TEXT = "x" * 1000
PACKED = {
    "nulls": pa.nulls(200_000, pa.int64()),
    "numbers": pa.array([7] * 200_000),
    "texts": pa.array([TEXT] * 5_000),
    "lists of numbers": pa.array([[1.0] * 200_000]),
    "lists of texts": pa.array([[TEXT, None]] * 5_000),
    "structs": pa.array([[{"axis": TEXT, "bytes": 1}]] * 5_000),
}


@pytest.mark.parametrize("kind", PACKED)
def test_rows_that_unpack_to_much_more_than_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": PACKED[kind]}), path, compression="zstd")
    assert path.stat().st_size < LIMIT / 100
    with pytest.raises(
        InvalidResults, match=r"t\.parquet has [0-9,]+ rows? that take .* a table may take 1\.0 MiB here"
    ):
        read_parquet(path, most=LIMIT)
    assert read_parquet(path, most=100 * LIMIT).num_rows == len(PACKED[kind])


def test_columns_that_are_added_count(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"attempt_id": pa.array(["a"] * 5_000)}), path)
    assert read_parquet(path, most=LIMIT).num_rows == 5_000
    with pytest.raises(InvalidResults, match="a table may take"):
        read_parquet(path, ATTEMPTS, most=LIMIT)


def test_a_table_of_too_many_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_COLUMNS", 3)
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({name: [1] for name in "abcd"}), path)
    with pytest.raises(InvalidResults, match=r"t\.parquet has 4 columns; a table has at most 3"):
        read_parquet(path)


def test_csv_files_have_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,x\n" * 100)
    monkeypatch.setattr(limits, "_CELLS", 20)
    assert limits.read_csv(path).equals(pd.read_csv(path))
    with pytest.raises(InvalidResults, match=r"t\.csv takes more than the .* of memory that a table may"):
        limits.read_csv(path, most=1024, dtype=str)
    monkeypatch.setattr(limits, "MOST_COLUMNS", 1)
    with pytest.raises(InvalidResults, match=r"t\.csv has 2 columns or more; a table has at most 1"):
        limits.read_csv(path)


def test_a_large_file_costs_a_line_and_the_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (make_sweep(tmp_path / name) for name in ("small", "large"))
    store.write_attempt(small, attempt("a"), steps("a"))
    pq.write_table(pa.table({"attempt_id": ["b"] * 5_000, "evidence": [TEXT] * 5_000}), large / "attempts.parquet")
    monkeypatch.setattr(limits, "most_bytes", lambda: LIMIT)
    reading = store.scan(tmp_path, "attempts")
    assert reading.table["attempt_id"].to_pylist() == ["a"]
    [problem] = reading.problems
    assert problem.startswith(str(large / "attempts.parquet")) and "a table may take 1.0 MiB here" in problem


def test_folders_that_link_to_themselves_are_visited_once(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "deep" / "er" / "sweep")
    for folder in (tmp_path, tmp_path / "deep", tmp_path / "deep" / "er"):
        for number in range(40):  # without a memory, 41 folders to the power of 5
            (folder / f"a{number}").symlink_to(tmp_path)
    (tmp_path / "zzz").symlink_to(sweep)
    assert store.sweep_dirs(tmp_path) == [sweep]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "linked").symlink_to(sweep)
    assert store.sweep_dirs(tmp_path / "results") == [tmp_path / "results" / "linked"]
