"""Records times during a step, as CUDA events or by the host's clock on a CPU, and reads them after the step.

While a CUDA graph is captured, a mark becomes a part of the graph, and every replay sets it again. Such a mark must
live as long as the graph: torch destroys an event that nobody holds, and a graph with a destroyed event ends the
process by a segmentation fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | float
"""Point in time on the device, or on the host without one."""


class Clock:
    """``mark()`` returns a mark; ``seconds(a, b)`` is the time between two marks once the device has passed both."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.captures = False
        """A CUDA graph is being captured on the current stream, so no event may be queried."""
        self._inside: list[Mark] = []

    def mark(self) -> Mark:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self.captures)
        event.record()
        if self.captures:
            self._inside.append(event)
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return start.elapsed_time(end) / 1e3
        assert not isinstance(end, torch.cuda.Event)
        return end - start

    @contextmanager
    def inside_graph(self) -> Iterator[list[Mark]]:
        """Marks that are made inside belong to the graph that is captured. Yields all of them: hold the list as long as
        the graph."""
        self.captures, self._inside = True, []
        try:
            yield self._inside
        finally:
            self.captures, self._inside = False, []

    def finish(self) -> None:
        """Wait until the device has passed every mark."""
        if self.cuda:
            torch.cuda.synchronize()
