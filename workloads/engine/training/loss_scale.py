"""Scales the loss of fp16 runs, so that small gradients do not underflow, and adapts the scale while it trains.

fp16's smallest number is 6e-8, and gradients of activations are often smaller. So gradients are multiplied by ``scale``
where they begin, at the loss, and divided by it once they are in fp32 (mixed precision training, arXiv:1710.03740,
section 3.2). A step whose gradients overflow is skipped and halves the scale; the scale doubles after enough good steps
in a row. The host waits for none of this, except for the number of updates where the learning rate changes with it:
the scale, the count of good steps and whether a step overflowed are tensors on the device. They are equal on all ranks,
because they come from the norm over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GOOD_STEPS = 2000
"""Number of steps in a row without an overflow after which the scale grows, as in NVIDIA's apex and torch's
``GradScaler``."""
COLLAPSED = 1.0
"""Scale below which an overflow is not due to scaling: the gradients are too large themselves, and no scale helps."""


class LossScale:
    """Loss scale of one rank. ``never_skips``: for a rehearsal, whose gradients have no meaning."""

    def __init__(self, device: torch.device, *, never_skips: bool = False) -> None:
        self.value = torch.full((), INITIAL, dtype=torch.float32, device=device)
        """The current scale. Updated in place, so users may keep this tensor."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._never_skips = never_skips

    def overflowed(self, norm: Tensor) -> Tensor:
        """1 if the global gradient norm is not finite, else 0; a tensor on the device."""
        if self._never_skips:
            return torch.zeros((), dtype=torch.float32, device=norm.device)
        return torch.isfinite(norm).logical_not_().float()

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow, or count a good step."""
        torch._amp_update_scale_(self.value, self._good_steps, overflowed, GROWTH, BACKOFF, GOOD_STEPS)
