"""Records times during a step, as CUDA events or by the host's clock on a CPU, and reads them after the step.

While a CUDA graph is captured, a mark becomes a part of the graph, and every replay sets it again.
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

    def mark(self) -> Mark:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self.captures)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return start.elapsed_time(end) / 1e3
        assert not isinstance(end, torch.cuda.Event)
        return end - start

    @contextmanager
    def inside_graph(self) -> Iterator[None]:
        """Marks that are made inside belong to the graph that is captured."""
        self.captures = True
        try:
            yield
        finally:
            self.captures = False

    def finish(self) -> None:
        """Wait until the device has passed every mark."""
        if self.cuda:
            torch.cuda.synchronize()
