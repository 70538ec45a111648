"""Records of ended attempts: one small file for each under ``queue/history``, written anew only when its attempt is
recorded again, and a file with a copy of many, without failures of the infrastructure
(`launchers.state.merged_history`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.state.merged_history import LEAST, merge, read_merged
from launchers.state.sweep_dir import SweepDir, entry_names, split_name
from results.text.numbers import device_noun, format_bytes, plural
from workloads.contract.protocol import Method, read_json, write_json
from workloads.contract.typed import typed

_METHOD_PREFIX: Mapping[Method, str] = {"measured": "", "rehearsed": "rehearsed ", "rehearsed_fake": "estimated "}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """How one attempt ended, in short: enough for ``status``, for retries and for the expected end of the sweep.

    Times are seconds since the epoch. The columns of the table of attempts have the same names (see
    `results.tables.schema`).
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
        # times in older records may come from a clock that was set back
        return max(0.0, self.ended_at - self.started_at)


def write_record(sweep: SweepDir, stem: str, attempt: AttemptRecord) -> Path:
    """Write the record of an attempt at the point ``stem``; return its path. Raises `OSError`."""
    path = sweep.history / _file_name(stem, attempt)
    write_json(path, attempt)
    return path


class HistoryReader:
    """Every record of one sweep; each is read once, from its file or from the merged one."""

    def __init__(self, sweep: SweepDir) -> None:
        self._sweep = sweep
        self._records: dict[str, AttemptRecord | None] = {}
        """Records by file name; None for a damaged one."""
        self.damaged: dict[str, str] = {}
        """Why a record cannot be read, by file name. Such a record is left out."""
        self._by_stem: dict[str, list[AttemptRecord]] = {}
        self._apart = 0
        """Number of records since the last call of `merge` that do not come from the merged file."""

    @property
    def files_read(self) -> int:
        """Number of records whose files have been read or written."""
        return len(self._records)

    def refresh(self) -> None:
        """Read new records: one listing of the folder, the merged file if there are many, and each other new file.
        Raises `OSError`."""
        new = [name for name in entry_names(self._sweep.history) if name not in self._records]
        merged = read_merged(self._sweep.history) if len(new) > LEAST else {}
        for name in new:
            if (fields := merged.get(name)) is not None:
                self._add(name, AttemptRecord(**fields))
                continue
            self._apart += 1
            try:
                self._add(name, _read(self._sweep.history / name))
            except ValueError as error:
                self.damaged[name] = str(error)
                self._records[name] = None

    def merge(self, least: int = 0) -> None:
        """Copy the records into the merged file, if this object knows more than ``least``, and more than a few, that it
        did not read there. Raises `OSError`."""
        if self._apart > max(least, LEAST):
            self._apart = 0
            self.refresh()
            merge(self._sweep.history, {name: record for name, record in self._records.items() if record is not None})

    def note(self, stem: str, record: AttemptRecord) -> None:
        """Add a record that this process has written, without reading it; it replaces an earlier one of the attempt."""
        name = _file_name(stem, record)
        if (known := self._records.get(name)) is not None:
            self._records[name] = record
            self._by_stem[stem] = [record if one is known else one for one in self._by_stem[stem]]
        else:
            self._apart += 1
            self.damaged.pop(name, None)
            self._add(name, record)

    def all(self) -> list[AttemptRecord]:
        """Every record known so far, in the order of reading."""
        return [record for record in self._records.values() if record is not None]

    def of(self, stem: str) -> list[AttemptRecord]:
        """Known records of the attempts at one point, in the order of their numbers, not times: the clocks of two
        pilots differ."""
        return sorted(self._by_stem.get(stem, ()), key=lambda attempt: (attempt.attempt_number, attempt.started_at))

    def _add(self, name: str, record: AttemptRecord) -> None:
        self._records[name] = record
        self._by_stem.setdefault(split_name(name)[0], []).append(record)


def read_records(sweep: SweepDir, names: Iterable[str]) -> list[AttemptRecord]:
    """The records in the named files of ``history``, oldest first; unreadable files are skipped."""
    records = []
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            records.append(_read(sweep.history / name))
    return _sorted(records)


def damage(damaged: Mapping[str, str]) -> str:
    """One line about records that cannot be read, given with the reasons; empty when there are none."""
    if not damaged:
        return ""
    name, why = next(iter(damaged.items()))
    others = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return (
        f"{plural(len(damaged), 'record')} of attempts cannot be read and {'is' if len(damaged) == 1 else 'are'} left "
        f"out (queue/history/{name}: {why}{others}); rows and logs of these attempts are not affected"
    )


def _read(path: Path) -> AttemptRecord:
    """The record in a file. Raises `ValueError` when it is damaged or not readable for this user, otherwise
    `OSError`."""
    try:
        record = typed(AttemptRecord, read_json(path))
    except PermissionError as error:
        raise ValueError(error.strerror) from None
    if record.world_size < 1 or record.attempt_number < 0:
        raise ValueError(f"world_size={record.world_size}, attempt_number={record.attempt_number} count nothing")
    return record


def _file_name(stem: str, record: AttemptRecord) -> str:
    return f"{stem}@{record.attempt_id}.json"


def _sorted(records: Iterable[AttemptRecord]) -> list[AttemptRecord]:
    return sorted(records, key=lambda attempt: (attempt.started_at, attempt.attempt_number))


def rate_of(record: AttemptRecord) -> str:
    """Throughput and how it was obtained: ``11,324 tokens/s/GPU``, ``rehearsed 5,210 tokens/s/GPU``; empty if
    unknown."""
    if record.tokens_per_s_per_gpu is None:
        return ""
    rate = f"{record.tokens_per_s_per_gpu:,.0f} tokens/s/{device_noun(record.backend)}"
    return _METHOD_PREFIX[record.method] + rate


def describe(record: AttemptRecord) -> str:
    """One line about one attempt, for logs and for the plain view."""
    line = f"{record.outcome:<10} {record.experiment_id}"
    if rate := rate_of(record):
        line += f"  {rate}"
    if record.peak_allocated_bytes is not None:
        line += f"  peak {format_bytes(record.peak_allocated_bytes, 2)}"
    line += f"  {record.duration_s:.1f} s"
    if record.outcome != "ok" and record.evidence:
        line += f"  {record.evidence.splitlines()[0][:160]}"
    return line + ("  (will be tried again)" if record.will_retry else "")
