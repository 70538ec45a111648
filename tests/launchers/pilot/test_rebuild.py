"""Rows that a sweep's tables have lost are rebuilt from the folders of the attempts, with the same numbers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from launchers import local
from launchers.local import run_local
from launchers.pilot import rebuild
from launchers.pilot.rebuild import rebuild_lost_rows
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.packed_folder import packed_path
from results.tables import files, store
from sweep.inspecting.status import print_status
from tests.launchers.scripted import points, settings

_PILOTS_OWN = {"git_commit", "git_dirty", "ultrasweep_version", "python_version", "teardown_s"}
"""Columns known to the pilot alone: null in a rebuilt row, or measured by the pilot's clock."""


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory: pytest.TempPathFactory) -> SweepDir:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "PILOT", (sys.executable, "-m", "tests.launchers.scripted"))
        sweep = SweepDir.create(tmp_path_factory.mktemp("ran") / "mine", {})
        sweep.add_points(points("ok", "oom", "ok"))
        assert run_local(sweep, settings(), live=False, command="sweep run").outcomes == {"ok": 2, "oom": 1}
    return sweep


@pytest.fixture
def ran(ran_once: SweepDir, tmp_path: Path) -> SweepDir:
    """A copy of a sweep whose points have run."""
    return SweepDir(shutil.copytree(ran_once.path, tmp_path / "mine", symlinks=True))


