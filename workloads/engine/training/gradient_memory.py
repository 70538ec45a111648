"""Lets reduced gradients take memory that activations have freed.

PyTorch's allocator keeps freed blocks for each stream apart, and FSDP allocates what it reduces on a stream of its own:
4 bytes for each parameter of a rank's shard, which would come on top of the most that activations ever take, although a
gradient is there only when the activations are gone that it was made from. Where a device is nearly full, its allocator
then stops in every step to give blocks back and to take others (``allocator_retries``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo


class InMemoryOfActivations(DefaultReduceScatter):
    """The reduce-scatter of one FSDP group (an ``FSDPParamGroup``), with a result that is allocated for the stream of
    compute, as its input is.

    Both streams may use it without further waiting: before FSDP allocates a result, it lets the stream of reductions
    wait for all compute so far, and before the optimizer it lets compute wait for all reductions. In between the
    result must not be freed, so that one which is added to something else is allocated on the stream of reductions,
    and results must have the dtype of the shards, since FSDP would free one that it casts. True of torch 2.11 and 2.13.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.compute: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for an input, which FSDP allocates first, or for a result."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if stream != self.group.comm_ctx.reduce_scatter_stream:
                self.compute = stream
            elif self.compute is not None and self._becomes_the_gradient():
                with torch.cuda.stream(self.compute):
                    return super().allocate(size, dtype=dtype, device=device)
        return super().allocate(size, dtype=dtype, device=device)

    def _becomes_the_gradient(self) -> bool:
        """False where earlier micro-batches have left a gradient, or where replicas are to be summed later (HSDP)."""
        if isinstance(self.group.mesh_info, DDPMeshInfo) and not self.group.all_reduce_grads:
            return False
        assert self.group._reduce_dtype in (None, self.group._orig_dtype), "a result would be cast, and freed"
        return all(parameter.sharded_param.grad is None for parameter in self.group.fsdp_params)


class OwnPart(InMemoryOfActivations):
    """A reduce-scatter without other ranks: this rank's own part stands for the sum (see `Axis.is_rehearsal`)."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        output_tensor.view(-1).copy_(input_tensor.view(-1)[: output_tensor.numel()])
        return work
