"""Rows of every version in one schema: read, exported to one file, and rewritten for other programs."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from results import export, upgrade
from results.tables import files, store
from results.tables.load import load
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS, LEDGER, SCHEMA_VERSION, STEPS
from tests.results.helpers import attempt, make_sweep, steps

RECORDED = Path(store.__file__).parents[1] / "recorded"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep of today and one of schema 3, which has no column ``backend``."""
    today = make_sweep(tmp_path / "results" / "today")
    store.write_attempt(today, attempt("a"), steps("a"))
    store.compact(today)
    store.write_ledger(today, [{"point": 0, "verdict": "run", "experiment_id": "e0"}])
    old = make_sweep(tmp_path / "results" / "old")
    row = attempt("b", schema_version=3, device_name="NVIDIA H200", device_memory_bytes=150 * 10**9)
    table = table_from_rows([row], ATTEMPTS).drop_columns(["backend", "repeat_of", "nodes"])
    pq.write_table(table, old / "attempts.parquet")
    return tmp_path / "results"


def test_any_folder_is_one_table_with_todays_columns(folder: Path) -> None:
    reading = load(folder)
    assert reading.table.schema.names == ATTEMPTS.names
    assert reading.problems == ()
    rows = {row["attempt_id"]: row for row in reading.table.to_pylist()}
    assert sorted(rows) == ["a", "b"]
    assert (rows["b"]["backend"], rows["b"]["nodes"]) == ("cuda", None)  # its device reported memory; nobody kept nodes
    assert (rows["a"]["schema_version"], rows["b"]["schema_version"]) == (SCHEMA_VERSION, 3)  # as they were written
    assert load(folder, "steps").table.schema.names == STEPS.names
    assert load(folder, "ledger").table.schema.names == LEDGER.names


def test_an_interval_that_was_not_recorded_stays_unknown(tmp_path: Path) -> None:
    """Also where the row has its prediction and today's plan would give an interval."""
    old, columns = make_sweep(tmp_path / "old"), ["predicted_step_time_low_s", "predicted_step_time_high_s"]
    table = table_from_rows([attempt("a", schema_version=9, predicted_step_time_s=1.5)], ATTEMPTS)
    pq.write_table(table.drop_columns(columns), old / "attempts.parquet")
    assert upgrade.main([str(old)]) == 0
    [row] = pq.read_table(old / "attempts.parquet").to_pylist()
    assert [row[name] for name in ("predicted_step_time_s", *columns)] == [1.5, None, None]
    assert row["schema_version"] == 9


def test_rows_from_before_recompute_every_recomputed_every_layer(tmp_path: Path) -> None:
    """Where a row does not say whether it recomputed, neither does it say how often."""
    old = make_sweep(tmp_path / "old")
    rows = [attempt("a", recompute="full"), attempt("b", recompute="none"), attempt("c", recompute=None)]
    table = table_from_rows(rows, ATTEMPTS).drop_columns("recompute_every")
    pq.write_table(table, old / "attempts.parquet")
    plan = [{"point": 0, "verdict": "run", "experiment_id": "e0", "recompute": "none"}]
    pq.write_table(table_from_rows(plan, LEDGER).drop_columns("recompute_every"), old / "ledger.parquet")
    assert load(old).table["recompute_every"].to_pylist() == [1, 1, None]
    assert load(old, "ledger").table["recompute_every"].to_pylist() == [1]
    assert upgrade.main([str(old)]) == 0
    assert pq.read_table(old / "attempts.parquet")["recompute_every"].to_pylist() == [1, 1, None]
    assert pq.read_table(old / "ledger.parquet")["recompute_every"].to_pylist() == [1]


