"""Lets torchtitan's FSDP reduce gradients with gloo."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule


def use_gloo(parts: Iterable[nn.Module]) -> None:
    """Ask FSDP for plain sums: gloo has no pre-multiplied sum, which FSDP requests if gradients are not divided."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
