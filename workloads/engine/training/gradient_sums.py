"""Sums of weight gradients over micro-batches, which products add to and collectives read.

FSDP casts a micro-batch's gradient to the dtype of reductions, adds those of later micro-batches, concatenates a unit's
gradients with the last one, and reduces the copy. Here a product finds the sum where FSDP keeps it, and the sum itself
is reduced: nothing is cast, copied or concatenated between the two. Gradients without such a product (of norms, of the
embedding, of products that cannot add to fp32) are still accumulated by FSDP, and join the reduction of their unit.

A sum is allocated by the first product after a reduction, which overwrites it, and freed after its reduction; so no
sum is ever zeroed. On one rank without replicas the sum is the gradient. ZeRO 0 and 1 reduce with the last micro-batch
only. ZeRO 2 and 3 reduce with every one, and add what they get to this rank's shard; weights that one rank alone has,
as routed experts may be (`workloads.costs.shape.weight_sums`), are summed until the last micro-batch with them, too:
FSDP would copy, scale and add their gradients in every micro-batch, although there is no other shard. True of torch
2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState
from torch.nn import functional as F

from workloads.engine.ops.linear import GradientSum
from workloads.engine.training.data_parallel import param_groups_of


class GradientSums:
    """Sums of weight gradients of one rank, by weight."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """``modules``: those whose own parameters have sums."""
        self._groups = [group for one in modules if isinstance(one, FSDPModule) for group in param_groups_of(one)]
        for group in self._groups:
            group.post_backward = partial(self._post_backward, group, group.post_backward)
        self._dtype = dtype
        self._parameters: dict[int, Any] = {}
        """FSDP's parameters by the ids of their gathered weights."""
        self._reading: tuple[list[Tensor], Any] = [], None
        """Sums that the last reduction reads, and the event of its end."""
        self._reduced: list[Any] = []
        """Events of the ends of all reductions that compute has not waited for."""

    def __call__(self, weight: Tensor) -> GradientSum:
        """Sum of a weight, given as the tensor that FSDP gathers: the same one in every step."""
        parameter = self._parameter_of(weight)
        total = parameter.unsharded_accumulated_grad
        if total is not None:
            return GradientSum(total, is_empty=False)
        total = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
        parameter.unsharded_accumulated_grad = total
        return GradientSum(total, is_empty=True)

    def release(self) -> None:
        """Make compute wait until no reduction reads sums, and free them; call it after the last backward of a chunk,
        as FSDP does. Otherwise the next reduction does it."""
        if self._reading[1] is not None:
            self._groups[0].device_handle.current_stream().wait_event(self._reading[1])
        self._reading = [], None

    def finish(self) -> None:
        """Make compute wait for all reductions; call it before gradients are read."""
        for event in self._reduced:
            self._groups[0].device_handle.current_stream().wait_event(event)
        self._reduced.clear()

    def _parameter_of(self, weight: Tensor) -> Any:
        if id(weight) not in self._parameters:  # the weights of a group exist once it was gathered
            self._parameters |= {
                id(parameter._unsharded_param): parameter
                for group in self._groups
                for parameter in group.fsdp_params
                if hasattr(parameter, "_unsharded_param")
            }
        return self._parameters[id(weight)]

    @torch.no_grad()
    def _post_backward(self, group: Any, of_fsdp: Callable[..., None], *args: Any) -> None:
        """Do what FSDP's ``post_backward`` of a group does, ``of_fsdp``, which accumulates; but reduce the sums."""
        shards = group._reduce_scatter_process_group.size()
        # ``all_reduce_grads`` is true of the last micro-batch alone.
        if not group.reduce_grads or (shards == 1 and not group.all_reduce_grads):
            reduces, group.reduce_grads = group.reduce_grads, False
            of_fsdp(*args)
            group.reduce_grads = reduces
            return
        group._training_state = TrainingState.POST_BACKWARD
        summed = []
        for parameter in group.fsdp_params:
            if not hasattr(parameter, "_unsharded_param"):
                continue
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
            total = parameter.unsharded_accumulated_grad
            if total is None:  # without mixed precision autograd accumulates in the dtype of reductions
                total = parameter._unsharded_param.grad
            parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None
            if total is not None:
                summed.append((parameter, total))
        if group.reshard_after_backward:
            group.reshard()
        if summed:
            self._reduce(group, *map(list, zip(*summed, strict=True)))

    def _reduce(self, group: Any, parameters: list[Any], totals: list[Tensor]) -> None:
        """Start to sum a unit's gradients over ranks. This rank's shard of each becomes the parameter's gradient, or is
        added to that of earlier micro-batches.

        All memory is that of the compute stream. The sums that a reduction reads stay until the next one starts, as
        FSDP's copies would.
        """
        shards = group._reduce_scatter_process_group.size()
        replicas = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
        flat = [_padded(total, shards).view(-1) for total in totals]
        own = next(parameter.orig_dtype for parameter in group.fsdp_params)
        if shards == 1 and replicas is None:
            _give(parameters, [one.to(own) for one in flat], nullcontext())
            return
        handle, context = group.device_handle, group.comm_ctx
        compute = handle.current_stream()
        self.release()
        results, stream, parts = flat, compute, flat
        if shards > 1:
            sizes = [one.numel() // shards for one in flat]
            result = torch.empty(sum(sizes), dtype=self._dtype, device=flat[0].device)
            results, parts, stream = [result], list(result.split(sizes)), context.reduce_scatter_stream
            stream.wait_stream(compute)
            with handle.stream(stream):
                _reduce_scatter(parts, flat, group._reduce_scatter_process_group)
            self._reading = flat, stream.record_event()
        if replicas is not None:
            context.all_reduce_stream.wait_stream(stream)
            stream = context.all_reduce_stream
            with handle.stream(stream):
                _all_reduce(results, replicas)
        if own != self._dtype:  # as FSDP casts what it has reduced; what is read stays until the next reduction
            cast = torch.empty(sum(one.numel() for one in parts), dtype=own, device=flat[0].device)
            shards_of = list(cast.split([one.numel() for one in parts]))
            stream.wait_stream(compute)
            with handle.stream(stream):
                torch._foreach_copy_(shards_of, parts)
            self._reading, parts = ([*self._reading[0], *results], stream.record_event()), shards_of
        if _give(parameters, parts, handle.stream(stream)):
            self._reading = [*flat, *results, *parts], stream.record_event()
        self._reduced.append(stream.record_event())


def _give(parameters: list[Any], shards: list[Tensor], on_stream: AbstractContextManager[None]) -> bool:
    """Make flat, padded shards the gradients of parameters, or add them to those that are there. Whether some were
    added, and so are read by operations of that stream."""
    there, new = [], []
    for parameter, shard in zip(parameters, shards, strict=True):
        local = shard[: parameter.sharded_size.numel()].view(parameter.sharded_size)
        gradient = parameter.sharded_param.grad
        if gradient is None:
            parameter.sharded_param.grad = parameter.to_sharded_dtensor(local)
        else:
            there.append(gradient.to_local())
            new.append(local)
    if there:
        with on_stream:
            torch._foreach_add_(there, new)
    return len(there) > 0


def _reduce_scatter(parts: list[Tensor], totals: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over ranks in one message."""
    if dist.get_backend(group) == "fake":
        _rehearse(parts, totals, group)
        return
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), False
    _wait(group.reduce_scatter_tensor_coalesced(parts, totals, options))


def _rehearse(parts: list[Tensor], totals: list[Tensor], group: dist.ProcessGroup) -> None:
    """The same without other ranks: this rank's own part stands for the sum. Traffic is counted by one operation that
    FakeTensors know, on tensors without memory."""
    size = sum(total.numel() for total in totals)
    whole, own = (_without_memory(totals[0], count) for count in (size, size // group.size()))
    torch.ops._c10d_functional.reduce_scatter_tensor_out(whole, "sum", group.size(), group.group_name, out=own)
    for part, total in zip(parts, totals, strict=True):
        part.copy_(total[: part.numel()])


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over replicas in one message; in a rehearsal only count it."""
    if dist.get_backend(group) == "fake":
        whole = _without_memory(tensors[0], sum(one.numel() for one in tensors))
        torch.ops._c10d_functional.all_reduce_(whole, "sum", group.group_name)
        return
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), False
    _wait(group.allreduce_coalesced(tensors, options))


def _without_memory(like: Tensor, count: int) -> Tensor:
    """A tensor of ``count`` elements for calls that are only counted."""
    return torch.empty(1, dtype=like.dtype, device="meta").expand(count)


def _wait(work: dist.Work | None) -> None:
    """Let the current stream wait for a collective; without a work object the backend has done so."""
    if work is not None:
        work.wait()


def _padded(total: Tensor, shards: int) -> Tensor:
    """The sum with as many rows as all shards together, which is a copy only where ``shards`` does not divide them."""
    missing = -total.shape[0] % shards
    return F.pad(total, [0, 0] * (total.dim() - 1) + [0, missing]) if missing else total
