"""Peak memory of an engine that replays a CUDA graph, from an allocator that sees nothing of a replay."""

from __future__ import annotations

import pytest
import torch

from workloads.adapters.graph_memory import GraphMemory


class _Allocator:
    """Bytes that are allocated now, and their peak since the last reset."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, kept: int, for_now: int = 0) -> None:
        self.peak = max(self.peak, self.now + kept + for_now)
        self.now += kept

    def reset(self) -> None:
        self.peak = self.now


def test_a_replayed_step_counts_what_its_captured_passes_took(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, memory = _Allocator(), GraphMemory()
    for name, stand_in in (
        ("memory_allocated", lambda: allocator.now),
        ("max_memory_allocated", lambda: allocator.peak),
        ("reset_peak_memory_stats", allocator.reset),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    weights, gradients, states, activations, loss = 100, 100, 200, 1000, 1
    allocator.take(weights)
    peaks = []
    for step in range(3):
        memory.start_step()
        for micro_batch in range(2):
            if step == 0:
                taken = (gradients, activations) if micro_batch == 0 else (loss, activations)
                memory.call(lambda taken=taken: allocator.take(*taken))
            else:
                memory.call(lambda: None)
        if step == 0:
            allocator.take(states)  # the optimizer's, with its first step
        peaks.append(memory.peak_bytes)
    assert peaks[0] == weights + gradients + loss + activations
    # What the captured call took, loss included, is counted where the replay begins.
    assert peaks[1] == peaks[2] == weights + gradients + states + 2 * loss + activations


def test_the_result_of_the_passes_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    assert GraphMemory().call(lambda: 3) == 3
