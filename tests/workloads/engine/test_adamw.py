"""AdamW in one pass against torch's, on the CPU, under Triton's interpreter (`op_checks`) and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.workloads.engine.op_checks import check_adamw, randn
from workloads.engine.ops.adamw import AdamW


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_adamw("cuda", (4096, 1100))


@pytest.mark.slow
def test_a_skipped_step_changes_nothing_and_does_not_count() -> None:
    weight = torch.nn.Parameter(randn(5, 7))
    optimizer = AdamW([weight], lr=0.1, fused=True)
    one = torch.ones((), dtype=torch.float32)
    weight.grad = randn(5, 7, seed=1)
    optimizer.update(one.double(), None)
    before = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.full((5, 7), float("inf"), dtype=torch.float64)
    optimizer.update(one.double(), one)
    assert torch.equal(weight, before[0]) and torch.equal(optimizer.state[weight]["exp_avg"], before[1])
    assert optimizer.state[weight]["step"].item() == 1