@pytest.mark.parametrize("table", ["attempts", "steps", "ledger"])
def test_a_newer_schema_is_said_in_one_line(folder: Path, table: Any) -> None:
    path = folder / "today" / f"{table}.parquet"
    stored = pq.read_table(path)
    newer = SCHEMA_VERSION + 1
    if table == "attempts":
        place = stored.schema.get_field_index("schema_version")
        stored = stored.set_column(place, stored.schema.field(place), pa.array([newer], pa.int64()))
    stored = stored.append_column("noise_db", pa.array([41.5] * stored.num_rows))
    pq.write_table(stored.replace_schema_metadata({"schema_version": str(newer)}), path)
    reading = load(folder, table)
    [said, unknown] = reading.problems
    assert f"newer version of ultrasweep (schema {newer}, this one knows {SCHEMA_VERSION})" in said
    assert unknown == "left out 1 column that this version does not know: noise_db"
    assert "noise_db" not in reading.table.column_names
    assert upgrade.main([str(folder / "today")]) == 2
    assert "noise_db" in pq.read_schema(path).names


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_one_command_writes_one_file(folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / f"rows{suffix}"
    assert export.main([str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 rows, {len(ATTEMPTS.names)} columns\n"
    read = polars.read_parquet(out) if suffix == ".parquet" else polars.read_csv(out, infer_schema_length=None)
    assert read.columns == ATTEMPTS.names
    assert sorted(read["attempt_id"]) == ["a", "b"]
    found = duckdb.sql(f"select attempt_id from '{out}' order by 1").fetchall()
    assert found == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "x.xlsx"], "'x.xlsx' must end with .parquet or .csv"),
        (["--out", "nowhere/x.csv"], "there is no folder nowhere"),
        ([], "the following arguments are required: --out"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(folder), *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.slow
def test_a_glob_over_rewritten_files_is_read_by_duckdb_and_polars(folder: Path) -> None:
    before = {row["attempt_id"]: row for row in load(folder).table.to_pylist()}
    assert upgrade.main([str(folder)]) == 0
    pattern = f"{folder}/*/attempts.parquet"
    assert duckdb.sql(f"select count(*) from '{pattern}'").fetchall() == [(2,)]
    assert len(polars.read_parquet(pattern)) == 2
    assert {row["attempt_id"]: row for row in load(folder).table.to_pylist()} == before
    written = (folder / "old" / "attempts.parquet").stat().st_mtime_ns
    assert upgrade.main([str(folder)]) == 0
    assert (folder / "old" / "attempts.parquet").stat().st_mtime_ns == written


@pytest.mark.slow
def test_an_upgrade_that_stood_still_does_not_undo_a_later_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path / "sweep")
    pq.write_table(ATTEMPTS.empty_table().drop_columns(["nccl_transports"]), sweep / "attempts.parquet")
    publish, long_ago = files.publish, 1.0

    def stands_still(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(files, "publish", publish)
        for entry in (sweep / ".compact.lock").iterdir():
            os.utime(entry, (long_ago, long_ago))
        store.write_attempt(sweep, attempt("a1"), [])
        assert store.compact(sweep)
        publish(temporary, path)

    monkeypatch.setattr(files, "publish", stands_still)
    assert upgrade.main([str(sweep)]) == 2
    assert "has been merged by another process meanwhile" in capsys.readouterr().err
    assert store.read_attempts(sweep)["attempt_id"].to_pylist() == ["a1"]


@pytest.mark.slow
def test_the_shipped_rows_have_todays_columns() -> None:
    """After new columns: ``python -m results.upgrade results/recorded``."""
    for name, schema in (("attempts", ATTEMPTS), ("steps", STEPS), ("ledger", LEDGER)):
        for file in RECORDED.glob(f"*/{name}.parquet"):
            shipped = pq.read_schema(file)
            assert (shipped.names, shipped.types) == (schema.names, schema.types), file
    pattern = f"{RECORDED}/*/attempts.parquet"
    [(rows,)] = duckdb.sql(f"select count(*) from '{pattern}'").fetchall()
    assert rows == len(polars.read_parquet(pattern)) == store.read_attempts(RECORDED).num_rows


def test_shipped_rows_of_an_older_version_are_read_without_being_rewritten(tmp_path: Path) -> None:
    sweep = tmp_path / "one"
    shutil.copytree(RECORDED / "h200x4_llama8b_anchors", sweep)
    table = pq.read_table(sweep / "attempts.parquet")
    pq.write_table(table.drop_columns(list({"backend"} & set(table.column_names))), sweep / "attempts.parquet")
    assert load(sweep).table.schema.names == ATTEMPTS.names
    assert set(load(sweep).table["backend"].to_pylist()) <= {"cuda", None}


def test_the_commands_of_shipped_rows_name_no_folder_of_a_machine() -> None:
    for file in RECORDED.glob("*/sweep.json"):
        words = json.loads(file.read_text())["settings"].get("command", [])
        assert not [word for word in words if word.startswith("results_dir=") and word != "results_dir=results"], file
    for file in RECORDED.glob("*/attempts.parquet"):
        commands = " ".join(filter(None, pq.read_table(file, columns=["command"])["command"].unique().to_pylist()))
        assert set(re.findall(r"results_dir=(\S+)", commands)) <= {"results"}, file
