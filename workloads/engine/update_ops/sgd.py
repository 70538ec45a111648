"""SGD with momentum over many tensors, by torch's fused kernel.

With gradients ``g`` times a factor f, and the momentum m:

    m = mu m + f g + decay w        w = w - lr m
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.impl("aten::_fused_sgd_", "Meta")
def _traced(*_: object, **__: object) -> None:
    """Torch's kernel updates in place and returns nothing. Without this, a trace on FakeTensors would run it on real
    ones, in the host's memory."""


class SGD(torch.optim.SGD):
    """Torch's SGD, with the methods of `workloads.engine.update_ops.adamw.AdamW`."""

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the momentum, which otherwise happens in the first update. Zeros are where torch's begins too."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            if parameter.numel() and "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def update(self, factor: Tensor, skip: Tensor | None) -> None:
        """Update once with gradients times ``factor`` (0-dim). Invalidates the gradients."""
        assert skip is None, "refused by the rules"
        (group,) = self.param_groups
        gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        if not gradients:
            return
        self.allocate()
        torch._foreach_mul_(gradients, factor)
        self.step()
