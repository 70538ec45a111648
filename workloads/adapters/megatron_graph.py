"""Megatron-Core's CUDA graph of a step's forward and backward passes, ``full_iteration``, for ``compile=block``.

The first step runs without the graph, so that NCCL, cuBLAS and the allocator have started; the second one is captured.
The optimizer stays outside, as in Megatron-Core's training loop. Its own wrapper captures on another stream than that
on which data parallelism made its nodes of the backward graph; newer versions use one stream for both, as here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workloads.contract.measure_spec import MeasureSpec
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

_WARMUP_STEPS = 2
"""Steps until the graph exists: one without it, and the one that is captured."""


def is_graphed(e: Experiment) -> bool:
    return e.compile == "block"


def graph_options(e: Experiment) -> dict[str, Any]:
    """Options of the configuration. The host's wait after messages of a pipeline cannot be captured."""
    if not is_graphed(e):
        return {}
    return {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration", "batch_p2p_sync": False}


def require_warm_up(e: Experiment, spec: MeasureSpec) -> None:
    """Raise `UnsupportedByEngine` if a timed step would be the captured one."""
    if is_graphed(e) and spec.warmup_steps < _WARMUP_STEPS:
        raise UnsupportedByEngine(
            f"with compile=block its second step is captured as a CUDA graph, but measure.warmup_steps is "
            f"{spec.warmup_steps}; use {_WARMUP_STEPS} or more"
        )


class StepGraph:
    """Runs a step's forward and backward passes on a stream of its own, and from the third step on as a graph."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._batches: list[dict[str, Tensor]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._losses: Any = None
        self.bytes = 0
        """Peak of allocated memory during the capture, which every replay uses again."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """What is queued inside waits for what is queued already, and what follows waits for it."""
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def hold(self, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The batches of a step, in the memory that the graph reads."""
        if not self._batches:
            self._batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
        for held, batch in zip(self._batches, batches, strict=True):
            for name, tensor in batch.items():
                held[name].copy_(tensor)
        return self._batches

    def run(self, passes: Callable[[], Any]) -> Any:
        """The result of ``passes``, which are called in the first two steps."""
        if self._losses is None:
            with self.stream():
                self._losses = passes()
            return self._losses
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            _register_random_states(graph)
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._losses = passes()
            self._graph, self.bytes = graph, torch.cuda.max_memory_allocated()
        self._graph.replay()
        return self._losses


def _register_random_states(graph: torch.cuda.CUDAGraph) -> None:
    from megatron.core.tensor_parallel.random import get_all_rng_states

    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
