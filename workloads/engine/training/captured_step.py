"""Captures a whole optimizer step of one rank as a CUDA graph and replays it: a step without a host.

A graph holds the addresses of what it reads and writes. So batches are copied into the graph's own memory before a
replay, and the results of a step are copied out of it before the next one. What changes from step to step besides
them is on the device already: weights, moments, the optimizer's count of steps and the loss scale.

The step is captured on the stream on which the eager steps before it ran (`own_stream`): autograd and FSDP keep streams
from step to step. Captures of other streams and queries of events by other threads, such as NCCL's, are allowed while
this thread captures. FSDP's events of the last eager step are dropped first, because a captured stream may not wait
for them, and those of the captured step afterwards, because nothing else may wait for these.

NCCL's time-outs and torch's flight recorder do not see replays. A rank that hangs in one is known by its heartbeat.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from workloads.engine.training.clock import Clock, Mark
from workloads.engine.training.data import Batch
from workloads.engine.training.data_parallel import param_groups_of
from workloads.engine.training.pipeline import PipelineMarks

Batches = list[Batch]
MORE_THAN_EAGER = 0.03
"""Share by which a captured step may reserve more memory than the eager ones before it: 2.0 % at most in 63 runs
(results/recorded: h200_axes_drawn, h200x2_axes_drawn, h200_flash4)."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Results of a step that the host has launched, on the device: of a captured step they are the graph's memory."""

    totals: Tensor
    """(loss, squared gradient norm) of the global batch, and in fp16 the loss scale."""
    marks: PipelineMarks
    reduced: Mark
    """Mark after the reduction of the gradients."""


class Graph(Protocol):
    """What can be captured and replayed."""

    def capture(self, work: Callable[[], Launched]) -> Launched:
        """Call ``work`` once, which launches nothing, and return its result."""

    def replay(self) -> None:
        """Launch everything that was captured."""

    def reset(self) -> None:
        """Free the graph and its memory."""


class CudaGraph:
    """Torch's CUDA graph, captured on the current stream."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Launched]) -> Launched:
        """As `Graph.capture`. An error of ``work``, such as out of memory, is raised itself: ending a capture that
        failed raises another one."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # the graph allocates memory of its own
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            launched = work()
        except BaseException:
            with suppress(RuntimeError):
                self._graph.capture_end()
            raise
        self._graph.capture_end()
        return launched

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


class CapturedStep:
    """One step of a rank, captured and ready to be replayed."""

    def __init__(
        self, chunks: Sequence[nn.Module], clock: Clock, work: Callable[[Batches], Launched], batches: Batches
    ) -> None:
        """Capture ``work`` on batches like ``batches``. Nothing is computed yet."""
        self._graph: Graph = CudaGraph()
        self._batches = stacked(batches)
        views = [tuple(batch) for batch in self._batches]
        _forget_events(chunks)
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
        with clock.inside_graph() as self._marks:
            self._launched = self._graph.capture(lambda: work(views))
        self.peak_bytes = torch.cuda.max_memory_allocated() if clock.cuda else 0
        """Peak of allocated memory during the capture: every replay uses the same memory, and allocates none."""
        _forget_events(chunks)
        self._replayed_at: float | None = None

    def replay(self, batches: Tensor) -> Tensor:
        """Launch the step on ``batches`` (as `stacked` returns them). Returns its ``totals``, copied out of the graph's
        memory."""
        self._batches.copy_(batches)
        self._graph.replay()
        self._replayed_at = time.perf_counter()
        return self._launched.totals.clone()

    def last(self) -> Launched:
        """The last replay with its marks; the next replay sets them again."""
        marks = replace(self._launched.marks, last_backward_at=self._replayed_at)
        return replace(self._launched, marks=marks)

    def release(self) -> None:
        """Free the graph. Call it before process groups are destroyed, since the graph has kernels of theirs."""
        self._graph.reset()


def no_room(reserved_bytes: int) -> str | None:
    """Why a graph may not find its memory on the device of some rank; None if it does. A collective.

    A graph cannot free and join blocks when memory runs out, as eager steps do. So it needs what they reserve at their
    peak, on this rank ``reserved_bytes``, and `MORE_THAN_EAGER` of it. A device has for torch what is free and what
    torch reserves now: the rest belongs to CUDA, NCCL and other processes.
    """
    free, _ = torch.cuda.mem_get_info()
    of_rank = torch.tensor([reserved_bytes, free + torch.cuda.memory_reserved()], device="cuda")
    of_ranks = of_rank.new_empty(dist.get_world_size() * 2)
    dist.all_gather_into_tensor(of_ranks, of_rank)
    return fullest(of_ranks.view(-1, 2).tolist())


def fullest(of_ranks: Sequence[Sequence[int]]) -> str | None:
    """The reason that `no_room` returns. ``of_ranks``: (bytes that eager steps reserve, bytes that the device has) of
    every rank."""
    over = [(round(reserved * (1 + MORE_THAN_EAGER)) / has, rank) for rank, (reserved, has) in enumerate(of_ranks)]
    share, rank = max(over)
    if share <= 1:
        return None
    reserved, has = (size / 2**30 for size in of_ranks[rank])
    return (
        f"a graph may not find its memory: on rank {rank} eager steps reserve {reserved:.1f} GiB, and a graph "
        f"up to {reserved * (1 + MORE_THAN_EAGER):.1f} of {has:.1f} GiB"
    )


def stacked(batches: Batches) -> Tensor:
    """All parts of all micro-batches in one tensor, so that one copy moves them: int64 [micro-batches, parts, T]."""
    return torch.stack([torch.stack(batch) for batch in batches])


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run on a stream other than the default one, which cannot be captured. On a CPU this changes nothing."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS has a workspace for each stream and thread, and torch keeps them
    torch.cuda.empty_cache()  # free memory belongs to the stream that it was allocated on
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


def _forget_events(chunks: Sequence[nn.Module]) -> None:
    """Drop the events and buffers that FSDP keeps from one step to the next (torch 2.11 to 2.13). The device must have
    finished what they stand for, or never wait for it."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        for group in param_groups_of(module) if isinstance(module, FSDPModule) else ():
            group._reshard_after_forward_event = group._post_reduce_event = group._all_reduce_state = None
            shared: Any = group.comm_ctx
            shared.all_gather_state = None
            if hasattr(shared, "reduce_scatter_states"):
                shared.reduce_scatter_states.clear()
                shared._last_post_reduce_events = {}
            else:
                shared.reduce_scatter_state = None
