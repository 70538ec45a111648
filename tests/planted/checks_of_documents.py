"""Checks of packed documents that no loss shows: how they are dealt, and where rotary positions begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.planted.plant import Fault, planted, with_fault
from tests.pool import Pool
from tests.workloads.engine.parity import experiment
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import build, choose_attention
from workloads.engine.training.data import step_batches
from workloads.spec.documents import loads as document_loads
from workloads.spec.documents import shares as document_shares
from workloads.spec.documents.lengths import packed
from workloads.spec.experiment import Experiment

_DOCUMENTS = "lognormal mean=5 sigma=0.9 seed=3"


def document_positions(pool: Pool, fault: Fault | None) -> None:
    """Rotary tables of every token are those of its place in its document. Scores depend on differences of positions
    alone, so that no loss would show it."""
    case = experiment(documents=_DOCUMENTS, micro_batch_size=4)
    (tables,) = pool.run(with_fault, 1, fault, _tables, case)
    sequences = packed(_DOCUMENTS, case.seq_len, case.global_batch_size)
    size, theta = case.model.head_dim, case.model.rope_theta
    frequency = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    for microbatch, cos in enumerate(tables):
        held = sequences[4 * microbatch : 4 * microbatch + 4]
        places = torch.tensor([place for lengths in held for length in lengths for place in range(length)])
        torch.testing.assert_close(cos, torch.outer(places.double(), frequency).cos(), rtol=1e-12, atol=1e-12)


def _tables(rank: int, case: Experiment) -> list[Tensor]:
    """Cosines that the first block of every micro-batch gets."""
    choose_attention(case)
    engine = build(case, make_groups(case, rank, torch.device("cpu")))
    found: list[Tensor] = []

    def note(module: nn.Module, inputs: Any) -> None:
        found.append(inputs[1].clone())

    engine.chunks[0].blocks[0].register_forward_pre_hook(note)
    engine.pipeline.run(step_batches(case, 0, 0, torch.device("cpu")))
    return found


def document_balance(pool: Pool, fault: Fault | None) -> None:
    """Greedy dealing is longest first, to the rank with least attention that has room: of sequences, and of chunks of
    one."""
    # Scores of 36, 16 + 4 = 20, 9 + 9 = 18, 9 + 4 + 1 = 14, in halves
    loads: Any = document_loads
    right = loads.packed
    loads.packed = lambda *_: ((6,), (4, 2), (3, 3), (3, 2, 1))
    try:
        with planted(fault):
            loads.dealt.cache_clear()
            document_shares.shares.cache_clear()
            shares = loads.dealt(document_loads.Packing("here", "greedy", 6, 4, 2, 1))
            # Chunks of 2 tokens: scores of 4, 12, 20 and 28 halves, and 4 of each of the others
            chunks = document_shares.shares((8, 2, 2, 2, 2), 2, "greedy").chunks
    finally:
        loads.packed = right
        loads.dealt.cache_clear()
        document_shares.shares.cache_clear()
    assert chunks == ((0, 3, 4, 6), (1, 2, 5, 7))
    assert shares == (((0,), (3,)), ((1,), (2,)))
