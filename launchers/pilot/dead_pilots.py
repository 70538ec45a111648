"""Takes over points from dead pilots, and records the attempts that they could not record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launchers.attempt import outcome as oc
from launchers.attempt.attempt import Attempt, reopen_attempt
from launchers.attempt.execute import Execution, internal_error
from launchers.attempt.outcome import Outcome
from launchers.pilot.recorder import AttemptRecorder, record_of_row
from launchers.state import history, queue
from launchers.state.queue import Claim
from launchers.state.sweep_dir import SweepDir
from results import store
from results.errors import InvalidResults
from workloads.stages import assemble, rehearsed_ranks


class DeadPilots:
    """Finishes what dead pilots began, for one living pilot."""

    def __init__(
        self, sweep: SweepDir, pilot_id: str, recorder: AttemptRecorder, report: Callable[[str], None]
    ) -> None:
        """``pilot_id``: of the living pilot. ``report`` takes a line for its log."""
        self._sweep = sweep
        self._pilot_id = pilot_id
        self._recorder = recorder
        self._report = report

    def take_over(self, stem: str, holder: str) -> bool:
        """Finish what the dead pilot ``holder`` began with a point. False when a row could not be written."""
        claim = queue.take_over(self._sweep, stem, holder, self._pilot_id)
        if claim is None:  # another pilot was faster
            return True
        records = history.records_of(self._sweep, stem)
        attempt = self._unrecorded(claim, {record.attempt_id for record in records})
        if attempt is not None:
            why = f"pilot {holder} died while it ran this point"
            known = self._row_written(attempt.attempt_id)
            if known is None:
                return self._recorder.record(
                    claim, attempt, abandoned(attempt, why), ended_at=_last_written_at(attempt)
                )
            record = record_of_row(known, attempt, _outcome_of(known), claim, known["ended_at"].timestamp())
            path = self._recorder.until_written(
                lambda: history.write_record(self._sweep, stem, record), f"the record of {stem}"
            )
            if path is None:
                return False
            records = [*records, record]
        last = records[-1] if records else None
        if last is not None and not last.will_retry and last.pilot_id in (holder, self._pilot_id):
            queue.finish(claim, last.outcome)
        else:
            queue.release(claim)
        self._report(f"took {stem} over from pilot {holder}, which is dead")
        return True

    def _unrecorded(self, claim: Claim, recorded: set[str]) -> Attempt | None:
        """The attempt at this point that a dead pilot began and did not record. None when there is none.

        The pilot may be the claim's last holder, or an earlier one whose claim that holder had taken over."""
        for folder in sorted(self._sweep.attempts.glob(f"{claim.point.experiment.id}.a*")):
            if folder.name in recorded or _pilot_of(folder / "attempt.json") in (None, self._pilot_id):
                continue
            attempt = reopen_attempt(self._sweep, claim.point, folder.name)
            if attempt is not None and attempt.task.method == claim.point.method:
                return attempt
        return None

    def _row_written(self, attempt_id: str) -> Mapping[str, Any] | None:
        try:
            table = store.read_attempts(self._sweep.path)
        except InvalidResults:
            return None
        for row in table.to_pylist():
            if row["attempt_id"] == attempt_id:
                return dict(row)
        return None


def abandoned(attempt: Attempt, why: str) -> Execution:
    """The result of an attempt whose pilot died before it could record it, from the attempt's folder."""
    results = attempt.results()
    measured = attempt.task.method == "measured"
    ranks: Sequence[int] = attempt.ranks() if measured else rehearsed_ranks(attempt.point.experiment)
    try:
        outcome = Outcome(**json.loads((attempt.folder / "outcome.json").read_text()))
    except (OSError, ValueError, TypeError):
        outcome = oc.classify_abandoned(attempt.folder, ranks, results, why)
    try:
        complete = not measured and all(rank in results for rank in ranks)
        rehearsed = assemble(attempt.point.experiment, attempt.task.cluster, results) if complete else None
    except Exception as error:
        return internal_error(error)
    return Execution(outcome=outcome, results=results, rehearsed=rehearsed)


def _outcome_of(row: Mapping[str, Any]) -> Outcome:
    """The outcome in a row that is already written."""
    return Outcome(
        outcome=row["outcome"],
        phase=row["phase"],
        phase_step=row["phase_step"],
        failed_rank=row["failed_rank"],
        evidence=row["evidence"],
        teardown_hung=bool(row["teardown_hung"]),
        infrastructure=row["outcome"] == "node_failure",
    )


def _pilot_of(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["pilot_id"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _last_written_at(attempt: Attempt) -> float:
    """When something was last written in the attempt's folder."""
    return max([attempt.started_at, *(path.stat().st_mtime for path in attempt.folder.iterdir())])
