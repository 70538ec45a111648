"""SGD with momentum over many tensors, with clipping in the same pass on a GPU, elsewhere by torch's fused kernel.

With gradients ``g`` times a factor f, and the momentum m:

    m = mu m + f g + decay w        w = w - lr m
"""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.engine.ops.backend import Backend, backend_of


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
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not with_gradient:
            return
        self.allocate()
        backend = backend_of(with_gradient[0])
        if backend is Backend.TORCH:
            torch._foreach_mul_([parameter.grad for parameter in with_gradient], factor)
            self.step()
        elif backend is Backend.TRITON:
            self._in_one_pass(with_gradient, factor, group)

    def _in_one_pass(self, parameters: list[Tensor], factor: Tensor, group: dict[str, float]) -> None:
        from workloads.engine.update_ops import triton_sgd

        for parameter in parameters:
            if parameter.numel() and parameter.grad is not None:
                tensors = (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
                weight, gradient, momentum = (one.view(-1) for one in tensors)
                rates = group["lr"], group["momentum"], group["weight_decay"]
                triton_sgd.update(weight, gradient, momentum, factor, *rates)
