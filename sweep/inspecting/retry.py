"""``retry``: requeues finished points, and lets paused kinds of points run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from launchers.state import circuit_breaker
from launchers.state.sweep_dir import SweepDir, entry_names, key_of
from launchers.status.retry import retry
from results.errors import InvalidResults
from results.tables.schema import OUTCOMES
from workloads.spec.checks import suggest

SETTLED = ("ok", "oom")
"""Outcomes that another attempt would only repeat."""


def check_outcomes(words: Iterable[str]) -> None:
    """Raises `InvalidResults` for a word that is not an outcome."""
    for word in words:
        if word not in OUTCOMES:
            raise InvalidResults(f"--outcome {word}: no such outcome{suggest(word, OUTCOMES)}")


def retry_points(path: Path, which: Sequence[str]) -> int:
    """Requeue finished points of the sweep in ``path``. Returns their number.

    ``which``: outcomes, ids, or unique parts of ids; empty: all outcomes except `SETTLED`. Paused kinds of points may
    run again, too, because a user who retries has changed something.
    """
    sweep = SweepDir.open(path, with_queue=True)
    if not which:
        chosen = [outcome for outcome in OUTCOMES if outcome not in SETTLED]
    else:
        keys = [key_of(name) for folder in (sweep.todo, sweep.claimed, sweep.done) for name in entry_names(folder)]
        chosen = [word if word in OUTCOMES else _one_key(word, keys, path) for word in which]
    circuit_breaker.resume(sweep)
    return retry(sweep, chosen)


def resume_paused(path: Path) -> None:
    """Let paused kinds of points of the sweep in ``path`` run again, without requeueing any finished point."""
    circuit_breaker.resume(SweepDir.open(path, with_queue=True))


def _one_key(word: str, keys: Sequence[str], path: Path) -> str:
    matches = [word] if word in keys else [key for key in keys if word and word in key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InvalidResults(f"{word!r} is part of {len(matches)} ids in {path}, e.g. {matches[0]}; give more of it")
    raise InvalidResults(
        f"{word!r} is neither an outcome ({', '.join(OUTCOMES)}) nor part of an id of the {len(keys)} points in {path}"
    )
