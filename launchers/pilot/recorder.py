"""Records attempts: writes their rows and records, and moves their points. No other code writes rows.

The order makes every crash harmless: first the outcome into the attempt's folder, then the row into the tables, the
record into the history, and then the point to ``done`` or back to ``todo``. A pilot that takes over a dead pilot's
claim checks which of these steps are done, and continues with the next. Each step may be done twice, so after a
filesystem error a step is repeated, and no earlier one. Last, the folder is packed into one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchers.attempt import loss_check, rows
from launchers.attempt.attempt import Attempt
from launchers.attempt.execute import Execution, internal_error
from launchers.attempt.outcome import Outcome
from launchers.attempt.packing import Packer
from launchers.pilot.late_results import late_result, was_late
from launchers.pilot.patience import Patience
from launchers.settings import LaunchSettings
from launchers.state import history, queue
from launchers.state.circuit_breaker import kind_of
from launchers.state.history import AttemptRecord, HistoryReader, describe
from launchers.state.queue import Claim
from launchers.state.sweep_dir import SweepDir
from results.errors import InvalidResults
from results.tables import store
from workloads.contract import protocol

_HANG_ATTEMPTS = 2
_COMPARE_LIMIT_S = 60.0
"""Seconds that the comparison of losses may fail before a row is written without it."""
_MERGED_AFTER = 1_000
"""Number of new records after which a pilot copies all into one file; the last ones are copied at its end."""
_LEAST_PARTS = 25
_UNMERGED_SHARE = 8
_MOST_PARTS = 500
"""While pilots run, rows are merged when so many attempts have files of their own: one in `_UNMERGED_SHARE` of all
recorded ones, between `_LEAST_PARTS` and `_MOST_PARTS`. So each row is written anew only a few times."""
_PLAIN_OK = Outcome(outcome="ok", phase="done")
"""Outcome that also follows from the ranks' results alone, so it needs no file of its own."""


