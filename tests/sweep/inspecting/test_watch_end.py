"""What ``watch`` prints at its end: the summary of the sweep, unless the user stops watching."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import launchers.slurm.watch
from launchers.state.history import write_record
from launchers.state.sweep_dir import Point, SweepDir
from results.tables.store import write_ledger
from sweep.__main__ import main
from sweep.running import live_page
from tests.launchers.scripted import attempt_record
from tests.launchers.slurm.runs import finish_all
from tests.sweep.inspecting.finished_rows import layouts, ledger_row, store

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]


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


def test_the_page_follows_the_rows(
    watched: SweepDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pilot ends each point only once a page shows what was before it."""
    first, second, _ = layouts(3)
    waiting, page, pages = [first, second], tmp_path / "page" / "index.html", []
    write_ledger(watched.path, [ledger_row(0, first, "run", 20000.0), ledger_row(1, second, "run", 18000.0)])
    until = time.monotonic() + 100

    def pilot_works(seconds: float, signals: list[int]) -> None:
        assert time.monotonic() < until, f"the page shows {len(pages)} of 2 states"
        text = page.read_text() if page.exists() else ""
        if waiting and ("Nothing has been run yet", "Unfinished: 1 of 2 planned points")[len(pages)] in text:
            number, experiment = 2 - len(waiting), waiting.pop(0)
            pages.append(text)
            store(watched, experiment, 10000.0 - number)
            write_record(watched, f"{number:06d}-{experiment.id}", attempt_record(number, "ok"))
            if not waiting:
                finish_all(watched)
        time.sleep(0.05)

    monkeypatch.setattr(launchers.slurm.watch, "sleep_until_signal", pilot_works)
    monkeypatch.setattr(launchers.slurm.watch, "jobs_of", lambda sweep: None)  # Slurm knows nothing of this pilot
    monkeypatch.setattr(live_page, "_LEAST_S", 0.0)
    monkeypatch.setattr(live_page, "_REPORT", (*live_page._REPORT, "--figures", "outcomes"))
    assert main(["watch", str(watched.path), "--plain", "--report", str(page.parent)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the report")]
    assert said == [f"the report is there, and written again as rows come: {page}"]
    assert len(pages) == 2
    assert "Unfinished" not in page.read_text()


def test_a_page_that_cannot_be_written_stops_nothing(
    watched: SweepDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page").write_text("a file")
    done, second, _ = layouts(3)

    def pilot_works(seconds: float, signals: list[int]) -> None:
        for number, experiment in enumerate((done, second)):
            store(watched, experiment, 10000.0)
            write_record(watched, f"{number:06d}-{experiment.id}", attempt_record(number, "ok"))
        finish_all(watched)

    monkeypatch.setattr(launchers.slurm.watch, "sleep_until_signal", pilot_works)
    assert main(["watch", str(watched.path), "--plain", "--report", str(tmp_path / "page")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("the report could not be written (") for line in lines) == 1
    assert any(line.startswith("fastest measured") for line in lines)


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
