"""Turns an attempt into a row of the table ``attempts`` and its steps into rows of ``steps``. Unknown stays None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from launchers.attempt import phases, series, spread, step_parts
from launchers.attempt.attempt import Attempt
from launchers.attempt.loss_check import LossComparison
from launchers.attempt.outcome import Outcome
from results.tables.schema import ATTEMPTS, MEASUREMENT_VERSION, SCHEMA_VERSION, STEPS
from workloads.contract.protocol import RankResult, StepRecord
from workloads.contract.stages import RehearsedTimes
from workloads.costs.shape.flops import flops_per_token, hardware_flops_per_token
from workloads.costs.shape.params import matmul_params, num_params
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.record import config_columns

_T = TypeVar("_T")
_STEP_FIELDS = (
    "step_time_s",
    "forward_backward_s",
    "reduce_exposed_s",
    "optimizer_s",
    "pipeline_idle_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "allocator_retries",
    "sm_clock_mhz",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Columns that are the same for every attempt of a pilot."""

    sweep: str
    launcher: str
    cluster: ClusterSpec
    provenance: Mapping[str, Any]
    """``git_commit``, ``git_dirty``, ``ultrasweep_version``, ``python_version``, ``command``."""
    pilot_id: str
    job: str | None = None


def attempt_row(
    attempt: Attempt,
    context: RunContext,
    outcome: Outcome,
    results: Mapping[int, RankResult],
    *,
    ended_at: float,
    will_retry: bool,
    gap_s: float | None,
    comparison: LossComparison | None,
    rehearsed: RehearsedTimes | None,
    repeat_of: str | None = None,
) -> dict[str, Any]:
    """The row of ``attempt``; it has every column of the table as a key."""
    experiment = attempt.point.experiment
    measured = attempt.task.method == "measured"
    row: dict[str, Any] = dict.fromkeys(ATTEMPTS.names)
    row |= config_columns(experiment)
    row |= {key: value for key, value in context.provenance.items() if key in row}
    row |= {
        "attempt_id": attempt.attempt_id,
        "schema_version": SCHEMA_VERSION,
        "measurement_version": MEASUREMENT_VERSION,
        "sweep": context.sweep,
        "grid": attempt.point.grid,
        "method": attempt.task.method,
        "attempt_number": attempt.number,
        "started_at": datetime.fromtimestamp(attempt.started_at, UTC),
        "ended_at": datetime.fromtimestamp(ended_at, UTC),
        "duration_s": phases.seconds_between(attempt.started_at, ended_at),
        "warmup_steps": spread.warmup_steps(results, attempt.task.measure),
        "timed_steps": spread.timed_steps(results) or attempt.task.measure.timed_steps,
        "outcome": outcome.outcome,
        "phase": outcome.phase,
        "phase_step": outcome.phase_step,
        "failed_rank": outcome.failed_rank,
        "evidence": outcome.evidence,
        "will_retry": will_retry,
        "teardown_hung": outcome.teardown_hung,
        "repeat_of": repeat_of,
        "predicted_peak_bytes": attempt.point.predicted_peak_bytes,
        "predicted_step_time_s": attempt.point.predicted_step_time_s,
        "predicted_step_time_low_s": attempt.point.predicted_step_time_low_s,
        "predicted_step_time_high_s": attempt.point.predicted_step_time_high_s,
        "gap_s": gap_s,
        "launcher": context.launcher,
        "cluster": context.cluster.name,
        "backend": context.cluster.backend,
        "nodes": list(attempt.nodes) or None,
        "scheduler_job": context.job,
        "pilot_id": context.pilot_id,
        "device_ids": list(attempt.device_ids) if attempt.device_ids is not None else None,
        "log_dir": f"attempts/{attempt.attempt_id}",
    }
    row |= attempt.node_check or {}
    row |= _flop_columns(experiment)
    row |= _memory(experiment, results)
    row |= _device(results)
    row |= phases.phase_columns(attempt, results, ended_at)
    row |= step_parts.traffic_columns(attempt, results)
    row |= step_parts.routing_columns(results)
    whole = len(results) == experiment.world_size
    if whole or not measured:
        row |= series.peaks_by_step(results)
    if measured and whole:
        row |= _times(experiment, results) | spread.spread_columns(results) | _losses(results)
        row |= series.time_columns(experiment, results) | step_parts.breakdown_columns(attempt, results)
        if comparison is not None:
            row["loss_reference_id"] = comparison.reference_id
            row["loss_max_difference"] = comparison.max_difference
            row["grad_norm_max_difference"] = comparison.max_norm_difference
            row["loss_agrees"] = comparison.agrees
    if rehearsed is not None:
        row["step_time_s"] = rehearsed.step_time_s
        row["compute_time_s"] = rehearsed.compute_time_s
        row["communication_time_s"] = rehearsed.communication_time_s
        row["time_source"] = rehearsed.time_source
    row |= _rates(experiment, row, context.cluster)
    row["energy_per_token_mj"] = spread.energy_per_token_mj(row)
    return {name: _known(value) for name, value in row.items()}


