"""What an optimizer keeps, against torch's."""

from __future__ import annotations

import torch

from workloads.spec.optimizer import ADAMW


def test_adamw_keeps_what_torch_keeps() -> None:
    weight = torch.nn.Parameter(torch.zeros(64))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if value.shape == weight.shape]
    assert sum(value.nbytes for value in state) == ADAMW.state_bytes(weight.nbytes)
