"""Which nodes are excluded from a sweep, why and until when: one small file per node in the folder ``nodes``.

A node is excluded at once when it cannot be used (its agent does not start, a process does not end, device memory stays
occupied), and after several points have failed on it in ways that point to the machine rather than to the layout. From
one node, a broken file system, switch or environment looks the same as a broken node. So other nodes are compared:
where most of them fail too, the node is not to blame. The node is used again when the exclusion expires or its file is
deleted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.passing_errors import names_passing_error
from workloads.contract.protocol import read_json, write_json
from workloads.contract.typed import typed

EXPIRES_AFTER_S = 12 * 3600.0
LOST_FOR_S = 1800.0
"""Seconds for which a lost node is excluded. A short time is enough, since Slurm does not use nodes that are down."""
FAILURES_TO_EXCLUDE = 3
"""Number of points that must have failed on one node in `_SUSPICIOUS` ways within `EXPIRES_AFTER_S`, with no success
there since, before the node is excluded."""

_SUSPICIOUS = ("hang", "nccl_error", "node_failure")
"""Outcomes that point to the machine, in addition to every failure of the infrastructure. A plain crash does not: a
layout that raises an error does so on every node."""
_UNWRITTEN = "could not write its files"
"""Evidence of a broken file system, in addition to its errors. A shared one fails on every node, a node's own disk or
mount on that node alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    node: str
    reason: str
    since: float
    """Seconds since the epoch, like ``until``."""
    until: float
    pilot_id: str
    """The pilot that excluded the node."""


def exclude(sweep: SweepDir, node: str, reason: str, pilot_id: str, *, for_s: float = EXPIRES_AFTER_S) -> Exclusion:
    """Exclude ``node`` for ``for_s`` seconds from now on. Raises `OSError` when the file cannot be written."""
    now = time.time()
    exclusion = Exclusion(node=node, reason=reason, since=now, until=now + for_s, pilot_id=pilot_id)
    folder = sweep.path / "nodes"
    folder.mkdir(exist_ok=True)
    write_json(_path(folder, node), asdict(exclusion))
    return exclusion


def excluded(sweep: SweepDir) -> dict[str, Exclusion]:
    """Currently excluded nodes, by name. Unreadable files are skipped."""
    current: dict[str, Exclusion] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted((sweep.path / "nodes").glob("*.json")):
            try:
                exclusion = typed(Exclusion, read_json(path))
            except (OSError, ValueError):
                continue
            if exclusion.until > time.time():
                current[exclusion.node] = exclusion
    return current


def failing(records: Iterable[AttemptRecord], nodes: Iterable[str], now: float) -> Mapping[str, str]:
    """Nodes among ``nodes`` on which enough recent points have failed in suspicious ways, each with its failures.

    A node is left out when other nodes fail too: if the last points failed in such ways on at least as many other nodes
    as they succeeded on, the cause is shared by the nodes. File system errors count only if points have succeeded on
    another node meanwhile. ``now``: seconds since the epoch.
    """
    recent = sorted((r for r in records if r.ended_at > now - EXPIRES_AFTER_S), key=lambda r: r.ended_at)
    bad: dict[str, list[AttemptRecord]] = {}
    last_good: dict[str, float] = {}
    for record in recent:
        if record.outcome == "ok":
            for node in record.nodes:
                bad.pop(node, None)
                last_good[node] = record.ended_at
        elif record.failed_node is not None and (record.infrastructure or record.outcome in _SUSPICIOUS):
            bad.setdefault(record.failed_node, []).append(record)
    failing_nodes: dict[str, str] = {}
    for node in bad.keys() & set(nodes):
        since = bad[node][0].ended_at
        others_bad = sum(other != node and failures[-1].ended_at >= since for other, failures in bad.items())
        others_good = sum(other not in bad for other in last_good)
        if others_bad and others_bad >= others_good:
            continue
        counted = [record for record in bad[node] if not _is_file_system(record)]
        if any(at > since for other, at in last_good.items() if other not in bad):
            counted = bad[node]
        if len({record.experiment_id for record in counted}) >= FAILURES_TO_EXCLUDE:
            failing_nodes[node] = ", ".join(f"{r.outcome} of {r.experiment_id}" for r in counted[-FAILURES_TO_EXCLUDE:])
    return failing_nodes


def _is_file_system(record: AttemptRecord) -> bool:
    evidence = record.evidence or ""
    return _UNWRITTEN in evidence or names_passing_error(evidence)


def _path(folder: Path, node: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)
    return folder / f"{safe.lstrip('.') or '_'}.json"
