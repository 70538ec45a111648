"""Rows that a sweep's tables have lost are made again from the folders of the attempts, with the same numbers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launchers import local
from launchers.local import run_local
from launchers.pilot import rebuild
from launchers.pilot.rebuild import rebuild_lost_rows
from launchers.state.sweep_dir import SweepDir
from results import store
from sweep.status import print_status
from tests.launchers.scripted import points, settings

_PILOTS_OWN = {"git_commit", "git_dirty", "ultrasweep_version", "python_version", "teardown_s"}
"""Known to the pilot alone: null in a row that is made again, or measured by its clock."""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepDir:
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-m", "tests.launchers.scripted"))
    sweep = SweepDir.create(tmp_path / "mine", {})
    sweep.add_points(points("ok", "oom", "ok"))
    assert run_local(sweep, settings(), live=False, command="sweep run").outcomes == {"ok": 2, "oom": 1}
    return sweep


def rows_of(sweep: SweepDir) -> dict[str, dict[str, Any]]:
    return {
        row["attempt_id"]: {name: value for name, value in row.items() if name not in _PILOTS_OWN}
        for row in store.read_attempts(sweep.path).to_pylist()
    }


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["damaged", "deleted", "steps too"])
def test_damaged_tables_are_made_again(ran: SweepDir, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, steps = rows_of(ran), store.read_steps(ran.path).num_rows
    assert len(before) == 3
    for name in ("attempts", "steps") if damage == "steps too" else ("attempts",):
        path = ran.path / f"{name}.parquet"
        path.unlink() if damage == "deleted" else path.write_bytes(path.read_bytes()[:-50])
    assert rows_of(ran) == {}
    print_status(ran.path, Console(width=300))
    said = capsys.readouterr().out
    assert "3 rows made again from attempts/" in said
    assert ("could not be read" in said) == (damage != "deleted")
    assert rows_of(ran) == before
    assert store.read_steps(ran.path).num_rows == steps
    assert store.compact(ran.path)
    assert rows_of(ran) == before
    assert rebuild_lost_rows(ran) is None
    assert (ran.path / "attempts.parquet.damaged").exists() == (damage != "deleted")


@pytest.mark.slow
def test_what_has_no_folder_any_more_is_counted(ran: SweepDir) -> None:
    gone = sorted(rows_of(ran))[0]
    shutil.rmtree(ran.attempts / gone)
    (ran.path / "attempts.parquet").write_bytes(b"PAR1")
    said = rebuild_lost_rows(ran)
    assert said is not None
    assert said.endswith("2 rows made again from attempts/; of 1 the folder is gone too")
    assert gone not in rows_of(ran)


def test_an_archived_sweep_has_nothing_to_make_again() -> None:
    recorded = Path(store.__file__).parent / "recorded"
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
        """``real``, before whose first call the pilot merges, if the other kind of file has been looked at."""

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
