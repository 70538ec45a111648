"""Records of ended attempts: one small file for each under ``queue/history``, never changed once it is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.state.sweep_dir import SweepDir, entry_names, split_name
from results.text import device_noun, format_bytes
from workloads.protocol import Method, write_json

_METHOD_PREFIX: Mapping[Method, str] = {"measured": "", "rehearsed": "rehearsed ", "rehearsed_fake": "estimated "}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """How one attempt ended, in short: enough for ``status``, for retries and for the expected end of the sweep.

    Times are seconds since the epoch. The columns of the table of attempts have the same names (see `results.schema`).
    """

    attempt_id: str
    attempt_number: int
    pilot_id: str
    experiment_id: str
    world_size: int
    outcome: str
    phase: str | None
    phase_step: int | None
    failed_rank: int | None
    evidence: str | None
    infrastructure: bool
    will_retry: bool
    started_at: float
    ended_at: float
    method: Method = "measured"
    gap_s: float | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_allocated_bytes: int | None = None
    nodes: Sequence[str] = ()
    failed_node: str | None = None
    """The node on which the failed rank ran."""
    kind: str = ""
    """See `launchers.state.circuit_breaker.kind_of`."""
    backend: str | None = None
    """``cuda`` or ``cpu``; None in records of older versions."""

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended_at - self.started_at)  # older records may be by a clock that was set back


def write_record(sweep: SweepDir, stem: str, attempt: AttemptRecord) -> Path:
    """Write the record of an attempt at the point ``stem``; return its path. Raises `OSError`."""
    path = sweep.history / f"{stem}@{attempt.attempt_id}.json"
    write_json(path, attempt)
    return path


def records_of(sweep: SweepDir, stem: str) -> list[AttemptRecord]:
    """Every recorded attempt at one point, oldest first."""
    return read_records(sweep, [name for name in entry_names(sweep.history) if split_name(name)[0] == stem])


def read_records(sweep: SweepDir, names: Iterable[str]) -> list[AttemptRecord]:
    """The records in the named files of ``history``, oldest first; unreadable files are skipped."""
    records = []
    for name in names:
        try:
            records.append(AttemptRecord(**json.loads((sweep.history / name).read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(records, key=lambda attempt: (attempt.started_at, attempt.attempt_number))


def rate_of(record: AttemptRecord) -> str:
    """Throughput and how it was obtained: ``11,324 tokens/s/GPU``, ``rehearsed 5,210 tokens/s/GPU``; empty without."""
    if record.tokens_per_s_per_gpu is None:
        return ""
    rate = f"{record.tokens_per_s_per_gpu:,.0f} tokens/s/{device_noun(record.backend)}"
    return _METHOD_PREFIX[record.method] + rate


def describe(record: AttemptRecord) -> str:
    """One line about one attempt, for logs and for the view without a terminal."""
    line = f"{record.outcome:<10} {record.experiment_id}"
    if rate := rate_of(record):
        line += f"  {rate}"
    if record.peak_allocated_bytes is not None:
        line += f"  peak {format_bytes(record.peak_allocated_bytes, 2)}"
    line += f"  {record.duration_s:.1f} s"
    if record.outcome != "ok" and record.evidence:
        line += f"  {record.evidence.splitlines()[0][:160]}"
    return line + ("  (will be tried again)" if record.will_retry else "")
