"""Nodes that are left out: which, why and until when. One small file a node in the sweep's folder.

A node is left out at once when it cannot be used (its agent does not start, a process or device memory stays), and
after several points have failed on it in ways that are a machine's rather than a layout's. It comes back when the
exclusion expires or its file is deleted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import SweepDir
from workloads.protocol import write_json

EXPIRES_AFTER_S = 12 * 3600.0
FAILURES_TO_EXCLUDE = 3
"""Points that failed on one node in `_SUSPICIOUS` ways within an expiry, without any that went well after them."""

_SUSPICIOUS = ("hang", "nccl_error", "node_failure")
"""Beside whatever else was the infrastructure's. A point that raises does so on every node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    node: str
    reason: str
    since: float
    until: float
    pilot_id: str


def exclude(sweep: SweepDir, node: str, reason: str, pilot_id: str, *, for_s: float = EXPIRES_AFTER_S) -> Exclusion:
    """Leave ``node`` out from now on. Raises `OSError` when that cannot be written down."""
    now = time.time()
    found = Exclusion(node=node, reason=reason, since=now, until=now + for_s, pilot_id=pilot_id)
    folder = sweep.path / "nodes"
    folder.mkdir(exist_ok=True)
    write_json(_path(folder, node), asdict(found))
    return found


def excluded(sweep: SweepDir) -> dict[str, Exclusion]:
    """The nodes that are left out now."""
    found: dict[str, Exclusion] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted((sweep.path / "nodes").glob("*.json")):
            try:
                one = Exclusion(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                continue
            if one.until > time.time():
                found[one.node] = one
    return found


def failing(records: Iterable[AttemptRecord], nodes: Iterable[str], now: float) -> Mapping[str, str]:
    """Of ``nodes``, those whose latest points have failed in suspicious ways, and how."""
    recent = sorted((r for r in records if r.ended_at > now - EXPIRES_AFTER_S), key=lambda r: r.ended_at)
    wanted, bad = set(nodes), dict[str, list[AttemptRecord]]()
    for record in recent:
        if record.outcome == "ok":
            for node in wanted.intersection(record.nodes):
                bad.pop(node, None)
        elif record.failed_node in wanted and (record.infrastructure or record.outcome in _SUSPICIOUS):
            bad.setdefault(record.failed_node or "", []).append(record)
    return {
        node: ", ".join(f"{r.outcome} of {r.experiment_id}" for r in found[-FAILURES_TO_EXCLUDE:])
        for node, found in bad.items()
        if len({record.experiment_id for record in found}) >= FAILURES_TO_EXCLUDE
    }


def _path(folder: Path, node: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)
    return folder / f"{safe.lstrip('.') or '_'}.json"
