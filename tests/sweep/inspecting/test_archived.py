"""A fresh clone: the sweeps that came with the program have rows and no queue, and every reading command takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from launchers.state.sweep_dir import SweepDir
from launchers.status.archived import archived_status
from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.running.run import enqueue, prepare
from tests.sampling import sampled

RECORDED = Path(__file__).resolve().parents[3] / "results" / "recorded"
SWEEPS = sorted(path.parent.name for path in RECORDED.glob("*/sweep.json"))
ANCHOR = "295a90f3"
"""End of the id of a row that the README quotes."""


@pytest.fixture(autouse=True)
def fresh_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "recorded").symlink_to(RECORDED)


@pytest.mark.slow
def test_status_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("no sweep of your own in results yet; sweeps that ship with the program:\n")
    assert "sweep in results" in told and all(f"recorded/{name}" in told for name in SWEEPS)
    assert told.count("archived") == len(SWEEPS)


@pytest.mark.parametrize("name", sampled(SWEEPS, 4, seconds=1))
def test_status_of_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"results/recorded/{name}"]) == 0
    told = capsys.readouterr().out
    rows = pq.read_table(RECORDED / name / "attempts.parquet", columns=["experiment_id", "outcome"])
    points = len(set(rows["experiment_id"].to_pylist()))
    assert f"{points:,} of {points:,} points have ended; archived" in told
    status = archived_status(SweepDir.open(RECORDED / name))
    assert status.total == points and len(status.attempts) == rows.num_rows
    assert sum(shape.total for shape in status.shapes) == points
    assert status.device_hours > 0


def test_status_shows_a_users_own_sweep_alone_and_an_archive_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    own = enqueue(prepare(["+grid=tiny", "launcher=local"], ConfFolders(), [])).sweep
    capsys.readouterr()
    assert main(["status"]) == 0
    told = capsys.readouterr().out
    assert "results/tiny" in told and "recorded" not in told
    archive = Path("results/old")
    archive.mkdir()
    (archive / "sweep.json").write_text(own.marker.read_text())
    assert main(["status"]) == 0
    told = capsys.readouterr().out
    assert "sweep in results" in told and "\ntiny" in told and "\nold" in told


@pytest.mark.slow
def test_logs_of_a_shipped_row_say_where_its_row_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", ANCHOR]) == 2
    told = capsys.readouterr().err
    assert "results/recorded/h200x4_llama8b_anchors has its rows but no logs, see python -m sweep explain " in told
    command = told.rpartition("python -m sweep ")[2].split()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert ANCHOR in told and "logs:" not in told


@pytest.mark.slow(seconds=4)
def test_explain_finds_or_points_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", ANCHOR]) == 0
    capsys.readouterr()
    enqueue(prepare(["+grid=tiny", "launcher=local"], ConfFolders(), []))
    assert main(["explain", ANCHOR]) == 2
    told = capsys.readouterr().err
    assert "it ships with the program: --results results/recorded/h200x4_llama8b_anchors" in told
    assert main(["explain", ANCHOR, *told.split()[-2:]]) == 0
    capsys.readouterr()
    assert main(["explain", "0123abcd"]) == 2
    assert "then --results plan.parquet" in capsys.readouterr().err


def test_an_archive_of_a_newer_format_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sweep.json").write_text(json.dumps({"format": 99}))
    assert main(["status", "other"]) == 2
    assert "is not of format 1" in capsys.readouterr().err
