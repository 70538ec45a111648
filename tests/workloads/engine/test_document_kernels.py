"""Attention to packed documents by kernels for sequences of variable length: their lists, how they are called, and on a
GPU their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.workloads.engine.test_document_attention import SEQUENCES, dense, gradients, places
from workloads.engine.kind_ops import document_kernels as under_test
from workloads.engine.kind_ops.document_attention import Seen, document_attention
from workloads.engine.kind_ops.document_kernels import Cuts, attention_by_length
from workloads.engine.ops import flash4
from workloads.engine.ops.attention import choose_flash4

LENGTH = 513


def whole(sequences: Sequence[Sequence[int]]) -> Tensor:
    return places(sequences, torch.arange(sum(sequences[0])))


def test_lists_of_documents() -> None:
    """Documents of all sequences one after the other; the rest of the list is documents of no tokens."""
    cuts = Cuts.of(whole([[300, 1, 127, 85], [128, 128, 128, 129]]), 10, 300)
    assert cuts.bounds_D.dtype == torch.int32
    assert cuts.bounds_D.tolist() == [0, 300, 301, 428, 513, 641, 769, 897, 1026, 1026, 1026]
    assert Cuts.of(whole([[1] * 4]), 4, 1).bounds_D.tolist() == [0, 1, 2, 3, 4]
    assert Cuts.of(whole([[LENGTH]]), 3, LENGTH).bounds_D.tolist() == [0, LENGTH, LENGTH, LENGTH]


def _document_by_document(
    q: Tensor, k: Tensor, v: Tensor, begins: Tensor, ends: Tensor, longest: int, *more: Any
) -> tuple[Tensor, ...]:
    """What the kernel computes, from [rows, heads, H]: (o, log-sum-exp [N, rows], and three that carry its state)."""
    assert torch.equal(begins, ends)
    assert more == (longest, 0.0, True, False)
    assert int(begins.diff().max()) <= longest
    o, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for begin, end in zip(begins.tolist(), begins[1:].tolist(), strict=False):
        heads = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        repeated = [x.repeat_interleave(q.shape[1] // len(x), 0) for x in heads]
        z = repeated[0] @ repeated[1].mT / q.shape[2] ** 0.5
        z = z.masked_fill(torch.ones_like(z, dtype=torch.bool).triu(1), -torch.inf)
        o[begin:end] = (z.softmax(-1) @ repeated[2]).transpose(0, 1)
        lse[:, begin:end] = z.logsumexp(-1)
    return o, lse, torch.tensor(3), torch.tensor(4), torch.tensor(5)


def _its_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, begins: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    assert [int(x) for x in more[-2:]] == [3, 4]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again, lse_again, *_ = _document_by_document(*inputs, begins, begins, more[1], more[1], 0.0, True, False)
        torch.testing.assert_close(again, o)
        torch.testing.assert_close(lse_again, lse)
        return torch.autograd.grad(again, inputs, grad)


class Flash4:
    """The package's two functions, made of the plain formulas."""

    @staticmethod
    def _flash_attn_fwd(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool, **lengths: Any
    ) -> tuple[Tensor, Tensor, None]:
        assert causal
        assert return_lse
        o, lse, *_ = _document_by_document(q, k, v, *_bounds(**lengths), lengths["max_seqlen_k"], 0.0, True, False)
        return o, lse, None

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, grad: Tensor, lse: Tensor, *, causal: bool, **lengths: Any
    ) -> tuple[Tensor, ...]:
        assert causal
        assert lse.is_contiguous()
        begins, ends, longest = _bounds(**lengths)
        return _its_gradients(grad, q, k, v, o, lse, begins, ends, longest, longest, 0.0, True, 3, 4)


