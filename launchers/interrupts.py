"""Collects Ctrl-C and SIGTERM in a list that a loop can poll, instead of raising an exception in the middle of a
step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts(limit: int | None = None) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of letting them end this process.

    ``limit``: from this many signals on, each raises `KeyboardInterrupt`, which also ends blocking calls.
    """
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        if limit is not None and len(received) >= limit:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
