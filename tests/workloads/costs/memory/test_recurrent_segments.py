"""What one recurrent layer's backward takes in torch operations, counted on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workloads.costs.memory.recurrent_segments import segments_working
from workloads.engine.kind_ops.delta_steps import GatedDeltaStep, KimiDeltaStep
from workloads.engine.kind_ops.mamba_scan import MambaStep
from workloads.engine.kind_ops.segments import Step, scanned
from workloads.engine.observing.memory import StorageTracker
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import Batch, Kernels

DELTA: dict[str, Any] = {"key_heads": 2, "value_heads": 4, "key_dim": 32, "value_dim": 48, "kernel": 4}
KIMI: dict[str, Any] = {"heads": 4, "head_dim": 32, "kernel": 4}
MAMBA: dict[str, Any] = {"heads": 8, "head_dim": 32, "groups": 4, "state": 128, "kernel": 4}
CASES: dict[str, tuple[Step, Kernels, list[int], list[tuple[int, ...]]]] = {
    "gated_delta": (
        GatedDeltaStep(**DELTA, eps=1e-6),
        GatedDeltaRule(**DELTA),
        [2 * 64 + 2 * 192 + 2 * 4],
        [(2 * 64 + 192, 4), (8,), (48,)],
    ),
    "kimi_delta": (KimiDeltaStep(**KIMI, eps=1e-6), KimiDelta(**KIMI), [384, 4, 128, 128], [(384, 4), (132,), (32,)]),
    "mamba": (
        MambaStep(**MAMBA, eps=1e-6, bias=True),
        Mamba2(**MAMBA),
        [2 * 256 + 2 * 512 + 8],
        [(256 + 2 * 512, 4), (256 + 2 * 512,), (24,), (256,)],
    ),
}


def taken(step: Step, batch: Batch, columns: list[int], parameters: list[tuple[int, ...]]) -> int:
    """Bytes of the backward besides inputs, their gradients and that of the output."""
    make = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    sequences = [make(*batch, width) for width in columns]
    leaves = [*sequences, *(make(*shape) for shape in parameters)]
    with StorageTracker() as tracker:
        for leaf in leaves:
            tracker.add(leaf)
        y = scanned(step, sequences, leaves[len(sequences) :])
        grad = torch.empty_like(y)
        held = tracker.peak = tracker.current
        torch.autograd.grad(y, leaves, grad)
    return tracker.peak - held - sum(leaf.numel() * leaf.element_size() for leaf in leaves)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [Batch(1, 1024), Batch(2, 768)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_backward_takes_what_is_counted(name: str, batch: Batch) -> None:
    step, mixer, columns, parameters = CASES[name]
    found = taken(step, batch, columns, parameters)
    assert segments_working(mixer, batch, 1, 2) == pytest.approx(found, rel=3e-3)


@pytest.mark.parametrize("name", CASES)
def test_ranks_share_heads(name: str) -> None:
    whole, half = (segments_working(CASES[name][1], Batch(2, 4096), ranks, 2) for ranks in (1, 2))
    assert half == pytest.approx(whole / 2, rel=1e-2)
