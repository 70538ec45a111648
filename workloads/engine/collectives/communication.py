"""Collectives between ranks, each along one axis of the layout.

Everything that layers, attention and the pipeline send goes through this module, so that one place knows which axis
pays for it. FSDP sends the traffic of data parallelism (`workloads.engine.training.data_parallel`).

Functions ending in ``_async`` start a collective and return at once: call `wait` on the result before using it. All of
them are functional: ``torch.compile`` can trace them, and their inputs may be freed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the layout as one rank sees it: the ranks that differ from this one on that axis alone."""

    name: str
    """A name of `workloads.spec.mesh.AXES`, or one that experts add (`workloads.engine.collectives.groups`): ``ep``,
    ``etp``."""
    size: int
    rank: int
    """Coordinate of this rank."""
    group: dist.ProcessGroup | None
    """None when ``size == 1``: then no collective may run."""
    is_rehearsal: bool = False
    """True in a rehearsal, where the other ranks do not exist. This rank's own numbers stand for theirs: torch 2.11's
    fake groups leave the results of reduce-scatters and all-to-alls as uninitialised memory, often zero, and on zeros
    matmuls draw less power and clock higher."""

    @property
    def group_name(self) -> str:
        """The name under which functional collectives know the group."""
        assert self.group is not None, f"a collective along {self.name}, which has one rank"
        return self.group.group_name


def gather_async(x: Tensor, axis: Axis) -> Tensor:
    """Start gathering ``x`` of all ranks, concatenated along dim 0."""
    return _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group_name)


def reduce_scatter_async(x: Tensor, axis: Axis) -> Tensor:
    """Start summing ``x`` over the ranks and keeping this rank's part of dim 0."""
    x = x.contiguous()
    part = _ops.reduce_scatter_tensor(x, "sum", axis.size, axis.group_name)
    return part.copy_(x.chunk(axis.size)[axis.rank]) if axis.is_rehearsal else part


def all_reduce_async(x: Tensor, axis: Axis) -> Tensor:
    """Start summing ``x`` over the ranks."""
    return _ops.all_reduce(x.contiguous(), "sum", axis.group_name)


def all_to_all_async(x: Tensor, axis: Axis) -> Tensor:
    """Start sending the i-th of ``size`` equal parts of dim 0 to rank i; part j of the result is from rank j."""
    parts = [x.shape[0] // axis.size] * axis.size
    return exchange_async(x, parts, parts, axis)


def exchange_async(x: Tensor, receive: list[int], send: list[int], axis: Axis) -> Tensor:
    """Start sending the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1 and so on; the result has
    ``receive[j]`` rows from rank j, in the order of the ranks."""
    x = x.contiguous()
    rows = _ops.all_to_all_single(x, receive, send, axis.group_name)
    return repeat_rows(rows, x) if axis.is_rehearsal else rows


def rotate_async(x: Tensor, axis: Axis) -> Tensor:
    """Start sending ``x`` to the next rank of the axis and receiving the same shape from the rank before (a ring).

    It is an all-to-all whose other parts are empty, which NCCL sends as one message to one peer. Unlike ``isend`` and
    ``irecv`` it can be traced, and returns under a fake process group.
    """
    to, origin = [0] * axis.size, [0] * axis.size
    to[(axis.rank + 1) % axis.size] = origin[(axis.rank - 1) % axis.size] = x.shape[0]
    return exchange_async(x, origin, to, axis)


def repeat_rows(rows: Tensor, x: Tensor) -> Tensor:
    """Fill ``rows`` [M, ...] by repeating the rows of ``x`` [N, ...] cyclically."""
    count = len(x)
    for start in range(0, len(rows) if count else 0, max(count, 1)):
        part = rows[start : start + count]
        part.copy_(x[: len(part)])
    return rows


def wait(x: Tensor) -> Tensor:
    """Wait for a collective started above. Returns its result, ready to use, in the same memory."""
    if isinstance(x, FakeTensor) and not torch.compiler.is_compiling():
        return x  # nothing to wait for, and the fake operator would allocate memory of its own
    return _ops.wait_tensor(x)
