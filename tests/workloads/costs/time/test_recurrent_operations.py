"""The operations of recurrences in torch, counted where they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workloads.costs.time.recurrent_operations import LAUNCHED_S, REPLAYED_S, Pass, segment_passes, torch_passes
from workloads.engine.kind_ops.delta_steps import GatedDeltaStep, KimiDeltaStep
from workloads.engine.kind_ops.fused_scan import columns
from workloads.engine.kind_ops.head_shares import AnyStep
from workloads.engine.kind_ops.mamba_scan import MambaStep
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import Batch, Kernels

GATED = GatedDeltaRule(key_heads=4, value_heads=8, key_dim=128, value_dim=128, kernel=4)
KIMI = KimiDelta(heads=4, head_dim=128, kernel=4)
MAMBA = Mamba2(heads=16, head_dim=64, groups=2, state=128, kernel=4)
GATED_STEP = GatedDeltaStep(key_heads=4, value_heads=8, key_dim=128, value_dim=128, kernel=4, eps=1e-6)
KIMI_STEP = KimiDeltaStep(heads=4, head_dim=128, kernel=4, eps=1e-6)
MAMBA_STEP = MambaStep(heads=16, head_dim=64, groups=2, state=128, kernel=4, eps=1e-5, bias=True)
PARAMETERS: dict[type, tuple[tuple[int, ...], ...]] = {
    GatedDeltaStep: ((2 * 512 + 1024, 4), (16,), (128,)),
    KimiDeltaStep: ((3 * 512, 4), (512 + 4,), (128,)),
    MambaStep: ((1024 + 512, 4), (1024 + 512,), (48,), (1024,)),
}


class Counted(TorchDispatchMode):
    """Operations that read or write, and how many numbers: a number that is repeated along a dim counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or any(word in func.name() for word in ("empty", "detach", "_unsafe_view"))):
            self.operations += 1
            for one in tree_leaves((args, kwargs, out)):
                if isinstance(one, Tensor):
                    self.numbers += torch.Size(
                        size for size, stride in zip(one.shape, one.stride(), strict=True) if stride
                    ).numel()
        return out


def counted(step: AnyStep, batch: Batch) -> tuple[Pass, Pass]:
    tensors = [
        torch.empty(batch.sequences, batch.length, sum(of_one), device="meta", requires_grad=True)
        for of_one in columns(step)
    ]
    parameters = [torch.empty(shape, device="meta", requires_grad=True) for shape in PARAMETERS[type(step)]]
    state = tuple(one.requires_grad_() for one in step.start(torch.empty(batch.sequences, 1, 1, device="meta")))
    with Counted() as forward, torch.no_grad():
        step(tensors, parameters, state)
    with Counted() as both:
        y, after = step(tensors, parameters, state)
        torch.autograd.grad((y, *after), (*tensors, *parameters, *state), [torch.empty_like(x) for x in (y, *after)])
    return Pass(forward.operations, forward.numbers), Pass(both.operations, both.numbers)


@pytest.mark.parametrize("batch", [Batch(1, 512), Batch(2, 256)], ids=str)
@pytest.mark.parametrize(("mixer", "step"), [(GATED, GATED_STEP), (KIMI, KIMI_STEP), (MAMBA, MAMBA_STEP)], ids=str)
def test_a_segment_has_the_counted_operations(mixer: Kernels, step: AnyStep, batch: Batch) -> None:
    for found, stated in zip(counted(step, batch), segment_passes(mixer, batch, 1), strict=True):
        assert stated.operations == pytest.approx(found.operations, rel=0.14)
        assert stated.numbers == pytest.approx(found.numbers, rel=0.14)


def test_a_layer_runs_its_segments_one_after_the_other() -> None:
    batch, segment = Batch(2, 4096), Batch(2, 256)
    forward, both = segment_passes(GATED, segment, 2)
    eager = torch_passes(GATED, batch, 2, 4.8e12, captured=False)
    assert eager.forward_s == pytest.approx(16 * forward.operations * LAUNCHED_S)
    assert eager.backward_s == pytest.approx((15 * forward.operations + 16 * both.operations) * LAUNCHED_S)
    replayed = torch_passes(GATED, batch, 2, 4.8e12, captured=True)
    assert replayed.forward_s == pytest.approx(16 * (forward.operations * REPLAYED_S + 4 * forward.numbers / 4.8e12))
    slow = torch_passes(GATED, batch, 2, 1e10, captured=False)
    assert slow.forward_s > eager.forward_s, "bytes of a slow memory take longer than launches"
