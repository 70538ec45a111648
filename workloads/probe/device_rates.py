"""Measures one device alone: matrix products by shape, attention, copies and the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workloads.contract.probe_figures import Figure, Sizes
from workloads.costs.shape.held_model import kv_heads_fit
from workloads.engine.ops.attention import attention
from workloads.engine.update_ops.adamw import AdamW
from workloads.probe.stopwatch import Stopwatch
from workloads.spec.model_spec import ModelSpec

DEGREES = (1, 2, 4, 8)
"""Degrees of tensor parallelism whose shapes are measured, even if the node has fewer devices."""
Beat = Callable[[], None]
"""Function called before each test, to show that the rank works."""


def matmul_shapes(model: ModelSpec) -> list[tuple[str, int, int, int]]:
    """(name, tp, columns, inner) of a dense layer's products on one of tp ranks, for each tp that divides the model."""
    h, f, heads = model.hidden_size, model.ffn_hidden_size, model.num_heads * model.head_dim
    shapes = []
    for tp in DEGREES:
        if kv_heads_fit(model, tp) and f % tp == 0:
            shapes += [
                ("qkv", tp, heads // tp + 2 * _kv_heads(model, tp) * model.head_dim, h),
                ("out", tp, h, heads // tp),
                ("gate_up", tp, 2 * f // tp, h),
                ("down", tp, h, f // tp),
            ]
    return shapes


def matmul_figures(watch: Stopwatch, model: ModelSpec, sizes: Sizes, share: slice, beat: Beat) -> Iterator[Figure]:
    """FLOP/s of each product of a layer, in forward and for both gradients, by number of rows. ``share``: this rank's
    tests."""
    tests = [(*shape, tokens) for shape in matmul_shapes(model) for tokens in sizes.tokens]
    for name, tp, columns, inner, tokens in tests[share]:
        beat()
        x, y = _bf16(watch, tokens, inner), _bf16(watch, tokens, columns)
        w = _bf16(watch, columns, inner) / inner**0.5
        products = {
            "forward": (x, w.t()),
            "input_gradient": (y, w),
            "weight_gradient": (y.t(), x),
        }
        for which, factors in products.items():
            timed = watch.time(partial(torch.matmul, *factors), sizes.seconds)
            figure = timed.figure("matmul", f"{name}.{which}", rows=tokens, columns=columns, inner=inner, tp=tp)
            yield rate(figure, 2.0 * tokens * columns * inner, "FLOP/s")


def _kv_heads(model: ModelSpec, tp: int) -> int:
    """Key and value heads of one rank: with more ranks than heads, a copy of one."""
    return max(1, model.num_kv_heads // tp)


def attention_figures(watch: Stopwatch, model: ModelSpec, sizes: Sizes, share: slice, beat: Beat) -> Iterator[Figure]:
    """Seconds of causal attention over a micro-batch, forward and backward, with the heads of one of tp ranks."""
    tests = [(tp, mbs) for tp in DEGREES if kv_heads_fit(model, tp) for mbs in sizes.micro_batches]
    for tp, mbs in tests[share]:
        beat()
        heads = (model.num_heads // tp, _kv_heads(model, tp), _kv_heads(model, tp))
        q, k, v = (_bf16(watch, mbs, n, sizes.seq_len, model.head_dim).requires_grad_() for n in heads)
        forward = partial(attention, q, k, v, causal=True)
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        for name, call in (("forward", forward), ("backward", backward)):
            timed = watch.time(call, sizes.seconds)
            yield timed.figure("attention", name, tp=tp, micro_batch_size=mbs, seq_len=sizes.seq_len)


def copy_figures(watch: Stopwatch, sizes: Sizes, beat: Beat) -> Iterator[Figure]:
    """Bytes read and written per second: copies and casts on the device, and copies from the host."""
    beat()
    count = sizes.copy_bytes // 4
    x, y = (torch.randn(count, device=watch.device) for _ in range(2))
    narrow = torch.empty(count, dtype=torch.bfloat16, device=watch.device)
    part = count // 4
    host = torch.zeros(part, pin_memory=watch.device.type == "cuda")
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (partial(y.copy_, x), 8 * count),
        "cast_to_bf16": (partial(narrow.copy_, x), 6 * count),
        "add": (partial(y.add_, x), 12 * count),
        "from_host": (partial(y[:part].copy_, host, non_blocking=True), 4 * part),
    }
    for name, (call, moved) in calls.items():
        yield rate(watch.time(call, sizes.seconds).figure("copy", name, bytes=moved), moved, "B/s")


def optimizer_figures(watch: Stopwatch, sizes: Sizes, beat: Beat) -> Iterator[Figure]:
    """Seconds of one AdamW update, and of the gradient norm; ``columns`` is the number of fp32 parameters."""
    beat()
    weight = nn.Parameter(torch.randn(sizes.optimizer_params, device=watch.device))
    gradient = torch.randn(sizes.optimizer_params, device=watch.device) * 1e-3
    optimizer = AdamW([weight], lr=1e-5, fused=True)
    factor = torch.ones((), device=watch.device)

    def update() -> None:
        weight.grad = gradient
        optimizer.update(factor, None)

    yield watch.time(update, sizes.seconds).figure("optimizer", "adamw", columns=sizes.optimizer_params)
    norm = partial(torch._foreach_norm, [gradient], 2.0)
    yield watch.time(norm, sizes.seconds).figure("optimizer", "norm", columns=sizes.optimizer_params)


def link_figures(watch: Stopwatch, sizes: Sizes, beat: Beat) -> Iterator[Figure]:
    """What optimizer states and activations on the host need: bytes per second of pinned copies, down, and down and up
    at once (of each direction)."""
    beat()
    cuda = watch.device.type == "cuda"
    count = sizes.copy_bytes // 16
    on_device = [torch.zeros(count, device=watch.device) for _ in range(2)]
    on_host = [torch.zeros(count, pin_memory=cuda) for _ in range(2)]
    side: Any = torch.cuda.Stream(watch.device) if cuda else None  # type: ignore[no-untyped-call]

    def down() -> None:
        on_host[0].copy_(on_device[0], non_blocking=True)

    def both() -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else nullcontext():
            on_device[1].copy_(on_host[1], non_blocking=True)
        down()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    for name, call in (("to_host", down), ("both_ways", both)):
        yield rate(watch.time(call, sizes.seconds).figure("copy", name, bytes=4 * count), 4 * count, "B/s")


def rate(figure: Figure, amount: float, unit: str) -> Figure:
    """Returns the figure, a time in seconds, as a rate: ``amount`` per second in ``unit``."""
    return dataclasses.replace(figure, value=amount / max(figure.value, 1e-9), unit=unit)


def _bf16(watch: Stopwatch, *shape: int) -> Tensor:
    """Random numbers like those of activations: products of zeros draw less power and run at higher clocks."""
    return torch.randn(shape, device=watch.device, dtype=torch.bfloat16)
