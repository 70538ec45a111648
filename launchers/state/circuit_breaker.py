"""Decides from the attempts so far which waiting points must not run yet: canaries by shape, paused kinds.

The first point of a shape (a number of nodes) is its canary: while it runs, the other points of that shape wait. When
the environment is wrong for that many nodes, one point fails instead of one point per pilot. When several points of one
kind fail in the same way and none succeeds, the rest of that kind is paused, so that it does not use up the allocation.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launchers.state.history import AttemptRecord
from launchers.state.pilot_state import all_states
from launchers.state.sweep_dir import SweepDir, entry_names, split_name
from results.shared_filesystem.patience import repeated
from results.text.numbers import plural
from workloads.contract.protocol import read_json, write_json
from workloads.contract.typed import typed
from workloads.spec.engine_versions import capture_word
from workloads.spec.experiment import Experiment

BREAKER_FAILURES = 4
"""Number of different points of one kind that must fail in the same way before the kind is paused; see
``launcher.breaker_failures``."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+(\.[0-9]+)?")
_BREAKING = ("crash", "hang", "nccl_error", "timeout", "diverged")


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Time and known attempts of the last `resume`."""

    at: float
    """Seconds since 1970, by the clock of the machine on which `resume` was called."""
    attempts: frozenset[str] | None = None
    """Ids of the attempts that had been recorded or were running; None in files of earlier versions."""

    def before(self, record: AttemptRecord) -> bool:
        """Whether the attempt had begun before the last `resume`."""
        return record.started_at <= self.at if self.attempts is None else record.attempt_id in self.attempts


_NEVER = _Resumed(0.0, frozenset())


def kind_of(experiment: Experiment, nodes: int) -> str:
    """Name of a point's kind, readable for people. Points of one kind probably fail for the same reason."""
    axes = [name for name in ("tp", "cp", "pp", "ep") if getattr(experiment, name) > 1]
    parts = [experiment.model.name, plural(nodes, "node"), f"ZeRO {experiment.zero_stage}"]
    parts += ["+".join(axes)] if axes else []
    parts += [f"recompute {experiment.recompute}"] if experiment.recompute != "none" else []
    parts += [experiment.pp_schedule] if experiment.pp > 1 else []
    parts += [experiment.precision] if experiment.precision != "bf16" else []
    parts += ["compiled"] if experiment.compile != "none" else []
    word = capture_word(experiment.cuda_graph, experiment.engine, experiment.engine_version)
    parts += [word for word in (word, experiment.fusion_word) if word]
    return ", ".join(parts)


def paused_kinds(
    sweep: SweepDir, attempts: Iterable[AttemptRecord], failures: int = BREAKER_FAILURES
) -> dict[str, str]:
    """Paused kinds of points, each with the reason. Attempts begun before the last `resume` do not count."""
    resumed = _NEVER
    with contextlib.suppress(OSError):
        resumed = _resumed(sweep)
    return _paused_kinds(resumed, attempts, failures)


def _paused_kinds(resumed: _Resumed, attempts: Iterable[AttemptRecord], failures: int) -> dict[str, str]:
    by_kind: dict[str, list[AttemptRecord]] = {}
    for record in attempts:
        if record.kind and not resumed.before(record):
            by_kind.setdefault(record.kind, []).append(record)
    paused = {}
    for kind, records in by_kind.items():
        if any(record.outcome in ("ok", "oom") for record in records):
            continue
        by_failure: dict[str, dict[str, AttemptRecord]] = {}
        for record in records:
            if record.outcome in _BREAKING and not record.will_retry:
                by_failure.setdefault(_signature(record), {})[record.experiment_id] = record
        for same in by_failure.values():
            if len(same) >= failures:
                last = next(reversed(same.values()))
                first_line = (last.evidence or "").partition("\n")[0][:160]
                paused[kind] = f"{len(same)} points failed alike: {last.outcome} in {last.phase}: {first_line}"
    return paused


def paused_message(paused: Mapping[str, str], points: int | None = None) -> str:
    """Message why no pilot claims the remaining points; ``""`` when no kind is paused. ``points``: their number, if
    known."""
    if not paused:
        return ""
    kinds = "; ".join(f"{kind}: {why}" for kind, why in paused.items())
    count = f"{points} points" if points is not None else "points"
    return (
        f"{count} of a kind that keeps failing are paused ({kinds}); python -m sweep retry PATH --paused lets them run"
    )


def resume(sweep: SweepDir) -> None:
    """Let the points of every paused kind run again. Raises `OSError`."""
    # Store ids of attempts, not times: the clocks of the nodes that ran them may differ from this machine's clock.
    attempt_ids = {split_name(name)[1] for name in entry_names(sweep.history)}
    attempt_ids |= {one.attempt_id for state in all_states(sweep) for one in state.running}
    write_json(_resume_file(sweep), {"at": time.time(), "attempts": sorted(attempt_ids)})


@dataclass(slots=True)
class CircuitBreaker:
    """Paused kinds and canaries as known to one pilot; refreshed by `update`."""

    breaker_failures: int = BREAKER_FAILURES
    paused: dict[str, str] = field(default_factory=dict)
    """See `paused_kinds`."""
    proven: set[int] = field(default_factory=set)
    """Shapes (numbers of nodes) that need no canary any more: an attempt has succeeded there, or failed by its own
    fault."""
    _seen: tuple[int, tuple[int, ...]] | None = None
    """Number of records and stamp of the `resume` file at the last update."""

    def update(self, sweep: SweepDir, records: Collection[AttemptRecord]) -> None:
        """Recompute everything from ``records``, all attempts of the sweep so far. Raises `OSError`."""
        seen = len(records), _stamp(sweep)  # the file names every attempt, so it is read only after a change
        if seen == self._seen:
            return
        self.paused = _paused_kinds(_resumed(sweep), records, self.breaker_failures)
        self._seen = seen
        for record in records:
            if not record.infrastructure and record.outcome not in ("cancelled", "preempted"):
                self.proven.add(max(1, len(record.nodes)))


def _signature(record: AttemptRecord) -> str:
    """Text of a failure without its numbers, which differ between points that fail in the same way."""
    first_line = (record.evidence or "").partition("\n")[0]
    return f"{record.outcome} {record.phase} {_NUMBERS.sub('#', first_line)[:120]}"


def _resume_file(sweep: SweepDir) -> Path:
    # The file keeps its old name, so that sweeps recorded with earlier versions read the same.
    return sweep.path / "queue" / "breaker_lifted.json"


def _stamp(sweep: SweepDir) -> tuple[int, ...]:
    """Inode, time and size of the file of the last `resume`; empty without one. Raises `OSError`."""
    try:
        stat = repeated(_resume_file(sweep).stat)
    except FileNotFoundError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _resumed(sweep: SweepDir) -> _Resumed:
    """The last `resume`. Raises `OSError` when the file cannot be read now: kinds must not be paused by mistake."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return typed(_Resumed, read_json(_resume_file(sweep)))
    return _NEVER
