"""Scales the loss of fp16 runs, so that small gradients do not underflow, and finds the scale while it trains.

fp16's smallest number is 6e-8, and gradients of activations are often smaller. So gradients are made ``scale`` times as
large where they begin, at the loss, and are divided by it when they are in fp32 (mixed precision training,
arXiv:1710.03740, section 3.2). A step whose gradients overflow is skipped and halves the scale; after some good steps
in a row it is doubled. The host never waits for any of this: the scale, the count of good steps and whether a step
overflowed are tensors on the device. Every rank has the same ones, because they come from the norm over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GOOD_STEPS = 2000
"""The scale grows after so many steps without an overflow, as in NVIDIA's apex and torch's ``GradScaler``."""
COLLAPSED = 1.0
"""Where gradients overflow at a scale below this they do so by themselves, and no scale helps."""


class LossScale:
    """The scale of one rank. ``never_skips``: in a rehearsal, where gradients have no meaning."""

    def __init__(self, device: torch.device, *, never_skips: bool = False) -> None:
        self.value = torch.full((), INITIAL, dtype=torch.float32, device=device)
        """The present scale. Updated in place: whoever needs it may keep this tensor."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._never_skips = never_skips

    def overflowed(self, norm: Tensor) -> Tensor:
        """1 where a global gradient norm is not finite, else 0, on the device."""
        if self._never_skips:
            return torch.zeros((), dtype=torch.float32, device=norm.device)
        return torch.isfinite(norm).logical_not_().float()

    def update(self, overflowed: Tensor) -> None:
        """After a step: halve the scale, or count a good step."""
        torch._amp_update_scale_(self.value, self._good_steps, overflowed, GROWTH, BACKOFF, GOOD_STEPS)
