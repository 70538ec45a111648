"""What context-parallel attention sends and saves: as in the closed form, and the same alone and on FakeTensors."""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pool, fork_server
from tests.workloads.engine.attention_checks import inputs
from tests.workloads.engine.test_context_parallel import HALF, KINDS, SIZE, world_axis
from workloads.costs.traffic.context_parallel import context_messages
from workloads.engine.collectives.context_parallel import context_attention, local_positions
from workloads.spec.experiment_values import ContextKind
from workloads.spec.layer_kinds.exchange import ContextParallel

# What is sent


class Sent(TorchDispatchMode):
    """Counts (operation, bytes sent to other ranks) of the collectives that run inside."""

    def __init__(self, cp: int, rank: int) -> None:
        super().__init__()
        self.cp, self.rank = cp, rank
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.__name__:
            self.count(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any) -> None:
        size = args[0].numel() * args[0].element_size()
        if name == "all_gather_into_tensor":
            self.calls["all_gather", (self.cp - 1) * size] += 1
        elif name == "reduce_scatter_tensor":
            self.calls["reduce_scatter", size - size // self.cp] += 1
        else:
            assert name == "all_to_all_single", f"{name} is not in the closed form"
            _, received, parts, _ = args
            row = size // sum(parts)
            peers = sum(part > 0 for other, part in enumerate(parts) if other != self.rank)
            assert sum(received) == sum(parts) and peers in (1, self.cp - 1)
            kind = "all_to_all" if parts[self.rank] else "send"
            self.calls[kind, row * (sum(parts) - parts[self.rank])] += 1


def count_messages(rank: int, kind: ContextKind, shape: Any, dtype: torch.dtype) -> list[Counter[tuple[str, int]]]:
    cp = world_axis(rank)
    own = [x[:, :, local_positions(shape[3], cp.size, rank, kind)] for x in inputs(shape, dtype)]
    q, k, v = (x.requires_grad_() for x in own[:3])
    with Sent(cp.size, rank) as forward:
        o = context_attention(q, k, v, cp, kind)
    with Sent(cp.size, rank) as backward:
        o.backward(own[3])
    return [forward.calls, backward.calls]


def exchanged(heads: int, kv_heads: int, size: int, value_size: int) -> ContextParallel:
    return ContextParallel(split=kv_heads * (size + value_size), queries=heads * size, outputs=heads * value_size)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_those_of_the_closed_form(gloo_pool: Pool, kind: ContextKind, cp: int) -> None:
    for dtype, compute_bytes, sum_bytes in ((torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
        shape = (2, 4 * cp, 2 * cp, 2 * HALF * cp, SIZE, SIZE - 2)
        ranks = gloo_pool.run(count_messages, cp, kind, shape, dtype)
        for index, backward in enumerate((False, True)):
            wanted: Counter[tuple[str, int]] = Counter()
            for message in context_messages(
                kind,
                exchanged(4 * cp, 2 * cp, SIZE, SIZE - 2),
                backward=backward,
                cp=cp,
                tokens=2 * 2 * HALF,
                compute_bytes=compute_bytes,
                sum_bytes=sum_bytes,
            ):
                wanted[message.op, message.bytes_each] += message.calls
            assert [counts[index] for counts in ranks] == [wanted] * cp, f"backward={backward}, {dtype}"


def test_closed_form_by_hand() -> None:
    """cp 2, 100 tokens, 4 query heads and 2 key heads of 10, values of 6, in bf16: both are 100 * 2 * 16 * 2 bytes."""
    sizes: dict[str, Any] = {"along": exchanged(4, 2, 10, 6), "cp": 2, "tokens": 100, "compute_bytes": 2}
    of = lambda kind, backward: [  # noqa: E731
        (m.op, m.calls, m.bytes_each) for m in context_messages(kind, backward=backward, **sizes)
    ]
    assert of("ring", False) == [("send", 1, 6400)]
    assert of("ring", True) == [("send", 1, 6400), ("send", 1, 6400)]
    assert of("allgather", True) == [("all_gather", 1, 6400), ("reduce_scatter", 1, 6400)]
    assert of("ulysses", False) == [("all_to_all", 1, 100 * (2 * 10 + 16) * 2), ("all_to_all", 1, 100 * 2 * 6 * 2)]
    assert context_messages("ring", backward=False, **{**sizes, "cp": 1}) == []
    sizes["cp"] = 3  # sums have three terms, in fp32
    assert of("ring", True) == [("send", 2, 6400), ("send", 2, 12800)]
    assert of("allgather", True) == [("all_gather", 1, 12800), ("reduce_scatter", 1, 25600)]


# Alone, in a fake group


def alone(rank: int, cp: int, kind: ContextKind, fake_tensors: bool, answer: Any) -> None:
    """In a process of its own: one fake process group a process. Answers (shapes, bytes at the peak)."""
    from contextlib import nullcontext

    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workloads.engine.observing.memory import StorageTracker

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cp)
    own = [x[:, :, : 4 * HALF].contiguous() for x in inputs((1, 8, 4, 4 * HALF, SIZE), torch.bfloat16)]
    mode = FakeTensorMode() if fake_tensors else None
    if mode is not None:
        own = [mode.from_tensor(x) for x in own]
    with mode or nullcontext(), StorageTracker() as tracker:
        q, k, v = (x.requires_grad_() for x in own[:3])
        o = context_attention(q, k, v, world_axis(rank), kind)
        held = tracker.current
        gradients = torch.autograd.grad(o, (q, k, v), own[3])
    answer.send(([tuple(x.shape) for x in (o, *gradients)], held, tracker.peak))


@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize("kind", KINDS)
def test_alone_in_a_fake_group(kind: ContextKind) -> None:
    """A rehearsal ends, and FakeTensors need the memory that real tensors need, to the byte."""
    answers = {}
    for rank in (0, 3):
        for fake_tensors in (False, True):
            here, there = multiprocessing.Pipe()
            process = fork_server().Process(target=alone, args=(rank, 4, kind, fake_tensors, there))
            process.start()
            assert here.poll(150), "the rehearsing process did not answer"
            answers[rank, fake_tensors] = here.recv()
            process.join()
        assert answers[rank, False] == answers[rank, True]
        q, kv = (1, 8, 4 * HALF, SIZE), (1, 4, 4 * HALF, SIZE)
        shapes, held, _ = answers[rank, True]
        assert shapes == [q, q, kv, kv]
        of_queries, of_keys, of_lse = 2 * math.prod(q), 2 * math.prod(kv), 4 * math.prod(q[:3])
        saved = of_queries + of_lse
        if kind == "ulysses":  # what was received, and the output before it was sent back
            saved += of_queries + 2 * of_keys + of_queries
        assert held == of_queries + 2 * of_keys + saved, "the inputs and what is saved beside them"
