"""Lets reduced gradients reuse memory that activations have freed.

PyTorch's allocator keeps freed blocks apart by stream, and FSDP allocates reduced gradients on its own stream: 4 bytes
for each parameter of a rank's shard. They would come on top of the peak of activations, although a gradient exists only
after the activations that it was computed from are freed. On a nearly full device the allocator would then free and
allocate blocks in every step (``allocator_retries``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo


class InMemoryOfActivations(DefaultReduceScatter):
    """Reduce-scatter of one FSDP group (an ``FSDPParamGroup``) whose result is allocated on the compute stream, like
    its input.

    Both streams may use the result without further waiting: before FSDP allocates a result, the reduce-scatter stream
    waits for all compute so far, and before the optimizer, compute waits for all reductions. The result must not be
    freed in between. A result that is added to another tensor is freed early, so it is still allocated on the
    reduce-scatter stream, and so is one that FSDP casts to the dtype of the shards and frees (``grad_reduce`` and
    ``master_weights`` in different formats). True of torch 2.11 and 2.13.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.compute: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an input, which FSDP requests first, or a result."""
        self._release_before()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if stream != self.group.comm_ctx.reduce_scatter_stream:
                self.compute = stream
            elif self.compute is not None and self._becomes_the_gradient(dtype):
                with torch.cuda.stream(self.compute):
                    return super().allocate(size, dtype=dtype, device=device)
        return super().allocate(size, dtype=dtype, device=device)

    def _release_before(self) -> None:
        """Free what the reduction before has all-reduced and cast. FSDP keeps every unit's until the end of a backward,
        so that no reduce-scatter gets its memory while it is read: the stream of reduce-scatters waits instead."""
        context = self.group.comm_ctx
        before, context.reduced_before = getattr(context, "reduced_before", None), self.group
        if before is None or before is self.group:
            return
        state = getattr(before, "_all_reduce_state", None)
        if state is None or state.all_reduce_input.dtype == before._orig_dtype:
            return  # what is not cast is the gradient itself
        if state.event is not None:
            context.reduce_scatter_stream.wait_event(state.event)
        before._all_reduce_state = None

    def _becomes_the_gradient(self, dtype: torch.dtype) -> bool:
        """Whether a result of this dtype becomes the gradient itself. False if it will be cast, if earlier
        micro-batches have left a gradient, or if replicas are summed later (HSDP)."""
        if dtype != self.group._orig_dtype:
            return False
        if isinstance(self.group.mesh_info, DDPMeshInfo) and not self.group.all_reduce_grads:
            return False
        return all(parameter.sharded_param.grad is None for parameter in self.group.fsdp_params)


class OwnPart(InMemoryOfActivations):
    """Reduce-scatter of a rehearsal, without other ranks: this rank's own part stands for the sum (see
    `Axis.is_rehearsal`)."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        output_tensor.view(-1).copy_(input_tensor.view(-1)[: output_tensor.numel()])
        return work
