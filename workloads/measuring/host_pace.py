"""Measures how fast this rank's host launches work on the device at one moment.

Other work on a host can slow its processes for a while, at times by a factor of two. The steps of host-bound layouts
are then slower by as much, and no other value of a row would explain it.
"""

from __future__ import annotations

import statistics
import time

import torch

OPERATIONS = 32
"""Number of operations in a round; few enough that the device's queue never fills, which would make the host wait for
the device."""
ROUNDS, FIRST_ROUNDS = 16, 3
"""Timed rounds, and untimed rounds before them, which load kernels and start autograd's thread."""


def launch_s(device: torch.device) -> float | None:
    """Host time in seconds to launch an elementwise operation, forward and backward, on tensors of a few bytes: median
    of `ROUNDS` rounds, about ten milliseconds in all. None on a CPU, where nothing is launched."""
    if device.type != "cuda":
        return None
    factor, seed = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    seconds = []
    for _ in range(FIRST_ROUNDS + ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        product = seed
        for _ in range(OPERATIONS):
            product = product * factor
        torch.autograd.grad(product, factor, seed)
        seconds.append((time.perf_counter() - start) / OPERATIONS)
    return statistics.median(seconds[FIRST_ROUNDS:])


def mean_of(before_s: float | None, after_s: float | None) -> float | None:
    return None if before_s is None or after_s is None else (before_s + after_s) / 2
