"""Takes over points from dead pilots, and records the attempts that they left unrecorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from launchers.attempt import outcome as oc
from launchers.attempt.attempt import START, Attempt, attempt_prefix, reopen_attempt
from launchers.attempt.execute import Execution
from launchers.attempt.outcome import Outcome
from launchers.pilot.late_results import execution_of, needed_ranks
from launchers.pilot.recorder import AttemptRecorder, record_of_row
from launchers.state import pilot_state, queue
from launchers.state.history import HistoryReader
from launchers.state.queue import Claim
from launchers.state.sweep_dir import Point, SweepDir
from results.shared_filesystem import packed_folder
from results.shared_filesystem.patience import repeated
from results.tables import store
from results.tables.schema import OUTCOMES
from workloads.contract.protocol import read_attempt_json
from workloads.contract.typed import typed


class DeadPilots:
    """Finishes the work of dead pilots, on behalf of one living pilot.

    Every method may be called again after an `OSError`: it continues from the files on disk.
    """

    def __init__(
        self,
        sweep: SweepDir,
        pilot_id: str,
        records: HistoryReader,
        recorder: AttemptRecorder,
        report: Callable[[str], None],
    ) -> None:
        """``pilot_id``: id of the living pilot. ``report`` takes a line for its log."""
        self._sweep = sweep
        self._pilot_id = pilot_id
        self._records = records
        self._recorder = recorder
        self._report = report
        self.taken_over = 0
        """Number of claims of dead pilots that have been settled."""

    def take_over(self, stem: str, holder: str) -> bool:
        """Finish the dead pilot ``holder``'s work on a point. False when a row could not be written."""
        self._records.refresh()
        point = queue.claimed_point(self._sweep, stem, holder, self._report)
        if point is None:  # another pilot was faster
            return True
        recorded, last = "", self._records.of(stem)[-1:]
        if last and last[0].pilot_id == holder and self._unrecorded(point, holder) is None:
            recorded = last[0].attempt_id  # the holder died after writing the record and before moving the point
        claim = queue.take_over(self._sweep, stem, holder, self._pilot_id, recorded, self._report)
        if claim is None:
            return True
        if not self._settle(claim, holder):
            return False
        self.taken_over += 1
        self._report(f"took {stem} over from pilot {holder}, which is dead")
        return True

    def resume(self, running: Collection[str]) -> bool:
        """Finish work that a filesystem error has interrupted: every claim of this pilot whose stem is not in
        ``running``. False when a row could not be written."""
        self._records.refresh()
        claims = queue.claims_of(self._sweep, self._pilot_id, self._report)
        return all(self._settle(claim, "") for claim in claims if claim.stem not in running)

    def _settle(self, claim: Claim, holder: str) -> bool:
        """Complete a claim: move the point to where its recorded attempt belongs. Without a record, record the attempt
        that was started under the claim. If none was started, move the point back to ``todo``."""
        for record in self._records.of(claim.stem):
            if record.attempt_id == claim.recorded:
                return self._recorder.move(claim, record)
        attempt = self._unrecorded(claim.point, holder)
        if attempt is not None:
            claim = queue.name_attempt(claim, attempt.attempt_id)
            row = store.find_attempt(self._sweep.path, attempt.attempt_id)
            if row is None:
                why = f"pilot {attempt.pilot_id} died while it ran this point"
                done, ended_at = abandoned(self._sweep, attempt, why), _last_written_at(attempt)
                return self._recorder.record(claim, attempt, done, ended_at=ended_at)
            record = record_of_row(row, attempt, _outcome_of(row), claim, row["ended_at"].timestamp())
            self._recorder.write_record(claim.stem, record)
            return self._recorder.move(claim, record)
        queue.release(claim)
        return True

    def _unrecorded(self, point: Point, holder: str) -> Attempt | None:
        """The last attempt at this point if another pilot started it and no pilot recorded it; else None.

        That pilot may be the claim's last ``holder``, or an earlier one whose claim the holder had taken over.
        """
        records = self._records.of(point.stem)
        recorded = {record.attempt_id for record in records}
        last = max((record.attempt_number for record in records), default=0)
        prefix = attempt_prefix(point)
        begun = [
            attempt
            for folder in repeated(lambda: packed_folder.folders(self._sweep.attempts))
            if folder.name.startswith(prefix)
            and folder.name not in recorded
            and (attempt := reopen_attempt(self._sweep, point, folder.name)) is not None
            and attempt.task.method == point.method
            and attempt.pilot_id != self._pilot_id
            and attempt.number > last
        ]
        # Compare numbers, not times: the clocks of two nodes differ.
        return max(begun, key=lambda one: (one.number, one.pilot_id == holder, one.started_at), default=None)


def abandoned(sweep: SweepDir, attempt: Attempt, why: str) -> Execution:
    """The result of an attempt whose pilot died before recording it, from the attempt's folder."""
    ranks, results = needed_ranks(attempt), attempt.results()
    try:
        outcome = typed(Outcome, read_attempt_json(attempt.folder / "outcome.json"))
        if outcome.outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {outcome.outcome}")
    except (FileNotFoundError, ValueError):
        outcome = oc.classify_abandoned(ranks, results, why, *_last_position(sweep, attempt))
    if outcome.outcome == "cancelled" and ranks and all(rank in results for rank in ranks):
        # all ranks were measured before the attempt was cancelled
        outcome = oc.classify_abandoned(ranks, results, why, None, None)
    return execution_of(attempt, outcome, results)


def _last_position(sweep: SweepDir, attempt: Attempt) -> tuple[str | None, int | None]:
    """Last phase and step of an attempt in its pilot's state file, which outlives the pilot. ``spawn`` when the file
    does not list the attempt yet, None when the file cannot be read."""
    state = pilot_state.read_state(sweep, attempt.pilot_id)
    if state is None:
        return None, None
    shown = next((one for one in state.running if one.attempt_id == attempt.attempt_id), None)
    return (shown.phase, shown.step) if shown is not None else ("spawn", None)


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


def _last_written_at(attempt: Attempt) -> float:
    """Time of the last write in the attempt's folder, on the clock of ``started_at``. The time since the start is
    computed from the files' times alone, because the clocks of the file server and of the dead pilot may differ."""
    written = repeated(lambda: packed_folder.written_at(attempt.folder))
    return attempt.started_at + max(written.values()) - written[START]
