"""Exchanges tokens of a tensor-parallel group in memory that its ranks read and write on each other's devices, while
they multiply: a product begins with the rows that this rank has, and sums leave row by row.

    gathered product  X W of all ranks' rows: own rows first, those of the others as their copies arrive
    summed product    X W, summed over ranks, of which each keeps its rows: rows of the others first, which leave while
                      the next ones are computed

The copies are made by the devices' copy engines, which take nothing from the products; NCCL's kernels would take
multiprocessors. (Asynchronous tensor parallelism; Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959, overlap in the
same way.) The memory is torch's symmetric memory, two slots of it, used in turn.

Every rank makes the same exchanges in the same order, one after the other in a lane of its own. In each there is one
barrier: behind the copies into a slot, before anybody reads it. A slot is written again two exchanges later, behind the
barrier of the exchange between, which no rank passes before it has read what it wanted. So a sum must be read
(`Sum.wait`) before the next exchange begins.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from workloads.costs.shape.peer_memory import SLOTS, slot_bytes
from workloads.engine.collectives.communication import Axis, all_reduce_async, gather_async, wait
from workloads.spec.experiment import Experiment

_ops = torch.ops._c10d_functional


class Handle(Protocol):
    """Memory of a group, as torch's ``_SymmetricMemory`` offers it."""

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """Memory of a rank, as a tensor. ``storage_offset``: in elements."""

    def barrier(self, channel: int = 0) -> None:
        """Make the current stream wait for the other ranks' streams."""


class _Lane:
    """Where copies run: a stream beside the one that computes. On a CPU they run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_compute(self) -> AbstractContextManager[Any]:
        """Run behind everything that compute has been given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def done(self) -> torch.cuda.Event | None:
        """The moment at which everything in the lane so far is done."""
        return None if self._stream is None else self._stream.record_event()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class Gathering:
    """Rows of all ranks on their way: ``full`` [ranks x t, I]."""

    def __init__(self, x: Tensor, full: Tensor, axis: Axis, arrived: dict[int, torch.cuda.Event | None]) -> None:
        self._x, self._full, self._axis, self._arrived = x, full, axis, arrived

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._full)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their content) rank by rank, in the order in which they arrive; this rank's own come first."""
        rows = len(self._x)
        yield slice(self._axis.rank * rows, (self._axis.rank + 1) * rows), self._x
        for rank, event in self._arrived.items():
            if rank != self._axis.rank:
                _wait(event)
                place = slice(rank * rows, (rank + 1) * rows)
                yield place, self._full[place]

    def wait(self) -> Tensor:
        """All rows, if the exchange was asked for a whole copy."""
        for event in self._arrived.values():
            _wait(event)
        return self._full


class Sum:
    """A sum over ranks, of which this rank keeps its rows [t, O]."""

    def __init__(
        self, peers: PeerMemory, partial: Tensor, own: slice, received: Tensor, done: torch.cuda.Event | None
    ) -> None:
        self._peers, self._partial, self._own, self._received, self._done = peers, partial, own, received, done
        self._total = torch.empty_like(partial[own])
        peers.has_unread_sum = True

    def wait(self) -> Tensor:
        """This rank's rows of the sum."""
        _wait(self._done)
        first, *others = self._received
        torch.add(self._partial[self._own], first, out=self._total)
        for other in others:
            self._total.add_(other)
        self._peers.has_unread_sum = False
        return self._total