def step_rows(attempt: Attempt, results: Mapping[int, RankResult]) -> list[dict[str, Any]]:
    """One row per step and rank. Steps of a rehearsal have neither throughput nor loss: their batch is shortened and
    the other ranks are simulated."""
    experiment = attempt.point.experiment
    measured = attempt.task.method == "measured"
    rows = []
    for rank, result in sorted(results.items()):
        for step in result.steps:
            row: dict[str, Any] = dict.fromkeys(STEPS.names)
            row |= {
                "attempt_id": attempt.attempt_id,
                "experiment_id": experiment.id,
                "measurement_version": MEASUREMENT_VERSION,
                "rank": rank,
                "dp_rank": result.coordinates.get("dp"),
                "tp_rank": result.coordinates.get("tp"),
                "pp_rank": result.coordinates.get("pp"),
                "step": step.step,
                "is_warmup": step.is_warmup,
            }
            for name in _STEP_FIELDS:
                row[name] = getattr(step, name)
            if measured:
                measured_once = ("loss", "mtp_loss", "grad_norm", "loss_scale", "skipped")
                row |= {name: getattr(step, name) for name in measured_once}
                row["tokens_per_s_per_gpu"] = _ratio(
                    experiment.tokens_per_step, _times_or_none(step.step_time_s, experiment.world_size)
                )
            rows.append({name: _known(value) for name, value in row.items()})
    return rows


def losses_of(results: Mapping[int, RankResult]) -> list[float | None]:
    """Loss of each step, from the first on. Every rank has the same losses, so any rank that recorded them will do."""
    return _per_step(results, "loss")


def grad_norms_of(results: Mapping[int, RankResult]) -> list[float | None]:
    """Gradient norm of each step, chosen as in `losses_of`."""
    return _per_step(results, "grad_norm")


def peak_bytes(result: RankResult) -> int | None:
    """Peak allocated memory of one rank in bytes: over the timed steps, or else the total of the memory probe."""
    peaks = _present(step.peak_allocated_bytes for step in _timed(result))
    if peaks:
        return max(peaks)
    at_peak = result.memory_at_peak
    if at_peak is None:
        return None
    return at_peak.parameters_bytes + at_peak.gradients_bytes + at_peak.optimizer_bytes + at_peak.activations_bytes


def _times(experiment: Experiment, results: Mapping[int, RankResult]) -> dict[str, Any]:
    """Step times, each of its slowest rank, and times of the parts of a step: means of the ranks' medians."""
    per_step = list(spread.step_times(results).values())
    columns: dict[str, Any] = {}
    if per_step:
        columns = {
            "step_time_s": statistics.median(per_step),
            "step_time_min_s": min(per_step),
            "step_time_max_s": max(per_step),
            "time_source": "measured",
        }
    for name in ("forward_backward_s", "reduce_exposed_s", "optimizer_s", "pipeline_idle_s"):
        medians = [
            statistics.median(values)
            for result in results.values()
            if (values := _present(getattr(step, name) for step in _timed(result)))
        ]
        columns[name] = statistics.fmean(medians) if medians else None
    if experiment.pp == 1:
        columns["pipeline_idle_s"] = columns["pipeline_idle_s"] or 0.0
    return columns


def _losses(results: Mapping[int, RankResult]) -> dict[str, Any]:
    losses, norms = losses_of(results), grad_norms_of(results)
    scales, skipped = (_per_step(results, name) for name in ("loss_scale", "skipped"))
    return {
        "loss_scale": scales[-1] if scales else None,
        "skipped_steps": sum(map(bool, skipped)) if skipped else None,
        "losses": [_known(loss) for loss in losses] or None,
        "grad_norms": [_known(norm) for norm in norms] or None,
    }


def _per_step(results: Mapping[int, RankResult], name: str) -> list[float | None]:
    by_step: dict[int, float | None] = {}
    for result in results.values():
        for step in result.steps:
            value = getattr(step, name)
            if by_step.get(step.step) is None:
                by_step[step.step] = value
    values = [by_step[step] for step in sorted(by_step)]
    return values if any(value is not None for value in values) else []


def _rates(experiment: Experiment, row: Mapping[str, Any], cluster: ClusterSpec) -> dict[str, Any]:
    """Throughput and utilization, from the step time and the FLOPs already in ``row``. Utilization is FLOP/s per device
    over the device's peak; ``mfu_palm`` counts FLOPs as PaLM does (arXiv:2204.02311, appendix B)."""
    tokens_per_s = _ratio(experiment.tokens_per_step, row["step_time_s"])
    per_gpu = _ratio(tokens_per_s, experiment.world_size)
    peak, source = _peak_flops(experiment, row["device_name"], cluster)
    columns: dict[str, Any] = {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": per_gpu,
        "peak_flops": peak,
        "peak_flops_source": source,
    }
    if per_gpu is not None and peak is not None:
        for column, flops in (
            ("mfu_palm", "palm"),
            ("mfu_causal", "causal"),
            ("mfu_playbook", "playbook"),
            ("hfu", "hardware"),
        ):
            columns[column] = row[f"flops_per_token_{flops}"] * per_gpu / peak
    return columns


