"""Attention to windows and chunks, with sinks and a cap, beside all scores at once; on a GPU also its speed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.kind_ops.flex_attention import block_mask, flexible_attention
from workloads.engine.kind_ops.span_attention import Reach, span_attention
from workloads.engine.kind_ops.window_attention import takes_flash, window_backward, window_forward

REACHES = [
    Reach(window=1),
    Reach(window=128),
    Reach(window=130),
    Reach(window=299),
    Reach(window=300),
    Reach(chunk=64),
    Reach(chunk=100),
    Reach(chunk=400),
    Reach(cap=2.0),
    Reach(window=33, cap=0.5, value_scale=0.7),
    Reach(value_scale=0.7),
]
LENGTH = 300


def tensors(dtype: torch.dtype, device: str, length: int = LENGTH, value: int = 16) -> list[Tensor]:
    """Queries, keys, values as views of a projection laid out by tokens, and sinks."""
    generator = torch.Generator(device).manual_seed(1)
    shapes = ((4, 24), (2, 24), (2, value))
    made = [torch.randn(2, length, *shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    sinks = torch.randn(4, generator=generator, device=device, dtype=dtype)
    return [x.transpose(1, 2).requires_grad_() for x in made] + [sinks.requires_grad_()]


def seen(length: int, reach: Reach, device: str = "cpu") -> Tensor:
    query = torch.arange(length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device)
    mask = key <= query
    if reach.window is not None:
        mask = mask & (key > query - reach.window)
    if reach.chunk is not None:
        mask = mask & (key // reach.chunk == query // reach.chunk)
    return mask


def plain(q: Tensor, k: Tensor, v: Tensor, reach: Reach, sinks: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    z = q @ k.mT / math.sqrt(q.shape[-1])
    z = z if reach.cap is None else reach.cap * torch.tanh(z / reach.cap)
    z = z.masked_fill(~seen(q.shape[2], reach, q.device.type), -math.inf)
    if sinks is None:
        return reach.value_scale * z.softmax(-1) @ v
    column = sinks.view(1, -1, 1, 1).expand(*z.shape[:3], 1)
    return reach.value_scale * torch.cat([z, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("with_sinks", [False, True], ids=["without", "sinks"])
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_output_and_gradients_are_those_of_all_scores(reach: Reach, with_sinks: bool) -> None:
    *inputs, sinks = tensors(torch.float64, "cpu")
    given = [*inputs, sinks] if with_sinks else inputs
    o = span_attention(*inputs, reach, sinks if with_sinks else None)
    expected = plain(*inputs, reach, sinks if with_sinks else None)
    grad = torch.randn_like(expected)
    assert o.transpose(1, 2).is_contiguous() or (reach.within(LENGTH) == Reach() and not with_sinks)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-13)
    for got, wanted in zip(
        torch.autograd.grad(o, given, grad), torch.autograd.grad(expected, given, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("length", "window"), [(300, 1), (300, 130), (512, 128), (512, 129), (640, 640), (1000, 257)])
def test_flex_attention_skips_what_no_query_of_a_block_sees(length: int, window: int) -> None:
    mask = block_mask(length, window, torch.device("cpu"))
    wanted = F.pad(seen(length, Reach(window=window)), (0, -length % 128, 0, -length % 128))
    blocks = wanted.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    ends = F.pad(wanted[:length], (0, 0, 0, -length % 128), value=True).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    any_seen = blocks.any(3).any(1)
    count = any_seen.sum(-1)
    assert torch.equal(mask.kv_num_blocks[0, 0] + mask.full_kv_num_blocks[0, 0], count.int())
    dense = mask.to_dense()[0, 0].bool()
    assert torch.equal(dense, any_seen)
    assert int(mask.full_kv_num_blocks.sum()) == int(ends.all(3).all(1).sum())


@pytest.mark.parametrize(("window", "cap"), [(37, None), (LENGTH, 1.5), (140, 1.5)])
def test_flex_attention_gives_output_and_sum(window: int, cap: float | None) -> None:
    q, k, v = (x.detach() for x in tensors(torch.float32, "cpu", value=24)[:3])
    o, lse = flexible_attention(q, k, v, window, cap)
    expected, sums, _ = window_forward(*(x.double() for x in (q, k, v)), window, cap)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=1e-5)


# On a GPU


def on_gpu(length: int, size: int = 64, value: int = 64, heads: int = 8, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value))
    made = [torch.randn(1, length, *shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def _milliseconds(body: Any) -> float:
    for _ in range(3):
        body()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        body()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


@pytest.mark.gpu
@pytest.mark.parametrize("value", [64, 32])
@pytest.mark.parametrize("window", [1, 100, 128, 1000])
def test_a_window_on_a_gpu_is_masked_attention(window: int, value: int) -> None:
    """Flash and FlexAttention, forward and backward, beside SDPA with a mask in float32."""
    q, k, v = on_gpu(2048, value=value)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    mask = seen(2048, Reach(window=window), "cuda")
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, wide, grad)
    assert takes_flash(q)
    o, lse, saved = window_forward(q.detach(), k.detach(), v.detach(), window)
    assert saved.random is not None, "the flash kernel"
    grads = window_backward(grad.bfloat16(), q.detach(), k.detach(), v.detach(), o, lse, saved)
    flexible, sums = flexible_attention(q, k, v, window)
    of_flex = torch.autograd.grad(flexible, (q, k, v), grad.bfloat16())
    for got in ((o, *grads), (flexible, *of_flex)):
        for one, other in zip(got, (expected, *wanted), strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0.03, atol=0.03)
    torch.testing.assert_close(lse, sums, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "reach", [Reach(window=128), Reach(chunk=512), Reach(cap=5.0), Reach(window=200, cap=5.0)], ids=str
)
def test_kinds_on_a_gpu_with_sinks(reach: Reach) -> None:
    q, k, v = on_gpu(1024)
    sinks = torch.randn(8, device="cuda").bfloat16().requires_grad_()
    given = [q, k, v, sinks]
    wide = [x.detach().double().requires_grad_() for x in given]
    o, expected = span_attention(q, k, v, reach, sinks), plain(*wide[:3], reach, wide[3])
    grad = torch.randn_like(expected)
    torch.testing.assert_close(o.double(), expected, rtol=0.03, atol=0.03)
    found = torch.autograd.grad(o, given, grad.to(o.dtype))
    for got, wanted in zip(found, torch.autograd.grad(expected, wide, grad), strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_short_window_costs_a_tenth_of_full_attention(kernel: str, record_property: Any) -> None:
    """A window of 128 at 32,768 tokens, forward and backward, in time; and no tensor of S x S."""
    q, k, v = on_gpu(32768, heads=16, kv_heads=4)
    grad = torch.randn_like(q)

    def full() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), grad)

    def window() -> None:
        if kernel == "flash":
            o = span_attention(q, k, v, Reach(window=128))
        else:
            o, _ = flexible_attention(q, k, v, 128)
        torch.autograd.grad(o, (q, k, v), grad)

    window()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    window()
    assert torch.cuda.max_memory_allocated() - held < 12 * q.numel() * q.element_size(), "less than S x S bytes"
    ratio = _milliseconds(window) / _milliseconds(full)
    record_property("ratio", ratio)
    print(f"{kernel}: window 128 of 32,768 tokens costs {ratio:.3f} of full attention")
    assert ratio <= 0.1
