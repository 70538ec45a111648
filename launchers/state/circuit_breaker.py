"""What keeps a waiting point from being drawn: the canary of its shape, and the breaker of its kind.

One point of a shape (a number of nodes) goes first. While it runs, the others of that shape wait: when the environment
is wrong for so many nodes, one point tells, not all pilots at once. And when several points of one kind fail in one
way, with none that went well, the rest of that kind is paused instead of burning the allocation.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import SweepDir
from results.text import plural
from workloads.experiment import Experiment
from workloads.protocol import write_json

BREAKER_FAILURES = 4
"""Different points of one kind that must have failed alike, unless the launcher's options say otherwise."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+(\.[0-9]+)?")
_BREAKING = ("crash", "hang", "nccl_error", "timeout", "diverged")


def kind_of(experiment: Experiment, nodes: int) -> str:
    """What points must share for the failure of one to speak for the others, in words."""
    axes = [name for name in ("tp", "cp", "pp", "ep") if getattr(experiment, name) > 1]
    parts = [experiment.model.name, plural(nodes, "node"), f"ZeRO {experiment.zero_stage}"]
    parts += ["+".join(axes)] if axes else []
    parts += [f"recompute {experiment.recompute}"] if experiment.recompute != "none" else []
    parts += [experiment.pp_schedule] if experiment.pp > 1 else []
    parts += [experiment.precision] if experiment.precision != "bf16" else []
    parts += ["compiled"] if experiment.compile != "none" else []
    return ", ".join(parts)


def paused_kinds(
    sweep: SweepDir, attempts: Iterable[AttemptRecord], failures: int = BREAKER_FAILURES
) -> dict[str, str]:
    """Kinds of points that the breaker holds, and why. Attempts before the last `resume` do not count."""
    since = _resumed_at(sweep)
    by_kind: dict[str, list[AttemptRecord]] = {}
    for record in attempts:
        if record.kind and record.started_at > since:
            by_kind.setdefault(record.kind, []).append(record)
    paused = {}
    for kind, records in by_kind.items():
        if any(record.outcome in ("ok", "oom") for record in records):
            continue
        alike: dict[str, dict[str, AttemptRecord]] = {}
        for record in records:
            if record.outcome in _BREAKING and not record.will_retry:
                alike.setdefault(_signature(record), {})[record.experiment_id] = record
        for same in alike.values():
            if len(same) >= failures:
                last = next(reversed(same.values()))
                said = (last.evidence or "").partition("\n")[0][:160]
                paused[kind] = f"{len(same)} points failed alike: {last.outcome} in {last.phase}: {said}"
    return paused


def paused_message(paused: Mapping[str, str], points: int | None = None) -> str:
    """Why points are left that no pilot draws, empty when none is paused; ``points``: how many, where that is known."""
    if not paused:
        return ""
    kinds = "; ".join(f"{kind}: {why}" for kind, why in paused.items())
    count = f"{points} points" if points is not None else "points"
    return (
        f"{count} of a kind that keeps failing are paused ({kinds}); python -m sweep retry PATH --paused lets them run"
    )


def resume(sweep: SweepDir) -> None:
    """Let every kind that is paused be tried again."""
    write_json(sweep.path / "queue" / "breaker_lifted.json", {"at": time.time()})


@dataclass(slots=True)
class CircuitBreaker:
    """The circuit_breaker as one pilot sees them."""

    breaker_failures: int = BREAKER_FAILURES
    paused: dict[str, str] = field(default_factory=dict)
    proven: set[int] = field(default_factory=set)
    """Shapes, in nodes, of which an attempt has ended by its own doing."""
    _seen: tuple[int, float] | None = None

    def update(self, sweep: SweepDir, records: Collection[AttemptRecord]) -> None:
        """``records``: all attempts so far; nothing is done where none is new and nothing was resumed."""
        seen = len(records), _resumed_at(sweep)
        if seen == self._seen:
            return
        self._seen = seen
        self.paused = paused_kinds(sweep, records, self.breaker_failures)
        for record in records:
            if not record.infrastructure and record.outcome not in ("cancelled", "preempted"):
                self.proven.add(max(1, len(record.nodes)))


def _signature(record: AttemptRecord) -> str:
    """How a point failed, without what differs between points that fail alike."""
    said = (record.evidence or "").partition("\n")[0]
    return f"{record.outcome} {record.phase} {_NUMBERS.sub('#', said)[:120]}"


def _resumed_at(sweep: SweepDir) -> float:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads((sweep.path / "queue" / "breaker_lifted.json").read_text())["at"])
    return 0.0
