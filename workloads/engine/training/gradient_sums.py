"""Lets products add weight gradients to the sums in which FSDP accumulates the gradients of several micro-batches.

FSDP casts the first micro-batch's gradient to the dtype of reductions, adds every later one, and reduces the sum with
the last. Here the sum is allocated when the first product needs it, so FSDP finds it complete, and no gradient beside
it. It frees the sum after its reduction: the next step's first product overwrites, and no sum is ever zeroed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from workloads.engine.layers.transformer import Chunk
from workloads.engine.ops.linear import GradientSum
from workloads.engine.training.data_parallel import param_groups_of


class GradientSums:
    """Sums of the weight gradients of one chunk, by weight."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype) -> None:
        self._groups = [
            group for module in chunk.modules() if isinstance(module, FSDPModule) for group in param_groups_of(module)
        ]
        for group in self._groups:
            group.post_backward = partial(_in_one_dtype, group, group.post_backward)
        self._dtype = dtype
        self._parameters: dict[int, Any] = {}
        """FSDP's parameters by the ids of their gathered weights."""

    def __call__(self, weight: Tensor) -> GradientSum:
        """Sum of a weight, given as the tensor that FSDP gathers: the same one in every step."""
        parameter = self._parameter_of(weight)
        total = parameter.unsharded_accumulated_grad
        if total is not None:
            return GradientSum(total, is_empty=False)
        total = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
        parameter.unsharded_accumulated_grad = total
        return GradientSum(total, is_empty=True)

    def _parameter_of(self, weight: Tensor) -> Any:
        if id(weight) not in self._parameters:  # the weights of a group exist once it was gathered
            self._parameters |= {
                id(parameter._unsharded_param): parameter
                for group in self._groups
                for parameter in group.fsdp_params
                if hasattr(parameter, "_unsharded_param")
            }
        return self._parameters[id(weight)]


def _in_one_dtype(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    """FSDP's ``post_backward`` of a group. Gradients of weights without products, those of norms, join the others in
    the dtype of reductions first: FSDP reduces gradients of one dtype."""
    if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
    post_backward(*args)