def _bounds(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[Tensor, Tensor, int]:
    assert max_seqlen_q == max_seqlen_k
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q


@pytest.mark.parametrize("kernels", ["flash", "flash4"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["of a projection", "heads first"])
def test_how_kernels_are_called(monkeypatch: pytest.MonkeyPatch, heads_first: bool, kernels: str) -> None:
    """Shapes, order of arguments and what the backward is given, with the formulas in place of the kernels."""
    if kernels == "flash":
        stand_in = SimpleNamespace(
            _flash_attention_forward=_document_by_document, _flash_attention_backward=_its_gradients
        )
        monkeypatch.setattr(under_test, "_aten", stand_in)
    else:
        monkeypatch.setattr(flash4, "_interface", lambda: Flash4)
        monkeypatch.setattr(under_test, "runs_flash4", lambda q: True)
    torch.manual_seed(0)
    shapes = [(3, LENGTH, 4, 16), (3, LENGTH, 2, 16), (3, LENGTH, 2, 16)]
    inputs = [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    if heads_first:
        inputs = [x.contiguous() for x in inputs]
    q, k, v = (x.requires_grad_() for x in inputs)
    o = attention_by_length(q, k, v, Cuts.of(whole(SEQUENCES), 12, LENGTH))
    expected = dense(q, k, v, SEQUENCES, torch.arange(LENGTH))
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(o, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_shapes_alone() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 512, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        seen = Seen.of(*(torch.empty(2, 512, dtype=torch.int64) for _ in range(2)), 512, q, limits=(9, 400))
        assert isinstance(seen.blocks, Cuts)
        assert seen.blocks.bounds_D.shape == (10,)
        o = document_attention(q, k, v, seen)
        assert o.shape == q.shape
        assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.fixture(params=["flash", "flash4"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "flash4" and find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    choose_flash4(chosen=request.param == "flash4")
    yield
    choose_flash4(chosen=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
def test_a_graph_takes_other_documents() -> None:
    """A captured call computes the documents that its list has when it is replayed, forward and backward."""
    first, second = ([[300, 1, 723], [1024]], [[1024], [2, 510, 512]])
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 1024, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    )
    grad = torch.randn_like(q)
    index = torch.arange(1024)

    def cuts(sequences: Sequence[Sequence[int]]) -> Cuts:
        return Cuts.of(places(sequences, index).cuda(), 4, 1024)

    def run(of: Cuts) -> tuple[Tensor, ...]:
        o = attention_by_length(q, k, v, of)
        return (o.detach(), *torch.autograd.grad(o, (q, k, v), grad))

    fixed = cuts(first)
    expected = {1: run(fixed), 2: run(cuts(second))}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(fixed)
    for number, sequences in ((1, first), (2, second), (1, first)):
        fixed.bounds_D.copy_(cuts(sequences).bounds_D)
        graph.replay()
        for one, other in zip(results, expected[number], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_a_gpu(size: int, dtype: torch.dtype) -> None:
    """Output and gradients are those of the plain formulas. A document that saw its neighbour would differ by far."""
    index = torch.arange(1024)
    torch.manual_seed(0)
    shapes = [(2, 1024, heads, size) for heads in (4, 2, 2)]
    for sequences in ([[300, 1, 723], [1024]], [[1024], [512, 512]], [[2] * 512, [7, 1017]]):
        plain = [torch.randn(shape, dtype=torch.float64).transpose(1, 2).requires_grad_() for shape in shapes]
        positions = places(sequences, index)
        expected = document_attention(*plain, Seen.of(positions, index.expand(2, -1), 1024, plain[0]))
        on_device = [x.detach().to(dtype).cuda().requires_grad_() for x in plain]
        most = sum(map(len, sequences))
        seen = Seen.of(
            positions.cuda(), index.expand(2, -1).cuda(), 1024, on_device[0], limits=(most, max(map(max, sequences)))
        )
        assert isinstance(seen.blocks, Cuts)
        o = document_attention(*on_device, seen)
        torch.testing.assert_close(o.cpu().double(), expected, rtol=2e-2, atol=2e-2)
        for one, other in zip(gradients(o, on_device), gradients(expected, plain), strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=5e-2, atol=5e-2)
