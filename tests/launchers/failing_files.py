"""A pilot on a filesystem that fails at random moments: with processes (`main`), and without (`run_pilot`)."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launchers.attempt.execute import Execution
from launchers.attempt.outcome import Outcome
from launchers.attempt.watchdog import Progress
from launchers.pilot import command
from launchers.pilot import pilot as pilot_module
from launchers.pilot.allocation import Allocation
from launchers.pilot.node_pool import NodePool
from launchers.pilot.pilot import Pilot
from launchers.state.pilot_config import PilotConfig
from launchers.state.sweep_dir import SweepDir
from tests.launchers.failing_calls import FailingFiles
from tests.launchers.scripted import run_rank, settings
from workloads.contract import protocol
from workloads.contract.protocol import RankResult, StepRecord


def main() -> int:
    """``python -m tests.launchers.failing_files SWEEP_DIR PILOT_ID``: a pilot of scripted ranks, on files that fail."""
    with pytest.MonkeyPatch.context() as patch:
        FailingFiles(patch.setattr, Path(sys.argv[1]), seed=sum(sys.argv[2].encode()), rate=0.03).active = True
        return command.main(run_rank=run_rank)


class FakeAttempts:
    """Replaces `AttemptThread`: every attempt is measured in full and ends at once, or after ``point_s`` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: FailingFiles, point_s: float = 0.0) -> None:
        self.runs: Counter[str] = Counter()
        """Number of runs of each point, by its stem."""
        self._files = files
        self._point_s = point_s
        monkeypatch.setattr(pilot_module, "AttemptThread", self._run)

    def _run(self, claim: Any, attempt: Any, nodes: Any, width: int, launch: Any, stages: Path, *more: Any) -> Any:
        self.runs[claim.stem] += 1
        results = {rank: _result(rank) for rank in attempt.ranks()}

        def write_results() -> None:
            active, self._files.active = self._files.active, False
            for rank, result in results.items():
                protocol.write_json(protocol.result_path(attempt.folder, rank), result)
            self._files.active = active

        if not self._point_s:
            write_results()
            more[-1].set()  # the pilot's event: an attempt has ended
        more[-1].next_at = time.monotonic() + self._point_s
        return _FakeAttempt(
            claim=claim,
            attempt=attempt,
            nodes=tuple(nodes),
            done=Execution(outcome=Outcome(outcome="ok", phase="done"), results=results),
            held={},
            ended_at=time.time() + self._point_s,
            progress=Progress(phase="done", step=None),
            ends_at=time.monotonic() + self._point_s,
            at_end=write_results if self._point_s else _nothing,
            unclean=dict,
            running=lambda: _running(claim, attempt),
        )


class _FakeAttempt(SimpleNamespace):
    """What `AttemptThread` would be; its ranks write their results when it ends."""

    ends_at: float
    at_end: Callable[[], None]

    @property
    def finished(self) -> bool:
        if time.monotonic() < self.ends_at:
            return False
        self.at_end()
        self.at_end = _nothing
        return True


def _nothing() -> None:
    pass


def run_pilot(sweep: SweepDir, pilot_id: str, wake: threading.Event | None = None, **changes: Any) -> int:
    """Run a pilot on one node without an agent, in this process, and return its exit status. ``changes``: of its
    settings."""
    config = PilotConfig(settings=settings(**changes), command=None, wall_time_s=None, stop_with_parent=False)
    place = Allocation(pilot_id=pilot_id, job=None, node="n0", is_head=True, restarts=0)
    return Pilot(sweep, place, config, cast(NodePool, _Pool()), wake or threading.Event(), {}).run()


class _Pool:
    """One node that is free or busy."""

    size, usable, expected, lost_all, names, exclusion_summary = 1, ("n0",), 1, False, ("n0",), ""

    def __init__(self) -> None:
        self._busy = False

    def wait_for_agents(self, meanwhile: Callable[[], bool]) -> list[str]:
        return []

    def free(self) -> list[Any]:
        node = SimpleNamespace(name="n0", address="here", device_ids=None, reserve_port=lambda: 1)
        return [] if self._busy else [node]

    def mark_busy(self, nodes: Sequence[Any]) -> None:
        self._busy = True

    def mark_free(self, nodes: Sequence[Any]) -> None:
        self._busy = False

    def exclude_lost(self) -> list[str]:
        return []

    def exclude_unclean(self, unclean: Any, nodes: int) -> list[str]:
        return []

    def exclude_failing(self, records: Any, nodes: Any) -> list[str]:
        return []


def _running(claim: Any, attempt: Any) -> Any:
    from launchers.state.pilot_state import Running

    return Running(
        stem=claim.stem,
        attempt_id=attempt.attempt_id,
        experiment_id=attempt.point.experiment.id,
        world_size=attempt.point.experiment.world_size,
        started_at=attempt.started_at,
        deadline_s=30.0,
    )


def _result(rank: int) -> RankResult:
    steps = [
        StepRecord(step=step, is_warmup=step == 0, step_time_s=0.01, loss=5.5 - 0.1 * step, grad_norm=1.0)
        for step in range(3)
    ]
    started = {"spawn": time.time(), "teardown": time.time()}
    return RankResult(
        rank=rank, coordinates={"dp": rank, "tp": 0, "cp": 0, "pp": 0}, steps=steps, phase_started_at=started
    )


if __name__ == "__main__":
    sys.exit(main())
