"""Processor time of a piece of work in units of a fixed task, for tests of speed.

Seconds say little where machines differ and share their cores: other work slows a process by 2 to 4 times, in processor
time, too. It slows a fixed task that runs beside the work about as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def _fixed_task() -> int:
    """Calls, dictionaries and arithmetic of plain Python, 0.1 s on an idle core of 2026."""
    total = 0
    for number in range(250_000):
        of_one = {"a": number, "b": 2 * number}
        of_one.update(b=abs(number - 7))
        total += max(of_one["a"], of_one["b"])
    return total


def processor_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process for one call of ``work``."""
    start = time.process_time()
    work()
    return time.process_time() - start


def fixed_task_seconds() -> float:
    """CPU seconds that the machine takes now for the fixed task."""
    return processor_seconds(_fixed_task)


def fixed_tasks(work: Callable[[], object], times: int = 4) -> float:
    """How many fixed tasks one call of ``work`` takes: each time the work runs between two fixed tasks, and the least
    of the ratios counts."""
    ratios = []
    before = fixed_task_seconds()
    for _ in range(times):
        took, after = processor_seconds(work), fixed_task_seconds()
        ratios.append(2 * took / (before + after))
        before = after
    return min(ratios)
