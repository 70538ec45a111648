"""Whole runs on this machine whose disk is full, refuses a file, cannot be read, or loses the sweep."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from launchers import local
from launchers.attempt import outcome
from launchers.local import run_local
from launchers.state import pilot_state
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import StatusReader, sweep_status
from tests.launchers.local_runs import SCRIPTED, rows_of, start_pilot, until
from tests.launchers.processes import rank_pids
from tests.launchers.scripted import points, settings


@pytest.fixture(autouse=True)
def scripted_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PILOT", SCRIPTED)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "a sweep", {})


@pytest.mark.slow
def test_a_disk_that_refuses_the_row_is_waited_for(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "ok"))
    (sweep.path / "parts").write_text("a file where a folder is needed")
    pilot = start_pilot(sweep, "p", settings())
    until(lambda: any("trying again" in state.message for state in pilot_state.all_states(sweep)))
    assert sweep_status(sweep).claimed == 1
    (sweep.path / "parts").unlink()
    assert pilot.wait(15) == 0
    assert [row["outcome"] for row in rows_of(sweep)] == ["ok", "ok"]


@pytest.mark.slow
def test_a_result_that_could_not_be_written_is_written_by_the_next_run(sweep: SweepDir) -> None:
    sweep.add_points(points("raises", "ok"))
    (sweep.path / "parts").write_text("a file where a folder is needed")
    pilot = start_pilot(sweep, "p", settings())
    until(lambda: any("trying again" in state.message for state in pilot_state.all_states(sweep)))
    pilot.send_signal(signal.SIGINT)
    assert pilot.wait(15) == 3
    (sweep.path / "parts").unlink()
    assert run_local(sweep, settings(), live=False).outcomes == {"crash": 1, "ok": 1}
    crash = rows_of(sweep)[0]
    assert (crash["outcome"], crash["attempt_number"]) == ("crash", 1)
    assert "ZeroDivisionError" in crash["evidence"]


@pytest.mark.slow
def test_a_sweep_removed_while_it_runs_is_one_line(sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.add_points(points("slow", deadline_s=60.0))

    def remove() -> None:
        until(lambda: rank_pids(sweep.attempts))
        gone = sweep.path.rename(sweep.path.with_name("gone"))
        shutil.rmtree(gone, ignore_errors=True)

    remover = threading.Thread(target=remove)
    remover.start()
    with pytest.raises(local.PilotFailed, match="was removed while its points ran"):
        run_local(sweep, settings(phase_limits_s={}), live=False)
    remover.join()
    assert "disk" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_while_its_files_cannot_be_read(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.add_points(points("ok", "ok"))
    real, left = StatusReader._read, [1, 2]

    def fails(reader: StatusReader, jobs: Any) -> Any:
        if left and list(sweep.attempts.iterdir()):
            left.pop()
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(reader, jobs)

    monkeypatch.setattr(StatusReader, "_read", fails)
    assert run_local(sweep, settings(), live=False).outcomes == {"ok": 2}
    assert not left
    assert capsys.readouterr().out.count("cannot be read now ([Errno 116] Stale file handle); waiting") == 1


@pytest.mark.slow
def test_a_full_disk_is_reported_although_the_pilot_cannot_write_it(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.add_points(points("ok"))
    monkeypatch.setattr(outcome, "LEAST_FREE_BYTES", 2**80)
    assert run_local(sweep, settings(), live=False).outcomes == {"ok": 1}
    assert capsys.readouterr().out.count("is on a full disk; writing is retried, nothing is lost") == 1
