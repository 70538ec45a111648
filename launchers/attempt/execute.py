"""Runs one attempt: all ranks of a measured point at once, or the few ranks of a rehearsal one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.attempt import outcome as oc
from launchers.attempt import rows
from launchers.attempt.attempt import Attempt
from launchers.attempt.outcome import Outcome, StopReason
from launchers.attempt.watchdog import Progress, WatchResult, watch
from launchers.node.rank_group import RankGroup, StartFailed
from launchers.settings import LaunchSettings
from results.shared_filesystem.patience import patiently
from workloads.contract import protocol
from workloads.contract.protocol import RankResult
from workloads.contract.stages import RehearsedTimes, assemble, rehearsed_ranks, stage_key
from workloads.spec.mesh import coordinates

FILES_LIMIT_S = 600.0
"""Seconds to wait for a filesystem on which the files of the ranks cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Result of running one attempt."""

    outcome: Outcome
    results: Mapping[int, RankResult]
    """Results of the ranks that finished, by rank."""
    rehearsed: RehearsedTimes | None = None
    survivors: tuple[str, ...] = ()
    """Processes that did not end when they were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Callbacks through which an execution talks to the pilot that runs it."""

    start: Callable[[Sequence[int]], RankGroup]
    """Start these ranks. Raises `StartFailed` when a rank could not be started; the ranks already started are killed
    first."""
    stop_reason: Callable[[], StopReason | None]
    """Reason to stop the attempt now; None: continue."""
    on_progress: Callable[[Progress], None]
    """Called about five times a second."""
    wait_until_free: Callable[[], str | None]
    """Wait for device memory between two ranks of a rehearsal. Returns a line about memory still in use, or None."""


def execute(attempt: Attempt, settings: LaunchSettings, control: Control, stages: Path) -> Execution:
    """Run the attempt to its end. Afterwards no process of the attempt is left, except `Execution.survivors`.

    ``stages``: folder with the stages that earlier rehearsals measured.
    """
    if attempt.task.method == "measured":
        return _run(attempt, attempt.ranks(), settings, control)
    return _rehearse(attempt, settings, control, stages)


def internal_error(error: Exception) -> Execution:
    """The execution to record when the launcher itself has failed: the row says so, and the sweep continues."""
    lines = traceback.format_exception(error)
    outcome = Outcome(
        outcome="crash",
        evidence=f"error of the launcher, not of the point: {''.join(lines)[-1500:]}",
        infrastructure=isinstance(error, OSError),
    )
    return Execution(outcome=outcome, results={})


def _run(attempt: Attempt, ranks: Sequence[int], settings: LaunchSettings, control: Control) -> Execution:
    """Start these ranks, watch them until they end and classify the outcome. The results include ranks rehearsed
    earlier."""
    try:
        group = control.start(ranks)
    except StartFailed as error:
        return _not_started(error)
    watched = _watch(attempt, group, settings, control)
    try:
        results, outcome = _judge(attempt, ranks, watched, control)
    except Exception as error:  # do not lose track of processes that could not be killed
        return dataclasses.replace(internal_error(error), survivors=watched.survivors)
    return Execution(outcome=outcome, results=results, survivors=watched.survivors)


def _rehearse(attempt: Attempt, settings: LaunchSettings, control: Control, stages: Path) -> Execution:
    """Run the ranks that represent all others, each alone on the first device. A stage that an earlier point has
    already rehearsed is reused."""
    experiment = attempt.point.experiment
    chosen = rehearsed_ranks(experiment)
    outcome = Outcome(outcome="ok", phase="done")
    for number, rank in enumerate(chosen, start=1):
        stage = _named(control, f"stage {number} of {len(chosen)}")
        cached = stages / f"{stage_key(attempt.task, rank)}.json"
        if _reuse_stage(cached, attempt, rank):
            continue
        done = _run(attempt, [rank], settings, stage)
        outcome = done.outcome
        if outcome.outcome != "ok" or done.survivors:
            return done
        with contextlib.suppress(OSError):  # without this file the next point with this stage rehearses it again
            protocol.write_json(cached, done.results[rank])
        if rank != chosen[-1] and (in_use := control.wait_until_free()) is not None:
            failed = Outcome(outcome="crash", phase="teardown", failed_rank=rank, evidence=in_use, infrastructure=True)
            return Execution(outcome=failed, results=done.results)
    results = patiently(attempt.results, limit_s=FILES_LIMIT_S)
    peaks = [peak for result in results.values() if (peak := rows.peak_bytes(result)) is not None]
    cluster = settings.cluster
    outcome = oc.check_target_memory(outcome, max(peaks, default=None), cluster.usable_bytes, cluster.name)
    return Execution(outcome=outcome, results=results, rehearsed=assemble(experiment, cluster, results))


def _named(control: Control, part: str) -> Control:
    """The control of one part of an attempt: its progress says which part it is."""
    return dataclasses.replace(
        control, on_progress=lambda progress: control.on_progress(dataclasses.replace(progress, part=part))
    )


def _judge(
    attempt: Attempt, ranks: Sequence[int], watched: WatchResult, control: Control
) -> tuple[dict[int, RankResult], Outcome]:
    """Results of ``ranks`` and of earlier rehearsed ranks, and the outcome of ``ranks``."""
    measured = attempt.task.method == "measured"

    def judge() -> tuple[dict[int, RankResult], Outcome]:
        results = attempt.results()
        return results, oc.classify(attempt.folder, ranks, watched, results, control.stop_reason(), measured=measured)

    return patiently(judge, limit_s=FILES_LIMIT_S)


def _not_started(error: StartFailed) -> Execution:
    failed = Outcome(
        outcome="node_failure" if error.node_lost else "crash",
        phase="spawn",
        failed_rank=error.rank,
        evidence=str(error),
        infrastructure=True,
    )
    return Execution(outcome=failed, results={}, survivors=error.survivors)


def _watch(attempt: Attempt, group: RankGroup, settings: LaunchSettings, control: Control) -> WatchResult:
    deadline_s = settings.point_deadline_s or attempt.point.deadline_s
    return watch(
        attempt.folder,
        group,
        settings,
        deadline_s=max(0.0, deadline_s - (attempt.clock() - attempt.started_at)),
        expected_step_s=attempt.point.predicted_step_time_s,
        stop_asked=lambda: control.stop_reason() is not None,
        on_progress=control.on_progress,
    )


def _reuse_stage(cached: Path, attempt: Attempt, rank: int) -> bool:
    """Use ``cached``, the result of an equal stage, as the result of ``rank``. False when there is no cached result, or
    it lacks the requested profile."""
    try:
        if not cached.exists():
            return False
        protocol.write_json(protocol.result_path(attempt.folder, rank), protocol.read_json(cached))
        result = protocol.read_result(attempt.folder, rank)
        assert result is not None
    except (OSError, ValueError, TypeError, KeyError):
        protocol.result_path(attempt.folder, rank).unlink(missing_ok=True)
        return False
    if result.breakdown is None and attempt.task.measure.profile and attempt.task.device == "cuda":
        protocol.result_path(attempt.folder, rank).unlink()
        return False
    position = coordinates(attempt.point.experiment, rank)
    data = position["dp_replicate"] * attempt.point.experiment.dp_shard + position["dp_shard"]
    own_result = dataclasses.replace(result, rank=rank, coordinates={**position, "dp": data})
    protocol.write_json(protocol.result_path(attempt.folder, rank), own_result)
    return True
