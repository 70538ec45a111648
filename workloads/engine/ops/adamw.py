"""AdamW (arXiv:1711.05101) over many tensors, with clipping, the loss scale and skipped steps in the same pass.

With gradients ``g`` times a factor f, moments m and v, and t steps so far, this one included:

    m = b1 m + (1 - b1) f g        v = b2 v + (1 - b2) (f g)^2
    w = w (1 - lr decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

On a GPU a separate pass for the factor would read and write every gradient once more, a quarter of the traffic of
AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workloads.engine.ops.backend import Backend, backend_of


class AdamW(torch.optim.AdamW):
    """Torch's AdamW, with the same state and fused step; on CUDA with tensors of up to 32 bits it runs one kernel per
    tensor."""

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the state, which otherwise happens in the first update."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            if parameter.numel():
                parameter.grad = parameter.detach()  # torch makes state for what has a gradient, and reads none of it
        self._init_group(group, [], [], [], [], [], [])
        self.zero_grad(set_to_none=True)

    @torch.no_grad()
    def update(self, factor: Tensor, skip: Tensor | None) -> None:
        """Update once with gradients times ``factor`` (0-dim), or not at all if ``skip`` (0-dim) is 1. Invalidates the
        gradients."""
        (group,) = self.param_groups
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not with_gradient:
            return
        if backend_of(with_gradient[0]) is Backend.TRITON:
            self._in_one_pass(group, factor, skip)
            return
        torch._foreach_mul_([parameter.grad for parameter in with_gradient], factor)
        self.found_inf = skip
        self.step()

    def _in_one_pass(self, group: dict[str, Any], factor: Tensor, skip: Tensor | None) -> None:
        from workloads.engine.ops import triton_adamw

        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        firsts: list[Tensor] = []
        seconds: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, parameters, gradients, firsts, seconds, [], steps)
        if skip is None:
            torch._foreach_add_(steps, 1.0)
        else:  # by its name: torch._foreach_add_ would read the scalar on the host, which waits for the device
            torch.ops.aten._foreach_add_.Tensor(steps, 1.0 - skip)
        rates = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
        for tensors in zip(parameters, gradients, firsts, seconds, steps, strict=True):
            triton_adamw.update(*tensors, factor, skip, *rates)
