"""Peak of allocated memory of an engine that replays its passes as a CUDA graph: a replay allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")


class GraphMemory:
    """Peak in bytes of calls: the first runs without the graph, the second is captured and the others are replayed.

    The allocator sees what a call needs only where the call is captured. The memory that a replay needs is what is
    allocated when it begins, and what the captured call took in addition.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Peak of the calls since `start_step`."""
        self._calls = 0
        self._taken = 0

    def start_step(self) -> None:
        self.peak_bytes = 0

    def call(self, passes: Callable[[], R]) -> R:
        """Return what ``passes`` returns. It resets the allocator's peak."""
        begin = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = passes()
        peak = torch.cuda.max_memory_allocated()
        self._calls += 1
        if self._calls > 1:  # the first call takes gradients, too, which stay
            self._taken = max(self._taken, peak - begin)
        self.peak_bytes = max(self.peak_bytes, peak, begin + self._taken)
        return result
