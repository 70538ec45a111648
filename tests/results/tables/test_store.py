"""Tables on disk: round trips, other readers, many writers, kills in the middle, damage, versions."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from results.errors import InvalidResults
from results.tables import compaction, files, store
from tests.results.helpers import attempt, make_sweep, steps


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return make_sweep(tmp_path / "sweep")


def ids(table: pa.Table) -> list[str]:
    return sorted(table["attempt_id"].to_pylist())


def part_names(sweep: Path) -> list[str]:
    return sorted(path.name for path in (sweep / "parts").rglob("*") if path.is_file())


def test_round_trip_before_and_after_compaction(sweep: Path) -> None:
    path = store.write_attempt(sweep, attempt("a1", mfu_palm=None), steps("a1"))
    store.write_attempt(sweep, attempt("a2", outcome="oom", step_time_s=None), [])
    assert path == sweep / "parts" / "attempts" / "a1.parquet"
    before = store.read_attempts(sweep), store.read_steps(sweep)
    assert store.compact(sweep)
    after = store.read_attempts(sweep), store.read_steps(sweep)
    assert part_names(sweep) == []
    assert before[0].sort_by("attempt_id").equals(after[0].sort_by("attempt_id"))
    assert before[1].num_rows == after[1].num_rows == 6
    first, second = after[0].sort_by("attempt_id").to_pylist()
    assert first["losses"] == [11.7, None, 11.2]
    assert first["mfu_palm"] is None
    assert (second["outcome"], second["step_time_s"]) == ("oom", None)
    assert after[0].schema.field("step_time_s").metadata[b"unit"] == b"s"


def test_nothing_is_written_for_a_bad_row(sweep: Path) -> None:
    with pytest.raises(InvalidResults, match="steps: column rank='zero'"):
        store.write_attempt(sweep, attempt("a1"), [steps("a1")[0] | {"rank": "zero"}])
    with pytest.raises(InvalidResults, match="cannot name a file"):
        store.write_attempt(sweep, attempt("../a1"), [])
    with pytest.raises(InvalidResults, match="column attempt_id='b' is not that of the attempt, 'a1'"):
        store.write_attempt(sweep, attempt("a1"), steps("b"))
    assert part_names(sweep) == []


@pytest.mark.parametrize("compacted", [False, True])
def test_pandas_duckdb_and_polars_read_it(sweep: Path, compacted: bool) -> None:
    for name in ("a1", "a2"):
        store.write_attempt(sweep, attempt(name, mfu_palm=None), steps(name))
    if compacted:
        store.compact(sweep)
    source = sweep / "attempts.parquet" if compacted else sweep / "parts" / "attempts"
    glob = str(source if compacted else source / "*.parquet")

    frame = pd.read_parquet(source)
    assert frame["step_time_s"].tolist() == [0.5, 0.5]
    assert frame["mfu_palm"].isna().all()
    assert str(frame["started_at"].dt.tz) == "UTC"

    relation = duckdb.sql(
        f"select count(*), sum(peak_allocated_bytes), count(mfu_palm), min(hosts[2]), min(len(losses)) from '{glob}'"
    )
    assert relation.fetchall() == [(2, 6 * 2**30, 0, "node2", 3)]

    lazy = pl.read_parquet(glob)
    assert lazy["losses"].to_list() == [[11.7, None, 11.2]] * 2
    assert lazy["mfu_palm"].null_count() == 2
    assert lazy["started_at"].dtype == pl.Datetime("us", "UTC")


def _pilot(sweep: Path, name: str, count: int) -> None:
    for i in range(count):
        store.write_attempt(sweep, attempt(f"{name}-{i}"), steps(f"{name}-{i}", ranks=1, count=2))
        if i % 7 == 0:
            store.compact(sweep, wait_s=0.0)


@pytest.mark.slow(seconds=3)
def test_two_pilots_write_and_compact_at_once_while_a_reader_reads(sweep: Path) -> None:
    count = 30
    context = multiprocessing.get_context("fork")
    pilots = [context.Process(target=_pilot, args=(sweep, name, count)) for name in ("x", "y")]
    for pilot in pilots:
        pilot.start()
    seen: set[str] = set()
    while any(pilot.is_alive() for pilot in pilots):
        reading = store.scan(sweep, "attempts")
        names = reading.table["attempt_id"].to_pylist()
        assert reading.problems == ()
        assert len(names) == len(set(names))
        assert seen <= set(names), "an attempt that was there has gone"
        seen = set(names)
    for pilot in pilots:
        pilot.join()
        assert pilot.exitcode == 0
    expected = sorted(f"{name}-{i}" for name in ("x", "y") for i in range(count))
    assert ids(store.read_attempts(sweep)) == expected
    assert store.compact(sweep)
    assert part_names(sweep) == []
    assert ids(store.read_attempts(sweep)) == expected
    assert store.read_steps(sweep).num_rows == 2 * len(expected)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the rename", "after the rename", "between the unlinks"])
def test_a_kill_during_compaction_loses_and_doubles_nothing(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    store.write_attempt(sweep, attempt("a0"), steps("a0"))
    store.compact(sweep)
    for name in ("a1", "a2"):
        store.write_attempt(sweep, attempt(name), steps(name))

    publish, unlink, unlinked = files.publish, Path.unlink, []

    def killed_around_rename(temporary: Path, path: Path) -> None:
        if moment == "after the rename":
            publish(temporary, path)
        raise Killed

    def killed_at_second_part(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "attempts":
            unlinked.append(path)
            if len(unlinked) == 2:
                raise Killed
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        if moment == "between the unlinks":
            patch.setattr(Path, "unlink", killed_at_second_part)
        else:
            patch.setattr(compaction.files, "publish", killed_around_rename)
        with pytest.raises(Killed):
            store.compact(sweep)
    assert len(part_names(sweep)) > 0
    for _ in range(2):
        assert ids(store.read_attempts(sweep)) == ["a0", "a1", "a2"]
        assert store.read_steps(sweep).num_rows == 18
        assert store.compact(sweep)
    assert part_names(sweep) == []


def test_a_later_part_replaces_the_compacted_attempt(sweep: Path) -> None:
    store.write_attempt(sweep, attempt("a1", outcome="hang"), steps("a1"))
    store.compact(sweep)
    store.write_attempt(sweep, attempt("a1", outcome="ok"), steps("a1", ranks=1))
    for _ in range(2):
        assert store.read_attempts(sweep)["outcome"].to_pylist() == ["ok"]
        assert store.read_steps(sweep).num_rows == 3
        store.compact(sweep)


def test_dead_holders_lock_is_taken_over_and_a_live_one_respected(sweep: Path) -> None:
    store.write_attempt(sweep, attempt("a1"), [])
    lock = sweep / ".compact.lock"
    lock.write_text("another-host 1234 0000\n")
    assert not store.compact(sweep, wait_s=0.1)
    assert lock.read_text() == "another-host 1234 0000\n"
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    assert store.compact(sweep, wait_s=0.1)
    assert not lock.exists()
    assert part_names(sweep) == []
    assert [path.name for path in sweep.iterdir() if "lock" in path.name or "clock" in path.name] == []


def test_a_holder_that_lost_its_lease_leaves_the_file_alone(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_attempt(sweep, attempt("a1"), [])
    monkeypatch.setattr(compaction.Lease, "held", lambda self: False)
    assert not store.compact(sweep)
    assert not (sweep / "attempts.parquet").exists()
    assert part_names(sweep) == ["a1.parquet"]


def test_a_holder_that_stood_still_before_the_rename_does_not_undo_a_later_compaction(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system hung for minutes: its lease counts as dead, and another process has merged more parts."""
    store.write_attempt(sweep, attempt("a1"), [])
    publish, long_ago = files.publish, time.time() - 3600

    def stands_still(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(files, "publish", publish)
        for entry in (sweep / ".compact.lock").iterdir():
            os.utime(entry, (long_ago, long_ago))
        store.write_attempt(sweep, attempt("a2"), [])
        assert store.compact(sweep) and part_names(sweep) == []
        publish(temporary, path)

    monkeypatch.setattr(files, "publish", stands_still)
    assert not store.compact(sweep)
    assert ids(store.read_attempts(sweep)) == ["a1", "a2"]
    assert sorted(path.name for path in sweep.iterdir() if path.is_file()) == ["attempts.parquet", "sweep.json"]


def test_a_part_that_is_written_anew_during_a_compaction_is_kept(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot that was taken for dead writes its row after the one that took its point over."""
    store.write_attempt(sweep, attempt("a1", outcome="node_failure"), [])
    publish = files.publish

    def written_anew(temporary: Path, path: Path) -> None:
        store.write_attempt(sweep, attempt("a1", outcome="ok"), [])
        publish(temporary, path)

    monkeypatch.setattr(files, "publish", written_anew)
    assert store.compact(sweep)
    assert store.read_attempts(sweep)["outcome"].to_pylist() == ["ok"]


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_part_costs_one_line_and_is_kept(
    sweep: Path, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    store.write_attempt(sweep, attempt("good"), [])
    bad = store.write_attempt(sweep, attempt("bad"), [])
    bad.write_bytes(bad.read_bytes()[:-100] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert ids(store.read_attempts(sweep)) == ["good"]
    [record] = caplog.records
    assert str(bad) in record.getMessage()
    assert "\n" not in record.getMessage()
    assert store.compact(sweep)
    assert part_names(sweep) == ["bad.parquet"]
    assert ids(store.read_attempts(sweep)) == ["good"]


def test_damaged_compacted_file_is_never_overwritten(sweep: Path) -> None:
    store.write_attempt(sweep, attempt("a1"), [])
    (sweep / "attempts.parquet").write_bytes(b"PAR1 no longer")
    with pytest.raises(InvalidResults, match=r"attempts.parquet cannot be read"):
        store.compact(sweep)
    assert (sweep / "attempts.parquet").read_bytes() == b"PAR1 no longer"
    assert ids(store.read_attempts(sweep)) == ["a1"]


def test_columns_of_other_versions(sweep: Path) -> None:
    store.write_attempt(sweep, attempt("today"), [])
    store.compact(sweep)
    folder = sweep / "parts" / "attempts"
    pq.write_table(pa.table({"attempt_id": ["older"], "outcome": ["ok"]}), folder / "older.parquet")
    newer = store.read_attempts(sweep).slice(0, 1).to_pylist()[0] | {"attempt_id": "newer"}
    table = files.nullable(files.SCHEMAS["attempts"]).empty_table()
    table = pa.Table.from_pylist([newer], schema=table.schema).append_column("noise_db", pa.array([41.5]))
    pq.write_table(table, folder / "newer.parquet")
    for _ in range(2):
        rows = {row["attempt_id"]: row for row in store.read_attempts(sweep).to_pylist()}
        assert sorted(rows) == ["newer", "older", "today"]
        assert rows["newer"]["noise_db"] == 41.5
        assert rows["today"]["noise_db"] is None
        assert (rows["older"]["outcome"], rows["older"]["schema_version"]) == ("ok", None)
        assert store.compact(sweep)
    assert part_names(sweep) == []


def test_part_of_conflicting_types_is_said_and_kept(sweep: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.write_attempt(sweep, attempt("good"), [])
    folder = sweep / "parts" / "attempts"
    pq.write_table(pa.table({"attempt_id": ["odd"], "tp": ["two"]}), folder / "odd.parquet")
    pq.write_table(pa.table({"attempt_id": ["p"], "extra": ["text"]}), folder / "p.parquet")
    pq.write_table(pa.table({"attempt_id": ["q"], "extra": [[1]]}), folder / "q.parquet")
    with caplog.at_level(logging.WARNING):
        assert ids(store.read_attempts(sweep)) == ["good", "p"]
    assert len(caplog.records) == 2
    assert "column tp is string, not int64" in caplog.text
    assert store.compact(sweep)
    assert part_names(sweep) == ["odd.parquet", "q.parquet"]


@pytest.mark.slow
def test_many_row_groups_are_merged(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_ROWS_PER_GROUP", 4)
    for i in range(5):
        store.write_attempt(sweep, attempt(f"a{i}"), steps(f"a{i}"))
        assert store.compact(sweep)
    file = pq.ParquetFile(sweep / "steps.parquet")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert sum(groups) == 30
    assert all(size >= 4 for size in groups[:-1])
    assert store.read_steps(sweep)["attempt_id"].to_pylist().count("a3") == 6


def test_a_folder_of_sweeps_is_read_whole_and_a_copy_counts_once(tmp_path: Path) -> None:
    for name in ("one", "deep/er/two"):
        sweep = make_sweep(tmp_path / name)
        store.write_attempt(sweep, attempt(f"in-{sweep.name}"), [])
        store.write_attempt(sweep, attempt("in-both"), [])
    assert store.sweep_dirs(tmp_path) == [tmp_path / "deep/er/two", tmp_path / "one"]
    assert ids(store.read_attempts(tmp_path)) == ["in-both", "in-one", "in-two"]
    assert store.sweep_dirs(tmp_path / "one") == [tmp_path / "one"]
    assert ids(store.read_attempts(tmp_path / "one" / "parts" / "attempts" / "in-one.parquet")) == ["in-one"]


def test_a_folder_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sweep(tmp_path / "mine")
    (tmp_path / "theirs").mkdir()
    listed = Path.iterdir

    def guarded(folder: Path) -> Any:
        if folder.name == "theirs":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", guarded)
    assert store.sweep_dirs(tmp_path) == [tmp_path / "mine"]


def test_shipped_sweeps_are_read_only_where_there_are_no_others_or_when_named(tmp_path: Path) -> None:
    shipped = make_sweep(tmp_path / "recorded" / "shipped")
    (shipped.parent / "SHIPPED").write_text("")
    store.write_attempt(shipped, attempt("shipped"), [])
    assert store.own_sweep_dirs(tmp_path) == []
    assert store.only_shipped(tmp_path)
    assert store.sweep_dirs(tmp_path) == store.shipped_sweep_dirs(tmp_path) == [shipped]
    assert ids(store.read_attempts(tmp_path)) == ["shipped"]

    mine = make_sweep(tmp_path / "zz" / "mine")
    store.write_attempt(mine, attempt("mine"), [])
    store.write_ledger(mine, [{"point": 0, "verdict": "run", "experiment_id": "e0"}])
    store.write_ledger(shipped, [{"point": 0, "verdict": "run", "experiment_id": "e1"}])
    assert store.own_sweep_dirs(tmp_path) == store.sweep_dirs(tmp_path) == [mine]
    assert not store.only_shipped(tmp_path)
    assert store.shipped_sweep_dirs(tmp_path) == [shipped]
    assert ids(store.read_attempts(tmp_path)) == ["mine"]
    assert store.read_ledger(tmp_path)["experiment_id"].to_pylist() == ["e0"]

    for named in (shipped.parent, shipped):
        assert store.own_sweep_dirs(named) == store.sweep_dirs(named) == [shipped]
        assert not store.only_shipped(named)
    assert store.own_sweep_dirs(tmp_path / "nowhere") == []
    assert not store.only_shipped(tmp_path / "nowhere")


def test_the_recorded_sweeps_are_marked_as_shipped() -> None:
    recorded = Path(store.__file__).parents[1] / "recorded"
    assert (recorded / "SHIPPED").is_file()
    assert store.own_sweep_dirs(recorded) == sorted(path.parent for path in recorded.glob("*/sweep.json"))
    assert not set(store.own_sweep_dirs(recorded.parent)) & set(store.own_sweep_dirs(recorded))


def test_what_is_not_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidResults, match=r"holds no sweep: no folder in it has a sweep.json"):
        store.read_attempts(tmp_path)
    with pytest.raises(InvalidResults, match="does not exist"):
        store.read_attempts(tmp_path / "nowhere")
    with pytest.raises(InvalidResults, match=r"notes.txt cannot be read"):
        store.read_attempts(tmp_path / "notes.txt")
    with pytest.raises(InvalidResults, match="is not a sweep"):
        store.compact(tmp_path)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(InvalidResults, match="it has no column attempt_id"):
        store.read_attempts(tmp_path / "x.parquet")


def test_an_empty_sweep_has_typed_empty_tables(sweep: Path) -> None:
    assert store.read_attempts(sweep).num_rows == 0
    assert store.read_attempts(sweep).schema.field("step_time_s").type == pa.float64()
    assert store.read_steps(sweep).num_rows == store.read_ledger(sweep).num_rows == 0
    assert store.compact(sweep)


def test_ledger_round_trip(sweep: Path) -> None:
    rows = [
        {"point": 0, "verdict": "run", "experiment_id": "e0", "predicted_peak_bytes": 5},
        {"point": 1, "verdict": "invalid", "experiment_id": "e1", "rule": "heads", "detail": "tp=3 does not divide 32"},
    ]
    store.write_ledger(sweep, rows)
    read = store.read_ledger(sweep).to_pylist()
    assert [row["verdict"] for row in read] == ["run", "invalid"]
    assert read[1]["predicted_peak_bytes"] is None
    assert store.read_ledger(sweep / "ledger.parquet").num_rows == 2
    with pytest.raises(InvalidResults, match="ledger: column verdict='maybe'"):
        store.write_ledger(sweep, [rows[0] | {"verdict": "maybe"}])
