"""Damaged files in the queue: their points run from the ledger, or are counted as missing."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from launchers import local
from launchers.local import run_local
from launchers.state import damaged, queue
from launchers.state.damaged import damaged_names, point_from_ledger
from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point
from launchers.status.status import sweep_status
from results.tables.store import write_ledger
from tests.launchers.local_runs import SCRIPTED
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points, settings
from workloads.spec.record import config_columns

DAMAGE = {
    "emptied": b"",
    "cut": b'{"index": 0, "grid": "te',
    "not text": b"\xff\xfe\x00{",
    "nested too deeply": b"[" * 100_000 + b"]" * 100_000,
    "another kind": b"[1, 2]",
    "of another program": b'{"index": 0, "experiment": [[]]}',
}


def write_plan(sweep: SweepDir, planned: list[Point]) -> None:
    rows = [
        {
            "sweep": sweep.name,
            "grid": point.grid,
            "point": point.index,
            "verdict": "run",
            "predicted_peak_bytes": point.predicted_peak_bytes,
            "predicted_step_time_s": point.predicted_step_time_s,
            "predicted_step_time_low_s": point.predicted_step_time_low_s,
            "predicted_step_time_high_s": point.predicted_step_time_high_s,
            "worst_gpu_hours": point.deadline_s
            * (point.experiment.world_size if point.method == "measured" else 1)
            / 3600,
            **config_columns(point.experiment),
        }
        for point in planned
    ]
    write_ledger(sweep.path, rows)


@pytest.mark.parametrize("method", ["measured", "rehearsed"])
def test_the_ledger_has_the_whole_point(sweep: SweepDir, method: str) -> None:
    first, second = points("ok", "raises", method=method)
    predicted = {"predicted_step_time_low_s": 0.5, "predicted_step_time_s": 1.0, "predicted_step_time_high_s": 4.0}
    planned = [dataclasses.replace(first, predicted_peak_bytes=7, **predicted), second]
    write_plan(sweep, planned)
    for point in planned:
        assert point_from_ledger(sweep, f"{point.stem}.json") == point
        assert point_from_ledger(sweep, f"{point.stem}@p@a1.json") == point
    assert point_from_ledger(sweep, "000009-unknown.json") is None
    assert point_from_ledger(sweep, "notes.json") is None


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_item_is_claimed_from_the_ledger(sweep: SweepDir, content: bytes) -> None:
    planned = points("ok", "ok")
    write_plan(sweep, planned)
    sweep.add_points(planned)
    (sweep.todo / f"{planned[0].stem}.json").write_bytes(content)
    lines: list[str] = []
    mine = queue_reader(sweep, "p", lines)
    claim = mine.claim_next(everything)
    assert claim is not None and claim.point == planned[0]
    assert len(lines) == 1 and lines[0].endswith("; the point is taken from the ledger")
    taken = queue.take_over(sweep, claim.stem, "p", "another")
    assert taken is not None and taken.point == planned[0]
    assert queue.finish(taken, "ok")
    assert damaged_names(sweep) == []


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_point_that_nobody_knows_any_more_is_counted(sweep: SweepDir, content: bytes) -> None:
    planned = points(*["ok"] * 3)
    sweep.add_points(planned)
    (sweep.todo / f"{planned[1].stem}.json").write_bytes(content)
    claims = queue_reader(sweep, "p")
    for _ in range(2):
        claim = claims.claim_next(everything)
        assert claim is not None
        queue.finish(claim, "ok")
    assert claims.claim_next(everything) is None
    status = sweep_status(sweep)
    assert (status.total, status.finished, status.left) == (3, 2, 0)
    assert status.damaged == (f"{planned[1].stem}.json",)
    assert status.damage.startswith("1 point cannot be read, neither from the queue nor from the ledger (queue/broken/")
    assert sweep.add_points(planned) == 1  # the same command again
    assert sweep_status(sweep).damaged == () and sweep_status(sweep).total == 3
    assert read_point(sweep.todo / f"{planned[1].stem}.json") == planned[1]


@pytest.mark.slow
def test_run_and_status_agree_on_a_damaged_item(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "PILOT", SCRIPTED)
    planned = points(*["ok"] * 6)
    write_plan(sweep, planned)
    sweep.add_points(planned)
    (sweep.todo / f"{planned[2].stem}.json").write_bytes(b"")
    summary = run_local(sweep, settings(), live=False)
    assert (summary.outcomes, summary.exit_code) == ({"ok": 6}, 0)
    output = capsys.readouterr().out
    assert "[6/6]" in output and output.count("the point is taken from the ledger") == 1
    assert sweep_status(sweep).total == 6


@pytest.mark.slow
def test_run_reports_missing_points_when_the_ledger_is_lost_too(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "PILOT", SCRIPTED)
    planned = points(*["ok"] * 3)
    sweep.add_points(planned)
    (sweep.path / "ledger.parquet").write_bytes(b"PAR1 cut")
    (sweep.todo / f"{planned[2].stem}.json").write_bytes(b"")
    summary = run_local(sweep, settings(), live=False)
    assert (summary.outcomes, summary.exit_code) == ({"ok": 2}, 1)
    assert summary.message.startswith("1 point cannot be read")
    assert "[2/3]" in capsys.readouterr().out
    assert entry_names(sweep.todo) == []


def test_a_ledger_that_fails_to_read_is_no_reason_to_set_a_point_aside(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    [point] = points("ok")
    sweep.add_points([point])
    (sweep.todo / f"{point.stem}.json").write_bytes(b"")

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(damaged, "read_ledger", fails)
    with pytest.raises(OSError, match="Input/output error"):
        queue_reader(sweep, "p").claim_next(everything)
    assert entry_names(sweep.todo) == [f"{point.stem}.json"]
