"""AdamW (arXiv:1711.05101) over many tensors, with clipping, the loss scale and skipped steps in the same pass.

With gradients ``g`` times a factor f, moments m and v, and t steps so far, this one included:

    m = b1 m + (1 - b1) f g        v = b2 v + (1 - b2) (f g)^2
    w = w (1 - lr decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

On a GPU a separate pass for the factor would read and write every gradient once more, a quarter of the traffic of
AdamW.

Weights and moments may be kept in bf16. They are then updated in fp32, and what is stored is rounded stochastically
(`workloads.engine.update_ops.stochastic_rounding`); the weight's update reads the moments before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workloads.engine.ops.backend import BLOCK_ELEMENTS, Backend, backend_of
from workloads.engine.update_ops.stochastic_rounding import Segment, philox, rounded


class AdamW(torch.optim.AdamW):
    """Torch's AdamW, with the same state and fused step; on CUDA with tensors of up to 32 bits it runs one kernel per
    tensor.

    ``state_dtype``: dtype of the moments; None: that of the parameters. ``segments``: the indices of each parameter's
    elements in the whole parameter, needed if anything is bf16.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        state_dtype: torch.dtype | None = None,
        segments: Sequence[Sequence[Segment]] = (),
        **options: Any,
    ) -> None:
        parameters = list(parameters)
        super().__init__(parameters, **options)
        self._state_dtype = state_dtype
        self._segments: Mapping[nn.Parameter, Sequence[Segment]] = dict(zip(parameters, segments, strict=False))

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the state, which otherwise happens in the first update."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            if parameter.numel():
                parameter.grad = parameter.detach()  # torch makes state for what has a gradient, and reads none of it
        self._tensors(group)
        self.zero_grad(set_to_none=True)

    @torch.no_grad()
    def update(self, factor: Tensor, skip: Tensor | None) -> None:
        """Update once with gradients times ``factor`` (0-dim), or not at all if ``skip`` (0-dim) is 1. Invalidates the
        gradients."""
        (group,) = self.param_groups
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not with_gradient:
            return
        if backend_of(with_gradient[0]) is Backend.TRITON or self._segments:
            self._in_one_pass(group, factor, skip)
            return
        torch._foreach_mul_([parameter.grad for parameter in with_gradient], factor)
        self.found_inf = skip
        self.step()

    def _tensors(self, group: dict[str, Any]) -> list[tuple[Tensor, ...]]:
        """Weight, gradient, both moments and number of steps of every parameter with a gradient."""
        if self._state_dtype is not None:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.zeros((), device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter, dtype=self._state_dtype),
                        "exp_avg_sq": torch.zeros_like(parameter, dtype=self._state_dtype),
                    }
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        firsts: list[Tensor] = []
        seconds: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, parameters, gradients, firsts, seconds, [], steps)
        return list(zip(parameters, gradients, firsts, seconds, steps, strict=True))

    def _in_one_pass(self, group: dict[str, Any], factor: Tensor, skip: Tensor | None) -> None:
        each = self._tensors(group)
        count_step([tensors[-1] for tensors in each], skip)
        rates = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
        for weight, *tensors, step in each:
            segments = self._segments.get(weight, ())  # type: ignore[call-overload]
            w, g, m, v = (one.view(-1) for one in (weight, *tensors))
            update_flat(w, g, m, v, step, factor, skip, rates, segments)


def count_step(steps: list[Tensor], skip: Tensor | None) -> None:
    """Add 1 to every number of steps (0-dim), or nothing if ``skip`` (0-dim) is 1."""
    if skip is None:
        torch._foreach_add_(steps, 1.0)
    else:  # by its name: torch._foreach_add_ would read the scalar on the host, which waits for the device
        torch.ops.aten._foreach_add_.Tensor(steps, 1.0 - skip)


Rates = tuple[float, float, float, float, float]
"""Learning rate, both betas, epsilon and weight decay."""


def update_flat(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    factor: Tensor,
    skip: Tensor | None,
    rates: Rates,
    segments: Sequence[Segment],
) -> None:
    """Update flat tensors of one size in place, in one pass on a GPU. ``step`` counts this update. ``segments``: where
    the elements stand in the whole parameter, if anything is bf16. Invalidates the gradient."""
    backend = backend_of(weight)
    if backend is Backend.SHAPES:
        return
    if backend is Backend.TRITON:
        from workloads.engine.update_ops import triton_adamw

        for segment in segments or (None,):
            run = slice(None) if segment is None else slice(segment.start, segment.stop)
            w, g, m, v = (one[run] for one in (weight, gradient, first, second))
            triton_adamw.update(w, g, m, v, step, factor, skip, *rates, segment)
    elif not segments:
        _update_by_torch(weight, gradient.mul_(factor), first, second, step, skip, rates)
    elif skip is None or not skip:
        for segment in segments:
            w, g, m, v = (one[segment.start : segment.stop] for one in (weight, gradient, first, second))
            _update_in_blocks(w, g, m, v, step, factor, *rates, segment)


def _update_by_torch(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, skip: Tensor | None, rates: Rates
) -> None:
    rate, beta1, beta2, epsilon, decay = rates
    torch._fused_adamw_(
        [weight], [gradient], [first], [second], [], [step],
        lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=epsilon, amsgrad=False, maximize=False,
        found_inf=skip,
    )  # fmt: skip


def _update_in_blocks(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    factor: Tensor,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    segment: Segment,
) -> None:
    """What the kernel does, in fp32, on some elements of flat tensors at a time."""
    root = (1.0 - beta2**step).sqrt()
    for start in range(0, weight.numel(), BLOCK_ELEMENTS):
        stop = min(start + BLOCK_ELEMENTS, weight.numel())
        w, g, m, v = (one[start:stop].float() for one in (weight, gradient, first, second))
        g = g * factor.float()
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        w = w * (1.0 - rate * decay) - rate / (1.0 - beta1**step) * m / (v.sqrt() / root + epsilon)
        words = philox(segment.key, segment.indices(start, stop, weight.device), step)
        for stored, value, bits in zip((weight, first, second), (w, m, v), words, strict=False):
            stored[start:stop] = rounded(value, bits) if stored.dtype == torch.bfloat16 else value
