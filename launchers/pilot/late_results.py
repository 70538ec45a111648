"""Finds attempts that were recorded as a failure of the infrastructure and measured in full afterwards: their pilot was
taken for dead, went on, and ended before it wrote the row again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launchers.attempt import outcome as oc
from launchers.attempt.attempt import START, Attempt, reopen_attempt
from launchers.attempt.execute import Execution, internal_error
from launchers.attempt.outcome import Outcome
from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import Point, SweepDir
from results.shared_filesystem import packed_folder
from workloads.contract import protocol
from workloads.contract.protocol import RankResult
from workloads.contract.stages import assemble, rehearsed_ranks

_WHY = "recorded again: its pilot had been taken for dead"


@dataclass(frozen=True, slots=True)
class LateResult:
    """An attempt that was measured in full after it had been recorded as failed."""

    attempt: Attempt
    execution: Execution
    record: AttemptRecord
    """The earlier record."""
    ended_at: float


def late_result(sweep: SweepDir, point: Point, records: Iterable[AttemptRecord]) -> LateResult | None:
    """The first of the recorded attempts at a point that is recorded as a failure of the infrastructure and whose
    folder, loose or packed, holds the results of all its ranks now. Raises `OSError`."""
    for record in records:
        if not record.infrastructure or record.method != point.method:
            continue
        attempt = reopen_attempt(sweep, point, record.attempt_id)
        if attempt is None or attempt.task.method != point.method:
            continue
        ranks, results = needed_ranks(attempt), attempt.results()
        outcome = oc.classify_abandoned(ranks, results, _WHY, None, None)
        execution = execution_of(attempt, outcome, results)
        if execution.outcome.outcome == "ok":
            written = packed_folder.written_at(attempt.folder)
            last = max(written[protocol.result_path(attempt.folder, rank).name] for rank in ranks)
            return LateResult(attempt, execution, record, attempt.started_at + max(0.0, last - written[START]))
    return None


def was_late(outcome: str, evidence: str | None) -> bool:
    """Whether a row or a record with these values is that of a `LateResult`, recorded again."""
    return outcome == "ok" and _WHY in (evidence or "")


def needed_ranks(attempt: Attempt) -> Sequence[int]:
    """The ranks whose results make the attempt complete."""
    return attempt.ranks() if attempt.task.method == "measured" else rehearsed_ranks(attempt.point.experiment)


def execution_of(attempt: Attempt, outcome: Outcome, results: dict[int, RankResult]) -> Execution:
    """What an attempt gave that this process did not run, with its stages put together if it is a whole rehearsal."""
    try:
        complete = attempt.task.method != "measured" and all(rank in results for rank in needed_ranks(attempt))
        rehearsed = assemble(attempt.point.experiment, attempt.task.cluster, results) if complete else None
    except Exception as error:
        return internal_error(error)
    return Execution(outcome=outcome, results=results, rehearsed=rehearsed)
