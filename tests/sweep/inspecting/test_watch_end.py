"""What ``watch`` prints at its end: the summary of the sweep, unless the user stops watching."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import launchers.slurm.watch
from launchers.state.history import write_record
from launchers.state.sweep_dir import Point, SweepDir
from results.tables.store import write_ledger
from sweep.__main__ import main
from tests.launchers.scripted import attempt_record
from tests.launchers.slurm.runs import finish_all
from tests.sweep.inspecting.finished_rows import layouts, ledger_row, store

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "results" / "s", {})


@pytest.fixture
def watched(sweep: SweepDir) -> SweepDir:
    """Two points wait, and the ledger has a third that the budget left out."""
    done, second, promising = layouts(3)
    ledger = [ledger_row(0, done, "run", 20000.0), ledger_row(1, promising, "over_budget", 22000.0)]
    write_ledger(sweep.path, ledger)
    sweep.add_points(
        Point(index=number, grid="g", experiment=one, deadline_s=60.0) for number, one in enumerate((done, second))
    )
    return sweep


def test_watching_ends_with_the_fastest_and_what_to_try_next(
    watched: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pilot elsewhere ends both points while ``watch`` sleeps between its looks."""
    done, second, _ = layouts(3)
    slept = []

    def pilot_works(seconds: float, signals: list[int]) -> None:
        slept.append(seconds)
        for number, (experiment, rate) in enumerate(((done, 10000.0), (second, 9100.0))):
            store(watched, experiment, rate)
            write_record(watched, f"{number:06d}-{experiment.id}", attempt_record(number, "ok"))
        finish_all(watched)

    monkeypatch.setattr(launchers.slurm.watch, "sleep_until_signal", pilot_works)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["watch", str(watched.path), "--plain"]) == 0
    assert len(slept) == 1
    lines = capsys.readouterr().out.splitlines()
    ends = [number for number, line in enumerate(lines) if line.startswith("[2/2]")]
    assert ends
    end = lines[ends[-1] + 1 :]
    assert end[0] == "2 attempts; points by outcome: ok 2"
    [table] = [number for number, line in enumerate(end) if line.startswith("fastest measured")]
    for part in (f"{done.model.name} on 8 GPUs", "10,000", "60.0 GiB", "50.0 %", "9.0 %"):
        assert any(part in line for line in end[table : table + 4]), part
    tried = end.index("worth trying next, by predictions corrected with the runs so far:")
    assert "about 11,000 tokens/s each (+10% to the best)" in end[tried + 1]
    assert not any("the same command" in line for line in end)  # watching is not what ran the points
    assert end[-1] == f"report: python -m analysis.report {watched.path}"


def test_ctrl_c_ends_the_watching_without_a_summary_of_half_the_points(
    watched: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(seconds: float, signals: list[int]) -> None:
        store(watched, layouts(1)[0], 10000.0)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(launchers.slurm.watch, "sleep_until_signal", press_ctrl_c)
    assert main(["watch", str(watched.path), "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 points left; stopped watching, the sweep goes on"
    assert not any(line.startswith(("fastest", "worth trying", "report:")) for line in lines)
