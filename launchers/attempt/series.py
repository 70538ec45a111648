"""Columns of an attempt that hold a list: one value per pipeline stage or per step. Unknown stays None."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from workloads.contract.protocol import RankResult
from workloads.spec.experiment import Experiment


def time_columns(experiment: Experiment, results: Mapping[int, RankResult]) -> dict[str, list[float | None]]:
    """Seconds per stage, as means over its ranks: of one micro-batch, and of a whole step including waiting. A column
    that no rank measured is left out."""
    columns = {
        "forward_by_stage_s": _mean_by_stage(experiment, results, lambda result: result.forward_s),
        "backward_by_stage_s": _mean_by_stage(experiment, results, lambda result: result.backward_s),
        "forward_backward_by_stage_s": _mean_by_stage(
            experiment, results, lambda result: _median(result, "forward_backward_s")
        ),
        "pipeline_idle_by_stage_s": _mean_by_stage(
            experiment, results, lambda result: _median(result, "pipeline_idle_s")
        ),
    }
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def peaks_by_stage(experiment: Experiment, peaks: Mapping[int, int]) -> list[int | None]:
    """For each stage the highest of the ``peaks`` of its ranks, bytes."""
    stages: list[int | None] = [None] * experiment.pp
    for rank, peak in peaks.items():
        stage = _stage(experiment, rank)
        stages[stage] = max(stages[stage] or 0, peak)
    return stages


def peaks_by_step(results: Mapping[int, RankResult]) -> dict[str, list[int] | None]:
    """Bytes of each step from the first, on the rank with the most. ``results``: of every rank expected to report."""
    return {
        "peak_allocated_by_step_bytes": _highest_by_step(results, "peak_allocated_bytes"),
        "peak_reserved_by_step_bytes": _highest_by_step(results, "peak_reserved_bytes"),
    }


def _stage(experiment: Experiment, rank: int) -> int:
    return rank // (experiment.world_size // experiment.pp)


def _mean_by_stage(
    experiment: Experiment, results: Mapping[int, RankResult], read: Callable[[RankResult], float | None]
) -> list[float | None]:
    by_stage: list[list[float]] = [[] for _ in range(experiment.pp)]
    for rank, result in results.items():
        value = read(result)
        if value is not None:
            by_stage[_stage(experiment, rank)].append(value)
    return [statistics.fmean(values) if values else None for values in by_stage]


def _median(result: RankResult, name: str) -> float | None:
    values = [getattr(step, name) for step in result.steps if not step.is_warmup]
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def _highest_by_step(results: Mapping[int, RankResult], name: str) -> list[int] | None:
    """The highest value per step. None unless every rank has its steps from 0 on: the missing rank may have used
    more."""
    by_rank = [{step.step: getattr(step, name) for step in result.steps} for result in results.values()]
    highest: list[int] = []
    while by_rank and all(steps.get(len(highest)) is not None for steps in by_rank):
        highest.append(max(steps[len(highest)] for steps in by_rank))
    return highest or None
