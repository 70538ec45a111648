"""Requeues finished points of a sweep, so that the next run tries them again."""

from __future__ import annotations

from collections.abc import Collection

from launchers.state import queue
from launchers.state.sweep_dir import SweepDir, entry_names, key_of, split_name
from results.errors import InvalidResults
from results.tables.schema import OUTCOMES


def retry(sweep: SweepDir, which: Collection[str]) -> int:
    """Requeue finished points and return their number.

    ``which`` holds outcomes (``hang``, ``crash`` ...), experiment ids or both. Raises `InvalidResults` for a word that
    is neither an outcome nor the id of a point of this sweep.
    """
    done = entry_names(sweep.done)
    ids = {key_of(name) for folder in (sweep.todo, sweep.claimed, sweep.done) for name in entry_names(folder)}
    if unknown := set(which) - set(OUTCOMES) - ids:
        raise InvalidResults(
            f"{', '.join(sorted(unknown))}: neither a point of {sweep.path} nor an outcome ({', '.join(OUTCOMES)})"
        )
    chosen = [name for name in done if split_name(name)[1] in which or key_of(name) in which]
    return sum(queue.requeue(sweep, name) for name in chosen)
