"""Columns of an attempt that show how its timed steps, ranks and devices differ. Unknown stays None."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import RankResult


def step_times(results: Mapping[int, RankResult]) -> dict[int, float]:
    """Time of each timed step that every rank has measured, on its slowest rank, in seconds by step."""
    by_rank = [{s.step: s.step_time_s for s in result.steps if not s.is_warmup} for result in results.values()]
    common = set(by_rank[0]).intersection(*by_rank[1:]) if by_rank else set()
    return {step: max(times[step] for times in by_rank) for step in sorted(common)}


def timed_steps(results: Mapping[int, RankResult]) -> int | None:
    """Number of timed steps; None where no rank timed any, as on FakeTensors."""
    return max((sum(not step.is_warmup for step in result.steps) for result in results.values()), default=0) or None


def warmup_steps(results: Mapping[int, RankResult], asked: MeasureSpec) -> int:
    """Number of steps before the timed ones: fewer than requested in a slow run that ended early."""
    if timed_steps(results) is None:
        return asked.warmup_steps
    return max(sum(step.is_warmup for step in result.steps) for result in results.values())


def spread_columns(results: Mapping[int, RankResult]) -> dict[str, Any]:
    """Spread over the timed steps and over the ranks of a run that all ranks have measured."""
    times = step_times(results)
    if not times:
        return {}
    durations = list(times.values())
    columns: dict[str, Any] = {
        "step_time_mean_s": statistics.fmean(durations),
        "step_time_std_s": statistics.stdev(durations) if len(durations) > 1 else None,
        "timed_wall_s": max((r.timed_wall_s for r in results.values() if r.timed_wall_s is not None), default=None),
        "sm_clock_median_step_mhz": _clock_at_median(results, times),
    }
    busy = {rank: median for rank, result in results.items() if (median := _forward_backward(result)) is not None}
    if busy:
        slowest = max(busy, key=lambda rank: (busy[rank], -rank))
        columns |= {"slowest_rank": slowest, "slowest_forward_backward_s": busy[slowest]}
    return columns


def energy_per_token_mj(row: Mapping[str, Any]) -> float | None:
    """Millijoules per token over all devices, from a measured row's power and its throughput per device."""
    power, rate = row["power_w"], row["tokens_per_s_per_gpu"]
    return 1e3 * power / rate if row["method"] == "measured" and power is not None and rate else None


def nccl_environment(results: Mapping[int, RankResult]) -> str | None:
    """The ranks' NCCL variables as JSON: one text where all ranks agree, else a list of the values (null: not set
    there)."""
    environments = [result.nccl_environment for result in results.values() if result.nccl_environment is not None]
    if not environments:
        return None
    values = {
        name: {env.get(name) for env in environments} for name in sorted({n for env in environments for n in env})
    }
    return json.dumps({name: _value(seen) for name, seen in values.items()})


def nccl_transports(results: Mapping[int, RankResult]) -> list[str] | None:
    """The transports of all ranks' NCCL connections, each once; None if no rank knows its own."""
    known = [result.nccl_transports for result in results.values() if result.nccl_transports is not None]
    return sorted({name for names in known for name in names}) if known else None


def _value(seen: set[str | None]) -> Any:
    return next(iter(seen)) if len(seen) == 1 else sorted(seen, key=lambda value: (value is None, value or ""))


def _clock_at_median(results: Mapping[int, RankResult], times: Mapping[int, float]) -> float | None:
    """Mean over ranks of the device clock in the step whose time is nearest to the median."""
    median = statistics.median(times.values())
    nearest = min(times, key=lambda step: (abs(times[step] - median), step))
    clocks = [
        step.sm_clock_mhz
        for result in results.values()
        for step in result.steps
        if step.step == nearest and step.sm_clock_mhz is not None
    ]
    return statistics.fmean(clocks) if clocks else None


def _forward_backward(result: RankResult) -> float | None:
    times = [s.forward_backward_s for s in result.steps if not s.is_warmup and s.forward_backward_s is not None]
    return statistics.median(times) if times else None
