"""Which nodes are excluded from a sweep, why and until when: one small file for each in the folder ``nodes``.

A node is excluded at once when it cannot be used (its agent does not start, a process does not end, device memory
stays occupied), and after several points have failed on it in ways that point to the machine rather than to the
layout. It is used again when the exclusion expires or its file is deleted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import SweepDir
from workloads.protocol import read_json, write_json

EXPIRES_AFTER_S = 12 * 3600.0
FAILURES_TO_EXCLUDE = 3
"""So many points must have failed on one node in `_SUSPICIOUS` ways within `EXPIRES_AFTER_S`, and none succeeded there
since, before the node is excluded."""

_SUSPICIOUS = ("hang", "nccl_error", "node_failure")
"""Outcomes that point to the machine, beside every failure of the infrastructure. A plain crash does not: a layout
that raises an error does so on every node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    node: str
    reason: str
    since: float
    """Seconds since the epoch, as ``until``."""
    until: float
    pilot_id: str
    """The pilot that excluded the node."""


def exclude(sweep: SweepDir, node: str, reason: str, pilot_id: str, *, for_s: float = EXPIRES_AFTER_S) -> Exclusion:
    """Exclude ``node`` for ``for_s`` seconds from now on. Raises `OSError` when the file cannot be written."""
    now = time.time()
    found = Exclusion(node=node, reason=reason, since=now, until=now + for_s, pilot_id=pilot_id)
    folder = sweep.path / "nodes"
    folder.mkdir(exist_ok=True)
    write_json(_path(folder, node), asdict(found))
    return found


def excluded(sweep: SweepDir) -> dict[str, Exclusion]:
    """The nodes that are excluded now, by name. Unreadable files are skipped."""
    found: dict[str, Exclusion] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted((sweep.path / "nodes").glob("*.json")):
            try:
                one = Exclusion(**read_json(path))
            except (OSError, ValueError, TypeError):
                continue
            if one.until > time.time():
                found[one.node] = one
    return found


def failing(records: Iterable[AttemptRecord], nodes: Iterable[str], now: float) -> Mapping[str, str]:
    """Those of ``nodes`` on which enough of the latest points have failed in suspicious ways, each with its failures.

    ``now``: seconds since the epoch.
    """
    recent = sorted((r for r in records if r.ended_at > now - EXPIRES_AFTER_S), key=lambda r: r.ended_at)
    asked, bad = set(nodes), dict[str, list[AttemptRecord]]()
    for record in recent:
        if record.outcome == "ok":
            for node in asked.intersection(record.nodes):
                bad.pop(node, None)
        elif record.failed_node in asked and (record.infrastructure or record.outcome in _SUSPICIOUS):
            bad.setdefault(record.failed_node or "", []).append(record)
    return {
        node: ", ".join(f"{r.outcome} of {r.experiment_id}" for r in found[-FAILURES_TO_EXCLUDE:])
        for node, found in bad.items()
        if len({record.experiment_id for record in found}) >= FAILURES_TO_EXCLUDE
    }


def _path(folder: Path, node: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)
    return folder / f"{safe.lstrip('.') or '_'}.json"
