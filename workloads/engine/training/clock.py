"""Records times during a step, as CUDA events or by the host's clock on a CPU, and reads them after the step."""

from __future__ import annotations

import time

import torch

Mark = torch.cuda.Event | float
"""Point in time on the device, or on the host without one."""


class Clock:
    """``mark()`` returns a mark; ``seconds(a, b)`` is the time between two marks once the device has passed both."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Mark:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return start.elapsed_time(end) / 1e3
        assert not isinstance(end, torch.cuda.Event)
        return end - start

    def finish(self) -> None:
        """Wait until the device has passed every mark."""
        if self.cuda:
            torch.cuda.synchronize()
