"""Attention to documents whose tokens are dealt over ranks: all ranks one after the other in one process.

Gathers return what all ranks have packed, and sums of gradients are added here, so that one device is enough.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workloads.engine.test_document_attention import dense, gradients
from workloads.engine.collectives import document_exchange
from workloads.engine.collectives.communication import Axis
from workloads.engine.collectives.context_parallel import _pack, _unpack
from workloads.engine.collectives.document_exchange import packed_attention, seen_keys
from workloads.engine.kind_ops.document_attention import Order
from workloads.spec.documents.shares import shares

SEQUENCES = [(300, 1, 127, 84), (128, 384), (512,), (2,) * 256]


def held_by(sequences: list[tuple[int, ...]], cp: int, balance: str) -> list[Tensor]:
    """[B, S] by rank."""
    found = []
    for rank in range(cp):
        rows = []
        for lengths in sequences:
            size, chunks = shares(lengths, cp, balance)
            rows.append(torch.cat([torch.arange(size) + chunk * size for chunk in chunks[rank]]))
        found.append(torch.stack(rows))
    return found


def places_of(sequences: list[tuple[int, ...]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in sequences])


def tokens_of(x_BNTH: Tensor, held_BS: Tensor) -> Tensor:
    return torch.stack([x[:, held] for x, held in zip(x_BNTH, held_BS, strict=True)])


def exchanged(
    patch: pytest.MonkeyPatch, whole: list[Tensor], sequences: list[tuple[int, ...]], cp: int, balance: str
) -> tuple[Tensor, list[Tensor]]:
    """(output, gradients of queries, keys and values) of whole sequences, computed by ``cp`` ranks."""
    held = held_by(sequences, cp, balance)
    device, places = whole[0].device, places_of(sequences)
    own = [[tokens_of(x, of_rank.to(device)).detach().requires_grad_() for x in whole] for of_rank in held]
    message = torch.cat([_pack(k, v).detach() for _, k, v in own])
    sums: list[Tensor] = []

    def reduce_scatter(summed: Tensor, axis: Axis) -> Tensor:
        sums.append(summed)
        return summed.chunk(axis.size)[axis.rank]

    patch.setattr(document_exchange, "gather_async", lambda packed, axis: message)
    patch.setattr(document_exchange, "reduce_scatter_async", reduce_scatter)
    patch.setattr(document_exchange, "wait", lambda pending: pending)
    o_BNTV = torch.empty(*whole[0].shape[:3], whole[2].shape[3], dtype=whole[0].dtype, device=device)
    found = [torch.empty_like(x) for x in whole]
    torch.manual_seed(1)
    grad = torch.randn(o_BNTV.shape, dtype=torch.float64).to(o_BNTV)
    others = [of_rank.flatten().to(device) for of_rank in held]
    index_T = torch.arange(whole[0].shape[2], device=device)
    for rank, (q, k, v) in enumerate(own):
        axis: Any = Axis("cp", cp, rank, None)
        at = places.gather(1, held[rank]).flatten().to(device)
        seen = seen_keys(at, others, index_T, (axis, "allgather"), q)
        o = packed_attention(q, k, v, (axis, "allgather"), seen)
        put(o_BNTV, o.detach(), held[rank])
        put(found[0], torch.autograd.grad(o, (q, k, v), tokens_of(grad, held[rank].to(device)))[0], held[rank])
    for rank, part in enumerate(sum(sums[1:], sums[0]).chunk(cp)):
        for at, of_rank in zip(found[1:], _unpack(part, whole[1].shape[3]), strict=True):
            put(at, of_rank.to(at.dtype), held[rank])
    return o_BNTV, found


def put(whole_BNTH: Tensor, own_BNSH: Tensor, held_BS: Tensor) -> None:
    for whole, own, held in zip(whole_BNTH, own_BNSH, held_BS, strict=True):
        whole[:, held.to(whole.device)] = own


def inputs(batch: int, tokens: int, size: int, value_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, 4, tokens, size), (batch, 2, tokens, size), (batch, 2, tokens, value_size)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("cp", "balance"), [(2, "none"), (2, "greedy"), (4, "greedy")])
@pytest.mark.parametrize("value_size", [16, 8])
def test_ranks_compute_the_attention_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, cp: int, balance: str, value_size: int
) -> None:
    whole = inputs(len(SEQUENCES), 512, 16, value_size)
    expected = dense(*whole, SEQUENCES, torch.arange(512))
    o, found = exchanged(monkeypatch, whole, SEQUENCES, cp, balance)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, gradients(expected, whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_orders_are_inverses_and_sequences_have_their_own() -> None:
    held = held_by([(5, 3, 8), (16,)], 2, "greedy")
    order = Order.of(held)
    assert order.held_F[order.whole_F].tolist() == list(range(32))
    # received rows: tokens of rank 0, then of rank 1, each of sequence 0, then of sequence 1
    rows = [(int(of_rank[at, token]), at) for of_rank in held for token in range(8) for at in range(2)]
    in_order = [rows[row] for row in order.whole_F.tolist()]
    assert in_order == [(token, at) for token in range(16) for at in range(2)]


@pytest.mark.gpu
@pytest.mark.parametrize("balance", ["none", "greedy"])
def test_ranks_on_a_gpu(monkeypatch: pytest.MonkeyPatch, balance: str) -> None:
    """Output and gradients of two ranks, one after the other, by FlexAttention in bf16, are those of the plain formulas
    on whole sequences in float64; other documents compile nothing."""
    compiled = []
    for sequences in ([(600, 2, 722, 724), (2048,)], [(1024, 1024), (2,) * 1024], [(7, 2041), (1500, 548)]):
        whole = inputs(2, 2048, 64, 64)
        expected = dense(*whole, sequences, torch.arange(2048))
        on_device = [x.detach().bfloat16().cuda() for x in whole]
        o, found = exchanged(monkeypatch, on_device, sequences, 2, balance)
        torch.testing.assert_close(o.cpu().double(), expected, rtol=2e-2, atol=2e-2)
        for one, other in zip(found, gradients(expected, whole), strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=5e-2, atol=5e-2)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[1] == compiled[2]


@pytest.mark.gpu
def test_a_graph_takes_other_documents() -> None:
    """Masks, the order of keys and attention with its gradients are captured once; a replay with other documents
    computes theirs."""
    cp: Any = (Axis("cp", 1, 0, None), "ulysses")
    index_T = torch.arange(1024, device="cuda")
    q, k, v = (x.detach().bfloat16().cuda().requires_grad_() for x in inputs(2, 1024, 64, 64))
    places = torch.zeros(2048, dtype=torch.int64, device="cuda")

    def step() -> list[Tensor]:
        seen = seen_keys(places, [places], index_T, cp, q)
        o = document_exchange.document_attention(q, k, v, seen)
        return [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o)), Order.of(held).whole_F]

    places.copy_(places_of([(512, 512), (1024,)]).flatten())
    held = [torch.stack([one, one.flip(0)]) for one in index_T.view(2, -1)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sequences in ([(512, 512), (1024,)], [(3, 1021), (256,) * 4]):
        places.copy_(places_of(sequences).flatten())
        graph.replay()
        for one, other in zip(captured, step(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
