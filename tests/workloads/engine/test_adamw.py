"""AdamW in one pass against torch's, on the CPU, under Triton's interpreter (`op_checks`) and on a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workloads.engine.op_checks import check_adamw, check_sgd, randn
from workloads.engine import update_ops as ops
from workloads.engine.update_ops.adamw import AdamW


class ReadsOnHost(TorchDispatchMode):
    """Counts how often the host reads a number of the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("skip", "steps"), [(None, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_the_host_waits_for_no_step_that_may_be_skipped(
    skip: float | None, steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "triton_adamw", SimpleNamespace(update=lambda *_: None), raising=False)
    monkeypatch.setitem(sys.modules, "workloads.engine.update_ops.triton_adamw", ops.triton_adamw)
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = AdamW(weights, fused=True)
    (group,) = optimizer.param_groups
    with ReadsOnHost() as reads:
        optimizer._in_one_pass(group, torch.ones(()), None if skip is None else torch.tensor(skip))
    assert reads.count == 0
    assert [float(state["step"]) for state in optimizer.state.values()] == [steps] * 2


def test_state_that_is_allocated_early_is_that_of_the_first_update() -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2, 2))]
    states = []
    for early in (True, False):
        optimizer = AdamW(weights, fused=True)
        if early:
            optimizer.allocate()
            assert all(weight.grad is None for weight in weights)
            assert not any(value.any() for state in optimizer.state.values() for value in state.values())
            before = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
        for weight in weights:
            weight.grad = torch.ones_like(weight) if weight.numel() else None
        optimizer.update(torch.zeros(()), None)
        states.append({(key, name): value for key, state in optimizer.state.items() for name, value in state.items()})
        if early:
            assert [value.data_ptr() for value in states[0].values()] == before
    assert len(states[0]) == 6 and states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_adamw("cuda", (4096, 1100))
    check_sgd("cuda", (4096, 1100))


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