class PeerMemory:
    """The memory of one tensor-parallel group, as one of its ranks uses it."""

    def __init__(self, axis: Axis, memory: Tensor, handle: Handle | None) -> None:
        """``memory``: uint8, `SLOTS` slots. ``handle``: None if the other ranks cannot reach it."""
        self._axis, self.memory, self._handle = axis, memory, handle
        self._slot_bytes = len(memory) // SLOTS
        self._lane = _Lane(memory.device)
        self._turn = 0
        self.has_unread_sum = False

    @property
    def is_open(self) -> bool:
        """Whether the ranks reach each other's memory. Otherwise nothing may be exchanged here."""
        return self._handle is not None

    def gather(self, x: Tensor, *, whole: bool = True) -> Gathering:
        """Start to gather the rows ``x`` [t, I] of all ranks. ``whole``: `Gathering.wait` is to have this rank's rows
        too."""
        x, axis = x.contiguous(), self._axis
        _ops.all_gather_into_tensor(_without_memory(x.shape, x.dtype), axis.size, axis.group_name)
        full = x.new_empty(axis.size * len(x), *x.shape[1:])
        handle, slot = self._begin(x)
        arrived = {}
        with self._lane.after_compute():
            handle.get_buffer(axis.rank, x.shape, x.dtype, slot).copy_(x)
            handle.barrier()
            for step in range(1, axis.size):
                rank = (axis.rank + step) % axis.size
                rows = slice(rank * len(x), (rank + 1) * len(x))
                full[rows].copy_(handle.get_buffer(rank, x.shape, x.dtype, slot))
                arrived[rank] = self._lane.done()
            if whole:
                full[axis.rank * len(x) : (axis.rank + 1) * len(x)].copy_(x)
                arrived[axis.rank] = self._lane.done()
        return Gathering(x, full, axis, arrived)

    def summed_product(self, x: Tensor, matrix: Tensor) -> Sum:
        """Start to sum ``x matrix`` over the ranks. ``x``: [ranks x t, I]; ``matrix``: [I, O]."""
        axis = self._axis
        rows, columns = len(x) // axis.size, matrix.shape[1]
        y = x.new_empty(len(x), columns)
        _ops.reduce_scatter_tensor(_without_memory(y.shape, y.dtype), "sum", axis.size, axis.group_name)
        handle, slot = self._begin(y[:rows])
        sizes = (axis.size - 1, rows, columns)
        for step in range(1, axis.size):
            rank = (axis.rank + step) % axis.size
            place = slice(rank * rows, (rank + 1) * rows)
            torch.mm(x[place], matrix, out=y[place])
            with self._lane.after_compute():
                handle.get_buffer(rank, sizes, y.dtype, slot)[step - 1].copy_(y[place])
                if step == axis.size - 1:
                    handle.barrier()
                done = self._lane.done()
        own = slice(axis.rank * rows, (axis.rank + 1) * rows)
        torch.mm(x[own], matrix, out=y[own])
        return Sum(self, y, own, handle.get_buffer(axis.rank, sizes, y.dtype, slot), done)

    def _begin(self, part: Tensor) -> tuple[Handle, int]:
        """The memory, and the offset of the next slot in elements of ``part``: a slot holds one part of each other
        rank."""
        assert self._handle is not None, "the ranks cannot reach each other's memory"
        assert not self.has_unread_sum, "an exchange begins before the sum of the one before is read"
        needed = part.numel() * part.element_size() * (self._axis.size - 1)
        assert needed <= self._slot_bytes, f"a slot of {self._slot_bytes} bytes for {needed}"
        self._turn = (self._turn + 1) % SLOTS
        return self._handle, self._turn * self._slot_bytes // part.element_size()


def gathered_product(gathering: Gathering, matrix: Tensor) -> Tensor:
    """``X matrix`` of the rows of all ranks, [ranks x t, O]. ``matrix``: [I, O]."""
    y = matrix.new_empty(gathering.count, matrix.shape[1])
    for rows, x in gathering.parts():
        torch.mm(x, matrix, out=y[rows])
    return y


def open_peer_memory(experiment: Experiment, axis: Axis, device: torch.device) -> PeerMemory | None:
    """Allocate the memory of a group; collective over the group. None if the experiment's products do without it.

    Devices whose ranks cannot reach each other (CPUs, several nodes, no peer access) hold it unused, so that a step
    needs the same memory everywhere.
    """
    size = SLOTS * slot_bytes(experiment)
    if size == 0:
        return None
    if device.type == "cuda" and not axis.is_rehearsal and _on_one_host(axis, device):
        assert axis.group is not None
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            memory = torch.empty(size, dtype=torch.uint8, device=device)
        try:
            handle = symmetric_memory.rendezvous(memory, axis.group)
        except RuntimeError:  # no peer access
            handle = None
        if _all(handle is not None, axis, device):
            return PeerMemory(axis, memory, handle)
    return PeerMemory(axis, torch.empty(size, dtype=torch.uint8, device=device), None)


def _on_one_host(axis: Axis, device: torch.device) -> bool:
    name = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.int64, device=device)
    return len(set(wait(gather_async(name, axis)).tolist())) == 1


def _all(holds: bool, axis: Axis, device: torch.device) -> bool:
    """Whether something holds on all ranks."""
    without = torch.tensor([0 if holds else 1], dtype=torch.int64, device=device)
    return int(wait(all_reduce_async(without, axis))) == 0


@lru_cache(maxsize=64)
def _without_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Stands for an exchanged tensor in a call that sends nothing: the counters of traffic see it as they see a
    collective."""
    return torch.empty(1, dtype=dtype, device="meta").expand(shape)
