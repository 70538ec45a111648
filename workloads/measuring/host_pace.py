"""How fast this rank's host launches work on the device, at one moment.

Other work on a host slows its processes for a while, by a factor of two at times. Layouts whose step waits for the host
are then slower by as much, and nothing else in a row would say why.
"""

from __future__ import annotations

import statistics
import time

import torch

OPERATIONS = 32
"""Of one round: so few that the device's queue never fills, which would make the host wait for the device."""
ROUNDS, FIRST_ROUNDS = 16, 3
"""Timed rounds, and those before: they load kernels and start autograd's thread."""


def launch_s(device: torch.device) -> float | None:
    """Host's seconds to launch an elementwise operation, forward and backward, on tensors of a few bytes: the median of
    `ROUNDS`, about ten milliseconds in all. None on a CPU, where nothing is launched."""
    if device.type != "cuda":
        return None
    factor, seed = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    found = []
    for _ in range(FIRST_ROUNDS + ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        product = seed
        for _ in range(OPERATIONS):
            product = product * factor
        torch.autograd.grad(product, factor, seed)
        found.append((time.perf_counter() - start) / OPERATIONS)
    return statistics.median(found[FIRST_ROUNDS:])


def mean_of(before_s: float | None, after_s: float | None) -> float | None:
    return None if before_s is None or after_s is None else (before_s + after_s) / 2