class AttemptRecorder:
    """Records attempts for one pilot."""

    def __init__(
        self,
        sweep: SweepDir,
        pilot_id: str,
        settings: LaunchSettings,
        context: rows.RunContext,
        records: HistoryReader,
        report: Callable[[str], None],
        patience: Patience,
    ) -> None:
        """``records``: earlier attempts known to the pilot. ``report`` takes a line for its log."""
        self._sweep = sweep
        self._pilot_id = pilot_id
        self._settings = settings
        self._context = context
        self._records = records
        self._report = report
        self._patience = patience
        self._packer = Packer()
        self._next_merge = _LEAST_PARTS
        """Number of recorded attempts at which the parts of the tables are looked at again."""

    def record(
        self,
        claim: Claim,
        attempt: Attempt,
        done: Execution,
        *,
        ended_at: float,
        gap_s: float | None = None,
        still_held: str | None = None,
    ) -> bool:
        """Write the row and move the point. False when the pilot had to stop before the row was written: then the claim
        stays, and the pilot that takes it over writes the row from the attempt's folder.

        ``ended_at``: seconds since the epoch. ``gap_s``: idle seconds before the attempt's first step. ``still_held``:
        device memory still in use after the attempt, as text.
        """
        try:
            comparison = self._compare(attempt, done)
        except Exception as error:  # the results cannot be interpreted
            comparison, done = None, internal_error(error)

        late = self._patience.until_done(
            lambda: self._record_late(claim, attempt, done.outcome), f"look for earlier results of {claim.stem}"
        )
        if late is None:
            return False

        def write() -> AttemptRecord:
            try:
                return self._write(claim, attempt, done, ended_at, gap_s, still_held, comparison, late)
            except OSError:
                raise
            except Exception as error:  # the results do not make a row
                return self._write(claim, attempt, internal_error(error), ended_at, None, still_held, None, late)

        record = self._patience.until_done(write, f"write the row of {attempt.attempt_id}")
        if record is None or not self._write_record(claim.stem, record) or not self.move(claim, record):
            return False
        self._report(describe(record))
        # A pilot that was taken for dead, or a process that could not be killed, may still write to the folder.
        if attempt.pilot_id == self._pilot_id and not done.survivors:
            self._packer.add(attempt.folder)
        self._merge_history(_MERGED_AFTER)
        self._merge_rows()
        return True

    def _write(
        self,
        claim: Claim,
        attempt: Attempt,
        done: Execution,
        ended_at: float,
        gap_s: float | None,
        still_held: str | None,
        comparison: loss_check.LossComparison | None,
        late: str,
    ) -> AttemptRecord:
        """Write the row, and return the record to write. Raises `OSError`; it may then be called again."""
        held = claim.held
        if not held:  # the pilot that took over the claim may have recorded an attempt
            self._records.refresh()
        outcome = _with_notes(done, still_held, held, late)
        if outcome != _PLAIN_OK:
            with contextlib.suppress(OSError):  # the file only helps a later pilot; the row matters more
                protocol.write_json(attempt.folder / "outcome.json", outcome)
        before = [one for one in self._records.of(claim.stem) if one.attempt_id != attempt.attempt_id]
        retry = wants_retry(outcome, before, self._settings)
        row = rows.attempt_row(
            attempt,
            self._context,
            outcome,
            done.results,
            ended_at=ended_at,
            will_retry=retry,
            gap_s=gap_s,
            comparison=comparison,
            rehearsed=done.rehearsed,
            repeat_of=late or answered_meanwhile(before, attempt),
        )
        store.write_attempt(self._sweep.path, row, rows.step_rows(attempt, done.results))
        return record_of_row(row, attempt, outcome, claim, ended_at)

    def _record_late(self, claim: Claim, attempt: Attempt, outcome: Outcome) -> str:
        """If the point would end with a failure of the infrastructure: write the row and the record of an earlier
        attempt that was measured in full after it had been recorded as failed, and return its id. Else ``""``. Raises
        `OSError`."""
        before = [one for one in self._records.of(claim.stem) if one.attempt_id != attempt.attempt_id]
        if not outcome.infrastructure or wants_retry(outcome, before, self._settings):
            return ""
        if known := next((one.attempt_id for one in before if was_late(one.outcome, one.evidence)), ""):
            return known
        try:
            late = late_result(self._sweep, claim.point, before)
            if late is None:
                return ""
            earlier, done = late.attempt, late.execution
            row = store.find_attempt(self._sweep.path, earlier.attempt_id)
            if row is not None and row["outcome"] == "ok":  # its pilot, or one that was interrupted here, wrote it
                return earlier.attempt_id if was_late(row["outcome"], row["evidence"]) else ""
            row = rows.attempt_row(
                earlier,
                self._context,
                done.outcome,
                done.results,
                ended_at=late.ended_at,
                will_retry=False,
                gap_s=late.record.gap_s,
                comparison=self._compare(earlier, done),
                rehearsed=done.rehearsed,
            )
            store.write_attempt(self._sweep.path, row, rows.step_rows(earlier, done.results))
            record = record_of_row(row, earlier, done.outcome, claim, late.ended_at)
        except OSError:
            raise
        except Exception as error:  # the results do not make a row; that of the failure stays
            self._report(f"earlier results of {claim.stem} are left out: {error}")
            return ""
        self.write_record(claim.stem, record)
        self._report(describe(record))
        return record.attempt_id

    def _write_record(self, stem: str, record: AttemptRecord) -> bool:
        """Write the record of an attempt whose row is written. False when the pilot had to stop before that."""

        def write() -> bool:
            self.write_record(stem, record)
            return True

        return self._patience.until_done(write, f"write the record of {record.attempt_id}") is not None

    def write_record(self, stem: str, record: AttemptRecord) -> None:
        """Write the record of an attempt whose row is written. Raises `OSError`."""
        history.write_record(self._sweep, stem, record)
        self._records.note(stem, record)

    def move(self, claim: Claim, record: AttemptRecord) -> bool:
        """Move the point of a recorded attempt to where it belongs. False when the pilot had to stop before that."""

        def move() -> bool:
            if not (queue.release(claim) if record.will_retry else queue.finish(claim, self._ends_as(record))):
                self._report(f"{record.attempt_id}: its claim had been taken over; the point may run twice")
            return True

        # The row is written: from here on a filesystem error must not lead to a second row.
        return self._patience.until_done(move, f"move the point of {record.attempt_id}") is not None

    def _ends_as(self, record: AttemptRecord) -> str:
        """The outcome of the point of a last attempt: ``ok`` after a failure of the infrastructure if another attempt
        has measured the point. Raises `OSError`."""
        row = store.find_attempt(self._sweep.path, record.attempt_id) if record.infrastructure else None
        return "ok" if row is not None and row["repeat_of"] else record.outcome

    def compact(self) -> None:
        """Pack the last folders, merge the table's parts into one file, and copy the records into one. The parts stay
        readable, so a failure is only reported."""
        self._packer.finish()
        self._merge_history()
        try:
            store.compact(self._sweep.path)
        except (OSError, InvalidResults) as error:
            self._report(f"the tables are not compacted (nothing is lost): {error}")

    def _merge_rows(self) -> None:
        """Have the rows merged if those of many attempts may be in parts of their own, whichever pilots wrote them."""
        if (recorded := self._records.files_read) >= self._next_merge:
            least = min(max(_LEAST_PARTS, recorded // _UNMERGED_SHARE), _MOST_PARTS)
            self._next_merge = recorded + least
            self._packer.add_merge(self._sweep.path, least)

    def _merge_history(self, least: int = 0) -> None:
        with contextlib.suppress(OSError):  # readers open the records' own files
            self._records.merge(least)

    def _compare(self, attempt: Attempt, done: Execution) -> loss_check.LossComparison | None:
        known_losses = [loss for loss in rows.losses_of(done.results) if loss is not None]
        norms = [norm for norm in rows.grad_norms_of(done.results) if norm is not None]
        if done.outcome.outcome != "ok" or attempt.task.method != "measured" or not known_losses:
            return None

        def compare() -> loss_check.LossComparison:
            return loss_check.compare(
                self._sweep.losses, attempt.point.experiment, attempt.attempt_id, known_losses, norms
            )

        task = f"compare the losses of {attempt.attempt_id}"
        comparison = self._patience.until_done(compare, task, limit_s=_COMPARE_LIMIT_S)
        if comparison is None:
            self._report(f"{attempt.attempt_id}: losses are not compared: {self._patience.failure}")
        return comparison


def wants_retry(outcome: Outcome, before: Sequence[AttemptRecord], settings: LaunchSettings) -> bool:
    """Whether the point runs again: after a failure of the infrastructure until there are ``settings.max_attempts`` of
    them, after a hang once, after any other failure never. Cancelled and preempted attempts do not count."""
    if outcome.outcome in ("cancelled", "preempted"):
        return True
    if outcome.outcome == "hang":
        return 1 + sum(record.outcome == "hang" for record in before) < _HANG_ATTEMPTS
    if outcome.infrastructure:
        failed = sum(record.infrastructure or was_late(record.outcome, record.evidence) for record in before)
        return 1 + failed < settings.max_attempts
    return False


def answered_meanwhile(before: Sequence[AttemptRecord], attempt: Attempt) -> str | None:
    """The id of an attempt that succeeded at this point while this one ran, because one of the two pilots was taken for
    dead. A success before this attempt began does not count: in that case a user has requeued the point."""
    good = (record for record in before if record.outcome == "ok" and record.ended_at > attempt.started_at)
    return next((record.attempt_id for record in good), None)


def _with_notes(done: Execution, still_held: str | None, held: bool, late: str) -> Outcome:
    notes = [still_held] if still_held is not None else []
    if done.survivors:
        notes.append(f"processes {', '.join(done.survivors)} could not be killed")
    if not held:
        notes.append("the claim on this point was taken over meanwhile: it may have run twice")
    if late:
        notes.append(f"{late} had measured this point in full: it may have run twice")
    if not notes:
        return done.outcome
    evidence = "; ".join([*([done.outcome.evidence] if done.outcome.evidence else []), *notes])
    return dataclasses.replace(done.outcome, evidence=evidence)


def record_of_row(
    row: Mapping[str, Any], attempt: Attempt, outcome: Outcome, claim: Claim, ended_at: float
) -> AttemptRecord:
    return AttemptRecord(
        attempt_id=attempt.attempt_id,
        attempt_number=attempt.number,
        pilot_id=claim.pilot_id,
        experiment_id=attempt.point.experiment.id,
        world_size=attempt.point.experiment.world_size,
        outcome=outcome.outcome,
        phase=outcome.phase,
        phase_step=outcome.phase_step,
        failed_rank=outcome.failed_rank,
        evidence=outcome.evidence,
        infrastructure=outcome.infrastructure,
        will_retry=row["will_retry"],
        method=attempt.task.method,
        started_at=attempt.started_at,
        ended_at=ended_at,
        gap_s=row["gap_s"],
        step_time_s=row["step_time_s"],
        tokens_per_s_per_gpu=row["tokens_per_s_per_gpu"],
        peak_allocated_bytes=row["peak_allocated_bytes"],
        nodes=attempt.nodes,
        failed_node=attempt.node_of(outcome.failed_rank) if outcome.failed_rank is not None else None,
        kind=kind_of(attempt.point.experiment, max(1, len(attempt.nodes))),
        backend=row["backend"],
    )
