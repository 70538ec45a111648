"""Formats numbers, sizes, times and lists for people, in messages, tables and figures, with one function for each."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

MIB = 2**20
GIB = 2**30
UNKNOWN = "–"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """``1 point``, ``1,234 points``, ``2 processes``. ``nouns``: the plural, if it is not noun + s or + es."""
    return f"{count:,} {noun if count == 1 else nouns or noun + ('es' if noun.endswith('s') else 's')}"


def listed(items: Sequence[str], most: int = 6) -> str:
    """``a, b and c``. If there are more than ``most`` items, the first ones are named and the others counted."""
    items = list(items)
    if len(items) > most:
        return ", ".join(items[:most]) + f" and {len(items) - most} more"
    return " and ".join(items) if len(items) < 3 else ", ".join(items[:-1]) + f" and {items[-1]}"


def name_ranks(ranks: Collection[int]) -> str:
    """``rank 3``, or several ranks in order, with neighbours as one range: ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges}"


def short_id(experiment_id: str, width: int) -> str:
    """An experiment's id in ``width`` characters: its beginning, ``…``, and the hash at its end, which is enough for
    ``explain`` and ``logs``."""
    if len(experiment_id) <= width:
        return experiment_id
    digest = experiment_id.rpartition("-")[2]
    return f"{experiment_id[: max(0, width - len(digest) - 1)]}…{digest}"


def format_setting(value: object) -> str:
    """The value of a setting as a reader writes it: ``0`` for 0.0, ``0.25``, ``1f1b``. Fractions have six significant
    digits. The page writes it likewise (``Words.setting``)."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return str(int(value)) if value.is_integer() else f"{value:.6g}"


def device_noun(backend: str | None) -> str:
    """Noun for the device of one rank, by the backend of the cluster file: ``GPU``, or ``process`` on a CPU."""
    return "process" if backend == "cpu" else "GPU"


def name_routing(routing: str | None, imbalance: float | None, capacity_factor: float | None) -> str:
    """Describes how tokens choose experts: ``skewed 2×``, ``learned routing``, ``learned routing, capacity 1.25``;
    empty if routing is balanced or unknown.

    Routing changes the work and not only the layout: runs with different descriptions are of different workloads. The
    imbalance that is assumed for learned routing changes no run, so it is not included.
    """
    if not isinstance(routing, str) or routing == "balanced":
        return ""
    if routing == "skewed":
        return "skewed" if imbalance is None or not math.isfinite(imbalance) else f"skewed {imbalance:g}×"
    limited = capacity_factor is not None and math.isfinite(capacity_factor)
    return f"{routing} routing" + (f", capacity {capacity_factor:g}" if limited else "")


def name_documents(documents: object) -> str:
    """Describes the documents that are packed into sequences: ``documents lognormal mean=1500 sigma=1.2 seed=7``; empty
    if every sequence is one document. As routing, they change the work and not only the layout."""
    return "documents " + documents.split(" path=")[0] if isinstance(documents, str) else ""


def format_bytes(size_bytes: float | None, digits: int = 1) -> str:
    """``61.3 GiB``; sizes below a tenth of a GiB in MiB; a dash if the size is not known."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return UNKNOWN
    unit, name = (GIB, "GiB") if size_bytes >= GIB / 10 else (MIB, "MiB")
    return f"{size_bytes / unit:.{digits}f} {name}"


def byte_unit(largest_bytes: float) -> tuple[int, str]:
    """Unit for an axis or a column whose largest value is ``largest_bytes``: its size in bytes, and its name."""
    return (GIB, "GiB") if largest_bytes >= GIB else (MIB, "MiB")


def format_duration(seconds: float) -> str:
    """``42 s``, ``3 min``, ``2 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_hours(hours: float | None, unknown: str = "?") -> str:
    """Device-hours without their unit: ``0.25``, ``1,234``; ``unknown`` for None."""
    if hours is None:
        return unknown
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:,.2f}"


def format_number(value: float | None) -> str:
    """Three significant digits below 100, whole numbers from 100 on; a dash if the value is not known."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_percent(fraction: float | None, digits: int = 1) -> str:
    """``0.123`` as ``12.3 %``; a dash if the fraction is not known."""
    return UNKNOWN if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.{digits}f} %"
