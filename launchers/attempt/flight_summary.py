"""Sums up which collectives the ranks of a hang wait in, from the flight records that they have written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from results.text.numbers import name_ranks
from workloads.contract import protocol

_SHOWN = 3


def summary(folder: Path, ranks: Iterable[int]) -> str:
    """Returns for example ``waiting: all_reduce #17 [4096] on ranks 0-2; all_gather #16 on rank 3``; ``""`` where
    nothing was recorded. ``folder``: the attempt's folder."""
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        if (entry := _last_unfinished(folder, rank)) is not None:
            waiting[_describe(entry)].append(rank)
    if not waiting:
        return ""
    groups = sorted(waiting.items(), key=lambda item: -len(item[1]))
    places = [f"{what} on {name_ranks(who)}" for what, who in groups[:_SHOWN]]
    more = f" and {len(groups) - _SHOWN} other places" if len(groups) > _SHOWN else ""
    return f"waiting: {'; '.join(places)}{more}"


def _last_unfinished(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        entries = protocol.read_json(protocol.flight_path(folder, rank))["entries"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    pending = [entry for entry in entries if not entry.get("retired") and entry.get("state") != "completed"]
    return dict(pending[0]) if pending else None


def _describe(entry: dict[str, Any]) -> str:
    name = str(entry.get("operation") or "a collective").partition(":")[2] or str(entry.get("operation"))
    number = f" #{entry['number']}" if entry.get("number") is not None else ""
    sizes = entry.get("sizes")
    shape = f" {sizes[0]}" if isinstance(sizes, list) and sizes else ""
    group = f" in {entry['group']}" if entry.get("group") not in (None, "default_pg") else ""
    return f"{name}{number}{shape}{group}"
