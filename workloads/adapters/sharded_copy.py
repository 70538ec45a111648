"""Copies a whole matrix into a parameter that may be sharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def copy_whole(value: Tensor, parameter: Tensor) -> None:
    """Copy ``value``, or this rank's part of it, into ``parameter``."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for dim, (first, size) in enumerate(zip(offset, shape, strict=True)):
        value = value.narrow(dim, first if size else 0, size)
    parameter.to_local().copy_(value)
