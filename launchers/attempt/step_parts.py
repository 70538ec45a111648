"""Columns of an attempt: the traffic of a step, and how the time of its profiled step divides. Unknown stays None."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launchers.attempt.attempt import Attempt
from workloads.contract.protocol import Breakdown, RankResult, RoutingRecord
from workloads.costs.traffic.sent import Traffic, step_traffic
from workloads.spec.mesh import rank_of

_PARTS = (
    *("step_time_s", "matmul_s", "attention_s", "memory_bound_s", "optimizer_s", "comm_exposed_s", "comm_hidden_s"),
    *("bubble_s", "launch_gaps_s"),
)


def traffic_columns(attempt: Attempt, results: Mapping[int, RankResult]) -> dict[str, Any]:
    """Traffic counted in a measured run. A rehearsal runs fewer micro-batches and takes its stages from other points,
    so its row has the closed form for the nodes of the target cluster."""
    experiment = attempt.point.experiment
    firsts = [rank_of(experiment, pp=stage) for stage in range(experiment.pp)]
    if attempt.task.method == "measured":
        source, sent = "counted", [results[rank].traffic if rank in results else None for rank in firsts]
    elif results:
        devices = attempt.task.cluster.devices_per_node
        source, sent = "closed_form", [step_traffic(experiment, rank, devices) for rank in firsts]
    else:
        return {}
    counted = [traffic for traffic in sent if traffic is not None]
    return {"traffic": _entries(counted), "traffic_source": source} if len(counted) == len(firsts) else {}


def breakdown_columns(attempt: Attempt, results: Mapping[int, RankResult]) -> dict[str, Any]:
    """Means over the pipeline stages; one rank per stage is profiled. Empty where a stage has no profile."""
    columns: dict[str, Any] = {}
    if results.get(0) is not None and results[0].trace is not None:
        columns["trace_file"] = f"attempts/{attempt.attempt_id}/{results[0].trace}"
    breakdowns = [result.breakdown for result in results.values() if result.breakdown is not None]
    if len(breakdowns) == attempt.point.experiment.pp:
        for part in _PARTS:
            columns[f"breakdown_{part}"] = statistics.fmean(getattr(breakdown, part) for breakdown in breakdowns)
        columns["breakdown_comm_by_axis"] = _by_axis(breakdowns)
    return columns


def routing_columns(results: Mapping[int, RankResult]) -> dict[str, Any]:
    """Means over the ranks that hold routed experts: over pipeline stages, since all ranks of a stage have equal
    values."""
    routings = [result.routing for result in results.values() if result.routing is not None]
    if not routings:
        return {}
    names = [field.name for field in dataclasses.fields(RoutingRecord)]
    values = {name: [getattr(record, name) for record in routings] for name in names}
    return {name: None if None in of_all else statistics.fmean(of_all) for name, of_all in values.items()}


def _entries(stages: Sequence[Sequence[Traffic]]) -> list[dict[str, Any]]:
    return [{"stage": stage, **dataclasses.asdict(sent)} for stage, every in enumerate(stages) for sent in every]


def _by_axis(breakdowns: Sequence[Breakdown]) -> list[dict[str, Any]]:
    """Mean over the ranks for every axis. A rank without an axis counts as zero time."""
    axes = dict.fromkeys(time.axis for breakdown in breakdowns for time in breakdown.comm_by_axis)
    entries = []
    for axis in axes:
        times = [time for breakdown in breakdowns for time in breakdown.comm_by_axis if time.axis == axis]
        exposed = [time.exposed_s for time in times if time.exposed_s is not None]
        entries.append(
            {
                "axis": axis,
                "exposed_s": sum(exposed) / len(breakdowns) if len(exposed) == len(times) else None,
                "hidden_s": sum(time.hidden_s for time in times) / len(breakdowns),
            }
        )
    return entries
