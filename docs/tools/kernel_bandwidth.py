"""Measures the memory bandwidth of the kernels on this GPU: ``python -m docs.tools.kernel_bandwidth``.

Shapes are those of an 8B Llama at 16,384 tokens in bf16. Bytes are the least that a kernel must read and write; the
time is the median of runs that each start with a cold L2 cache. These kernels are memory-bound, so their upper limit is
the bandwidth of a device copy, which is printed first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from triton.testing import do_bench

from workloads.engine.ops import triton_cross_entropy, triton_rms_norm, triton_rope, triton_swiglu

TOKENS, HIDDEN, FFN, VOCABULARY, CHUNK = 16384, 4096, 14336, 128256, 4096
SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 8, 128


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    elements: int
    """Number of bf16 values read and written."""
    run: Callable[[], object]


def main() -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: there is nothing to measure\n")
        return 2
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    sys.stdout.write(f"{'kernel':24}{'time_ms':>9}{'GB/s':>9}{'of copy':>9}\n")
    copy_rate = None
    for case in cases():
        time_ms = do_bench(case.run, return_mode="median")
        rate = 2 * case.elements / (time_ms * 1e-3)
        copy_rate = copy_rate or rate
        sys.stdout.write(f"{case.name:24}{time_ms:9.3f}{rate / 1e9:9.0f}{rate / copy_rate:9.0%}\n")
    return 0


def cases() -> Iterator[Case]:
    """Yields the cases; the copy comes first."""
    source = _random(TOKENS, 8 * HIDDEN)
    target = torch.empty_like(source)
    yield Case("copy", 2 * source.numel(), lambda: target.copy_(source))

    x, dy, weight = _random(TOKENS, HIDDEN), _random(TOKENS, HIDDEN), _random(HIDDEN)
    y, dweight, rstd = torch.empty_like(x), torch.empty_like(weight), x.new_empty(TOKENS, dtype=torch.float32)
    yield Case("rms_norm forward", 2 * x.numel(), lambda: triton_rms_norm.forward(x, weight, 1e-5, y, rstd))
    yield Case("rms_norm backward", 3 * x.numel(), lambda: triton_rms_norm.backward(dy, x, weight, rstd, y, dweight))

    qkv = _random(TOKENS // SEQ_LEN, SEQ_LEN, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, _ = qkv.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], dim=2)
    rotated_q, rotated_k = q.new_empty(q.shape), k.new_empty(k.shape)
    cos, sin = (torch.rand(SEQ_LEN, HEAD_DIM // 2, device="cuda") for _ in range(2))
    yield Case(
        "rope",
        2 * (q.numel() + k.numel()),
        lambda: triton_rope.rotate(q, k, cos, sin, rotated_q, rotated_k, inverse=False),
    )

    gate_up, dh = _random(TOKENS, 2 * FFN), _random(TOKENS, FFN)
    h, d_gate_up = torch.empty_like(dh), torch.empty_like(gate_up)
    yield Case("swiglu forward", 3 * h.numel(), lambda: triton_swiglu.forward(gate_up, h))
    yield Case("swiglu backward", 5 * h.numel(), lambda: triton_swiglu.backward(gate_up, dh, d_gate_up))

    logits = _random(CHUNK, VOCABULARY)
    targets = torch.randint(VOCABULARY, (CHUNK,), device="cuda")
    statistics = torch.empty(3, CHUNK, device="cuda")
    lse = torch.full((CHUNK,), 20.0, device="cuda")
    yield Case(
        "cross-entropy statistics",
        logits.numel(),
        lambda: triton_cross_entropy.statistics(logits, targets, 0, statistics),
    )
    yield Case(
        "cross-entropy gradient",
        2 * logits.numel(),
        lambda: triton_cross_entropy.logits_to_gradient(logits, targets, 0, lse, 1e-6),
    )


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
