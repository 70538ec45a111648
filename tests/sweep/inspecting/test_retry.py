"""``retry``: which points it requeues, and what it does to paused kinds of points."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launchers.state import queue
from launchers.state.circuit_breaker import kind_of, paused_kinds
from launchers.state.history import write_record
from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import SweepDir, entry_names
from sweep.__main__ import main
from tests.launchers.scripted import points
from tests.sweep.inspecting.test_status import record_of


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    """Six points: four have crashed in the same way, two wait."""
    made = SweepDir.create(tmp_path / "s", {})
    made.add_points(points(*["raises"] * 6))
    reader = QueueReader(made, "p", lambda line: None)
    for _ in range(4):
        claim = reader.claim_next(lambda waiting: waiting)
        assert claim is not None
        queue.finish(claim, "crash")
    return made


def paused(sweep: SweepDir) -> dict[str, str]:
    failed = points(*["raises"] * 4)
    kind = kind_of(failed[0].experiment, 1)
    records = [record_of(p, n, "crash", 1.0, kind=kind) for n, p in enumerate(failed)]
    for point, record in zip(failed, records, strict=True):
        write_record(sweep, point.stem, record)
    return paused_kinds(sweep, records)


def test_retry_paused_requeues_nothing(sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(paused(sweep)) == ["raises, 1 node, ZeRO 0"]
    assert main(["retry", str(sweep.path), "--paused"]) == 0
    assert "no kind of point is paused any more" in capsys.readouterr().out
    assert paused(sweep) == {}
    assert len(entry_names(sweep.todo)) == 2


def test_any_retry_lets_paused_kinds_run(sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert paused(sweep)
    assert main(["retry", str(sweep.path), "--outcome", "crash"]) == 0
    assert "4 points requeued" in capsys.readouterr().out
    assert paused(sweep) == {}
    assert len(entry_names(sweep.todo)) == 6


def test_retry_paused_counts_what_was_recorded_not_when(sweep: SweepDir) -> None:
    """The clocks of the nodes are an hour ahead of this machine's."""
    failed = points(*["raises"] * 4)
    kind = kind_of(failed[0].experiment, 1)
    records = [record_of(p, n, "crash", 1.0, kind=kind, started_at=time.time() + 3600.0) for n, p in enumerate(failed)]
    for point, record in zip(failed, records, strict=True):
        write_record(sweep, point.stem, record)
    assert paused_kinds(sweep, records)
    assert main(["retry", str(sweep.path), "--paused"]) == 0
    assert paused_kinds(sweep, records) == {}
    assert len(paused_kinds(sweep, [*records[:3], record_of(failed[3], 3, "crash", 1.0, kind=kind)])) == 0
    again = [record_of(p, n + 9, "crash", 1.0, kind=kind) for n, p in enumerate(failed)]
    assert paused_kinds(sweep, [*records, *again]), "what fails after that counts"