def _peak_flops(
    experiment: Experiment, device_name: str | None, cluster: ClusterSpec
) -> tuple[float | None, str | None]:
    """The device's peak FLOP/s and its source. No peak, but a reason, if the ranks ran on another device than the
    cluster file describes, or if the file has no peak for the precision."""
    driver_names = cluster.device.driver_names
    if cluster.backend == "cuda" and device_name is not None and driver_names and device_name not in driver_names:
        return None, f"none: ran on {device_name}, cluster {cluster.name} describes {cluster.device.name}"
    peak = cluster.device.peak_of(experiment.precision)
    if peak is None:
        has = ", ".join(cluster.device.peak_flops) or "none"
        return (
            None,
            f"none: the file of cluster {cluster.name} has no peak_flops for {experiment.precision}; it has {has}",
        )
    return peak, cluster.device.source or None


def _flop_columns(experiment: Experiment) -> dict[str, Any]:
    model, seq_len = experiment.model, experiment.attended_length
    return {
        "num_params": num_params(model),
        "num_matmul_params": matmul_params(model),
        "flops_per_token_palm": flops_per_token(model, seq_len, "palm"),
        "flops_per_token_causal": flops_per_token(model, seq_len, "causal"),
        "flops_per_token_playbook": flops_per_token(model, seq_len, "playbook", pp=experiment.pp),
        "flops_per_token_hardware": hardware_flops_per_token(experiment),
    }


def _memory(experiment: Experiment, results: Mapping[int, RankResult]) -> dict[str, Any]:
    peaks = {rank: peak for rank, result in results.items() if (peak := peak_bytes(result)) is not None}
    reserved = _present(step.peak_reserved_bytes for result in results.values() for step in _timed(result))
    retries = _present(step.allocator_retries for result in results.values() for step in result.steps)
    columns: dict[str, Any] = {
        "peak_reserved_bytes": max(reserved, default=None),
        "allocator_retries": sum(retries) if retries else None,
    }
    if not peaks:
        return columns
    highest = min(rank for rank, peak in peaks.items() if peak == max(peaks.values()))
    columns |= {"peak_allocated_bytes": peaks[highest], "peak_rank": highest}
    columns["peak_allocated_by_stage_bytes"] = series.peaks_by_stage(experiment, peaks)
    if (at_peak := results[highest].memory_at_peak) is not None:
        for category in ("parameters", "gradients", "optimizer", "activations"):
            columns[f"memory_{category}_bytes"] = getattr(at_peak, f"{category}_bytes")
    return columns


def _device(results: Mapping[int, RankResult]) -> dict[str, Any]:
    if not results:
        return {}
    every = [results[rank] for rank in sorted(results)]
    first = every[0]
    power = _present(result.device_state.power_w for result in every)
    limits = _present(result.device_state.power_limit_w for result in every)
    clocks = _present(result.device_state.sm_clock_mhz for result in every)
    heat = _present(result.device_state.temperature_c for result in every)
    reasons = _present(result.device_state.throttle_reasons for result in every)
    names = sorted({reason for text in reasons for reason in text.split(",") if reason})
    ids = [result.device_id for result in every if result.device_id is not None]
    columns = {
        "power_w": statistics.fmean(power) if power else None,
        "power_limit_w": min(limits, default=None),
        "nccl_environment": spread.nccl_environment(results),
        "nccl_transports": spread.nccl_transports(results),
        "sm_clock_mhz": statistics.fmean(clocks) if clocks else None,
        "temperature_c": max(heat, default=None),
        "host_launch_s": max(_present(result.host_launch_s for result in every), default=None),
        "cuda_graph_run": "+".join(sorted(set(_present(result.cuda_graph for result in every)))) or None,
        "cuda_graph_reason": next(iter(_present(result.not_captured for result in every)), None),
        "shares_memory": min(_present(result.shares_memory for result in every), default=None),
        "host_memory_bytes": _fullest_host(every),
        "host_lead_s": min(_present(result.host_lead_s for result in every), default=None),
        "throttle_reasons": ",".join(names) if reasons else None,
        "device_memory_bytes": first.device_memory_bytes,
        "device_name": first.device_name,
        "hosts": sorted({result.host for result in every if result.host is not None}) or None,
    }
    if ids:
        columns["device_ids"] = list(dict.fromkeys(ids))
    for key in ("torch", "cuda", "nccl", "triton", "driver", "python"):
        if (version := first.versions.get(key)) is not None:
            columns[f"{key}_version"] = version
    return columns


def _fullest_host(results: Iterable[RankResult]) -> int | None:
    """Bytes that optimizers of one host's ranks held there, of the fullest host; None if none did."""
    held: dict[str | None, int] = {}
    for result in results:
        if result.host_memory_bytes is not None:
            held[result.host] = held.get(result.host, 0) + result.host_memory_bytes
    return max(held.values(), default=None)


def _timed(result: RankResult) -> list[StepRecord]:
    return [step for step in result.steps if not step.is_warmup]


def _present(values: Iterable[_T | None]) -> list[_T]:
    return [value for value in values if value is not None]


def _times_or_none(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _known(value: Any) -> Any:
    """The value; None for NaN and infinities, which tables must not contain."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
