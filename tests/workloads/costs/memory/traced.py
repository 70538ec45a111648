"""The real engine on FakeTensors: every storage of a step is counted, nothing computed."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing.pool
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest

from tests.pool import fork_server
from tests.workloads.costs.shapes import LLAMA_8B
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, model_from_dict

CASES_A_PROCESS = 40
"""Then another process goes on, so that nothing which one leaves behind grows without end."""


def shortened(model: ModelSpec, num_layers: int = 2) -> ModelSpec:
    return model_from_dict({**dataclasses.asdict(model), "num_layers": num_layers})


def experiment(model: ModelSpec = LLAMA_8B, microbatches: int = 1, layers: int = 2, **fields: Any) -> Experiment:
    sequences = fields.get("dp", 1) * fields.get("micro_batch_size", 1) * microbatches
    return Experiment.canonical(model=shortened(model, layers), seq_len=4096, global_batch_size=sequences, **fields)


def rounding(case: Experiment) -> Experiment:
    """The layout with gradients that are rounded before they are added, as most cases here were drawn for."""
    return case.replace(gradient_accumulation_fusion=False)


def traced(case: Experiment, rank: int) -> int:
    """Peak of the second step of one rank in bytes, from a process that traces one case after the other."""
    return _tracer().apply(_traced_peak_bytes, (case, rank))


@cache
def _tracer() -> multiprocessing.pool.Pool:
    """The process that traces, apart from this one since fake groups would be in the way of other tests' groups."""
    pool = fork_server().Pool(1, maxtasksperchild=CASES_A_PROCESS)
    atexit.register(pool.terminate)
    return pool


def _traced_peak_bytes(case: Experiment, rank: int) -> int:
    """Peak of the second step (the optimizer state is there) of one rank under a fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    try:
        with _attention_as_on_a_gpu() if case.model.mla is not None else nullcontext():
            return _peak_bytes(case, rank)
    finally:
        dist.destroy_process_group()


def _peak_bytes(case: Experiment, rank: int) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from workloads.engine.collectives.groups import make_groups
    from workloads.engine.collectives.parameters import local_shard
    from workloads.engine.observing.memory import StorageTracker, tracked_storages
    from workloads.engine.training.build import assemble, shape_chunks
    from workloads.engine.training.data import parts_of_batch

    groups = make_groups(case, rank, torch.device("cpu"))
    chunks = shape_chunks(case, groups)
    tokens = case.micro_batch_size * case.seq_len // case.cp

    def step() -> None:
        batches = [
            tuple(torch.empty(tokens, dtype=torch.long) for _ in range(parts_of_batch(case)))
            for _ in range(case.num_microbatches)
        ]
        engine.pipeline.run(batches)
        engine.optimizer.finish_gradients()
        engine.optimizer.step(engine.optimizer.local_square_norm().sqrt())

    with FakeTensorMode(allow_non_fake_inputs=True):
        for chunk in chunks:
            chunk.to_empty(device="cpu")
        engine = assemble(case, groups, chunks)
        step()
        resident = [local_shard(parameter.current) for parameter in engine.optimizer.parameters]
        resident += [buffer for chunk in chunks for buffer in chunk.buffers()]
        resident += [engine.peers.memory] if engine.peers is not None else []
        tracker = StorageTracker()
        tracker.leave_out(engine.host_tensors())
        for tensor in (*resident, *engine.optimizer.state_tensors()):
            tracker.add(tensor)  # an operation that returns a view of one of them must not count it as new
        with tracked_storages(tracker):
            step()
    return tracker.peak


@contextmanager
def _attention_as_on_a_gpu() -> Iterator[None]:
    """Latent attention keeps what cuDNN keeps; the fused kernel of a CPU needs padded values."""
    import torch

    from workloads.engine.layers import latent_attention

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch, heads, tokens, _ = q.shape
            o = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
            ctx.save_for_backward(q, k, v, o, q.new_empty(batch, heads, tokens, dtype=torch.float32))
            return o

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in ctx.saved_tensors[:3])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return Kernel.apply(q, k, v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "attention", attend)
        yield
