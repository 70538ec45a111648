"""Attention within packed documents: the plain formulas and FlexAttention's mask against all scores with a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.kind_ops import document_attention as under_test
from workloads.engine.kind_ops.document_attention import Seen, document_attention, document_forward
from workloads.engine.kind_ops.flex_attention import document_mask, masked_attention

SEQUENCES = [[300, 1, 127, 85], [128, 128, 128, 129], [513]]


def places(sequences: Sequence[Sequence[int]], index: Tensor) -> Tensor:
    """Place of each token of ``index`` in its document, [B, S]."""
    whole = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in sequences])
    return whole[:, index]


def inputs(batch: int, queries: int, keys: int, value_size: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, 4, queries, 16), (batch, 2, keys, 16), (batch, 2, keys, value_size)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, sequences: Sequence[Sequence[int]], index: Tensor) -> Tensor:
    """All scores; a mask by the number of each token's document."""
    document = torch.stack(
        [torch.repeat_interleave(torch.arange(len(one)), torch.tensor(one)) for one in sequences]
    )  # [B, T]
    own = document[:, index].unsqueeze(2) == document.unsqueeze(1)
    own &= torch.arange(k.shape[2]) <= index.unsqueeze(1)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~own.unsqueeze(1), -math.inf)
    return scores.softmax(-1) @ v


def gradients(o: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    grad = torch.randn(o.shape, dtype=torch.float64).to(o.dtype).to(o.device)
    return list(torch.autograd.grad(o, tensors, grad))


def compare(o: Tensor, expected: Tensor, tensors: Sequence[Tensor]) -> None:
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(o, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scores", [2**12, 2**22], ids=["blocks", "whole"])
@pytest.mark.parametrize("value_size", [16, 8])
def test_plain_formulas(monkeypatch: pytest.MonkeyPatch, scores: int, value_size: int) -> None:
    monkeypatch.setattr(under_test, "_SCORES", scores)
    index, (q, k, v) = torch.arange(513), inputs(3, 513, 513, value_size)
    seen = Seen.of(places(SEQUENCES, index), index.expand(3, -1), 513, q)
    assert seen.blocks is None
    compare(document_attention(q, k, v, seen), dense(q, k, v, SEQUENCES, index), (q, k, v))


@pytest.mark.parametrize("rank", [0, 1])
def test_queries_of_two_parts_of_a_sequence(rank: int) -> None:
    sequences = [[300, 1, 211], [512]]
    index = local_positions(512, 2, rank, "allgather")
    q, k, v = inputs(2, 256, 512)
    seen = Seen.of(places(sequences, index), index.expand(2, -1), 512, q)
    compare(document_attention(q, k, v, seen), dense(q, k, v, sequences, index), (q, k, v))


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_masks_of_flex_attention(rank: int | None) -> None:
    sequences = [[300, 1, 127, 96], [128, 128, 128, 140], [524]]
    index = torch.arange(524) if rank is None else local_positions(524, 2, rank, "allgather")
    q, k, v = (x.detach() for x in inputs(3, len(index), 524))
    mask = document_mask(index - places(sequences, index), index.expand(3, -1), 524)
    with torch.no_grad():  # FlexAttention has no backward on a CPU
        o, lse = masked_attention(q, k, v, mask)
        plain_o, plain_lse = document_forward(
            q, k, v, Seen(index - places(sequences, index), index.expand(3, -1), None)
        )
    torch.testing.assert_close(o, dense(q, k, v, sequences, index), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, plain_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, plain_lse.to(lse.dtype), rtol=1e-5, atol=1e-5)


def test_blocks_of_other_documents_are_skipped() -> None:
    """Two documents of 256 tokens: queries of the second do not meet the first's two blocks of keys."""
    index = torch.arange(512)
    mask = document_mask(index - places([[256, 256]], index), index.expand(1, -1), 512)
    assert mask.full_kv_num_blocks is not None
    assert mask.kv_num_blocks[0, 0].tolist() == [1, 1, 1, 1]  # the diagonal
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 0, 1]
    one = document_mask(index - places([[512]], index), index.expand(1, -1), 512)
    assert one.full_kv_num_blocks is not None
    assert one.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3]


def test_masks_of_other_documents_have_the_same_shapes() -> None:
    """So that neither a compiled kernel nor a graph depends on the documents."""
    index = torch.arange(512)
    shapes = []
    for lengths in ([512], [1] * 512, [100, 300, 112]):
        mask = document_mask(index - places([lengths], index), index.expand(1, -1), 512)
        shapes.append([x.shape for x in mask.as_tuple() if isinstance(x, Tensor)])
    assert shapes[0] == shapes[1] == shapes[2]


def test_shapes_alone() -> None:
    with FakeTensorMode():
        q, k, v = inputs(2, 512, 512)
        seen = Seen.of(*(torch.empty(2, 512, dtype=torch.int64) for _ in range(2)), 512, q)
        assert seen.blocks is not None, "as on a GPU, so that its lists count as memory"
        o = document_attention(q, k, v, seen)
        assert o.shape == q.shape
        assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 1])
def test_flex_attention_on_a_gpu(rank: int | None) -> None:
    """Output and gradients are those of the plain formulas, and other documents compile nothing."""
    index = torch.arange(1024) if rank is None else local_positions(1024, 2, rank, "allgather")
    torch.manual_seed(0)
    shapes = [(2, 4, len(index), 64), (2, 2, 1024, 64), (2, 2, 1024, 64)]
    compiled = []
    for sequences in ([[300, 1, 723], [1024]], [[1024], [512, 512]], [[2] * 512, [7, 1017]]):
        q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        positions = places(sequences, index)
        plain = [x.requires_grad_() for x in (q, k, v)]
        expected = document_attention(*plain, Seen.of(positions, index.expand(2, -1), 1024, q))
        on_device = [x.detach().bfloat16().cuda().requires_grad_() for x in plain]
        seen = Seen.of(positions.cuda(), index.expand(2, -1).cuda(), 1024, on_device[0])
        o = document_attention(*on_device, seen)
        torch.testing.assert_close(o.cpu().double(), expected, rtol=2e-2, atol=2e-2)
        found = gradients(o, on_device)
        for one, other in zip(found, gradients(expected, plain), strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=5e-2, atol=5e-2)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[1] == compiled[2]


class Watching(TorchDispatchMode):
    """As the modes that count a step's traffic and its storages do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
def test_a_watched_step_on_a_gpu() -> None:
    index = torch.arange(1024)
    torch.manual_seed(0)
    q, k, v = (torch.randn((1, 4, 1024, 64), device="cuda").bfloat16().requires_grad_() for _ in range(3))
    seen = Seen.of(places([[300, 724]], index).cuda(), index.expand(1, -1).cuda(), 1024, q)
    with Watching():
        watched = document_attention(q, k, v, seen)
        of_watched = gradients(watched, (q, k, v))
    o = document_attention(q, k, v, seen)
    assert torch.equal(o, watched)
    for one, other in zip(gradients(o, (q, k, v)), of_watched, strict=True):
        torch.testing.assert_close(one, other)