def rows_of(sweep: SweepDir) -> dict[str, dict[str, Any]]:
    return {
        row["attempt_id"]: {name: value for name, value in row.items() if name not in _PILOTS_OWN}
        for row in store.read_attempts(sweep.path).to_pylist()
    }


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["damaged", "deleted", "steps too"])
def test_damaged_tables_are_rebuilt(ran: SweepDir, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, steps = rows_of(ran), store.read_steps(ran.path).num_rows
    assert len(before) == 3
    for name in ("attempts", "steps") if damage == "steps too" else ("attempts",):
        path = ran.path / f"{name}.parquet"
        path.unlink() if damage == "deleted" else path.write_bytes(path.read_bytes()[:-50])
    assert rows_of(ran) == {}
    print_status(ran.path, Console(width=300))
    report = capsys.readouterr().out
    assert "3 rows rebuilt from attempts/" in report
    assert ("could not be read" in report) == (damage != "deleted")
    assert rows_of(ran) == before
    assert store.read_steps(ran.path).num_rows == steps
    assert store.compact(ran.path)
    assert rows_of(ran) == before
    assert rebuild_lost_rows(ran) is None
    assert (ran.path / "attempts.parquet.damaged").exists() == (damage != "deleted")


@pytest.mark.slow
def test_attempts_without_a_folder_are_counted(ran: SweepDir) -> None:
    gone = sorted(rows_of(ran))[0]
    packed_path(ran.attempts / gone).unlink()
    (ran.path / "attempts.parquet").write_bytes(b"PAR1")
    report = rebuild_lost_rows(ran)
    assert report is not None
    assert report.endswith("2 rows rebuilt from attempts/; 1 attempt not rebuilt: the folder is gone")
    assert gone not in rows_of(ran)


def test_an_archived_sweep_has_no_rows_to_rebuild() -> None:
    recorded = Path(store.__file__).parents[1] / "recorded"
    for marker in recorded.glob("*/sweep.json"):
        assert rebuild_lost_rows(SweepDir(marker.parent)) is None


@pytest.mark.slow
def test_an_error_of_the_file_system_is_no_damage(ran: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows_of(ran)

    def stale(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(rebuild.pq, "ParquetFile", stale)
        assert rebuild_lost_rows(ran) is None
    assert not list(ran.path.glob("*.damaged")) and rows_of(ran) == before


@pytest.mark.slow
def test_rows_that_a_pilot_merges_meanwhile_are_not_lost(ran: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    before, [merged] = rows_of(ran), [ran.path / "attempts.parquet"]
    for row in before.values():  # back to parts, as while pilots work
        store.write_attempt(ran.path, row, [])
    merged.unlink()
    looked: list[str] = []

    def merging_between(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real`` with a merge by the pilot before its first call, once the other kind of file has been read."""

        def call(*arguments: Any) -> Any:
            if kind not in looked:
                looked.append(kind)
                if len(looked) == 2:
                    assert store.compact(ran.path)
            return real(*arguments)

        return call

    monkeypatch.setattr(rebuild, "_merged_ids", merging_between("merged", rebuild._merged_ids))
    monkeypatch.setattr(rebuild.files, "part_paths", merging_between("parts", rebuild.files.part_paths))
    assert rebuild_lost_rows(ran) is None
    assert rows_of(ran) == before


def as_parts(sweep: SweepDir) -> dict[str, Path]:
    """Put every row back into a part of its own, as while pilots work. Returns the parts of attempts by id."""
    steps = store.read_steps(sweep.path).to_pylist()
    for row in store.read_attempts(sweep.path).to_pylist():
        name = row["attempt_id"]
        store.write_attempt(sweep.path, row, [step for step in steps if step["attempt_id"] == name])
    for table in ("attempts", "steps"):
        (sweep.path / f"{table}.parquet").unlink()
    return {path.stem: path for path in files.part_paths(sweep.path, "attempts")}


@pytest.mark.slow
@pytest.mark.parametrize("table", ["attempts", "steps"])
@pytest.mark.parametrize("damage", ["cut", "empty", "garbled"])
def test_a_damaged_part_is_rebuilt(ran: SweepDir, table: files.Table, damage: str) -> None:
    before, steps = rows_of(ran), store.read_steps(ran.path).num_rows
    commits = {row["attempt_id"]: row["git_commit"] for row in store.read_attempts(ran.path).to_pylist()}
    hit = next(name for name, part in sorted(as_parts(ran).items()) if before[name]["outcome"] == "ok" and part)
    part = files.part_path(ran.path, table, hit)
    whole = part.read_bytes()
    if damage == "garbled":  # both ends are there: only reading it shows the damage, as the next compaction does
        part.write_bytes(whole[:40] + bytes(len(whole) - 80) + whole[-40:])
        assert store.compact(ran.path) and part.exists()
    else:
        part.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    lost = (before.keys() - rows_of(ran).keys(), steps - store.read_steps(ran.path).num_rows)
    assert lost == (({hit}, 0) if table == "attempts" else (set(), steps // 2))
    report = rebuild_lost_rows(ran)
    assert report is not None and f"parts/{table}/{hit}.parquet could not be read and is kept as" in report
    assert ("1 row rebuilt" if table == "attempts" else "the steps of 1 attempt rebuilt") in report
    assert rows_of(ran) == before and store.read_steps(ran.path).num_rows == steps
    assert part.with_name(f"{part.name}.damaged").exists()
    assert rebuild_lost_rows(ran) is None
    found = {row["attempt_id"]: row["git_commit"] for row in store.read_attempts(ran.path).to_pylist()}
    assert {name: commits[name] for name in commits if name != hit}.items() <= found.items()  # others are not touched
    assert table == "attempts" or found == commits


@pytest.mark.slow
def test_a_damaged_part_whose_row_is_merged_is_moved_aside(ran: SweepDir) -> None:
    before, [name, *_] = rows_of(ran), sorted(rows_of(ran))
    part = files.part_path(ran.path, "attempts", name)
    part.write_bytes(b"PAR1")
    report = rebuild_lost_rows(ran)
    assert report is not None and "could not be read and is kept as" in report and report.endswith("no row is lost")
    assert not part.exists() and rows_of(ran) == before and rebuild_lost_rows(ran) is None


@pytest.mark.slow
def test_damaged_steps_leave_the_rows_of_attempts_alone(ran: SweepDir) -> None:
    before, steps = store.read_attempts(ran.path).to_pylist(), store.read_steps(ran.path).num_rows
    (ran.path / "steps.parquet").write_bytes(b"PAR1")
    report = rebuild_lost_rows(ran)
    assert report is not None and "the steps of 2 attempts rebuilt" in report
    assert store.read_attempts(ran.path).to_pylist() == before and store.read_steps(ran.path).num_rows == steps


def test_ids_of_a_table_of_many_rows_are_read_as_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    assert rebuild._merged_ids(path) == set()
    pq.write_table(pa.table({"attempt_id": ["a", "a", "b", "b", "c"]}), path, row_group_size=3)
    assert rebuild._merged_ids(path) == {"a", "b", "c"}
    path.write_bytes(b"PAR1")
    assert rebuild._merged_ids(path) is None
