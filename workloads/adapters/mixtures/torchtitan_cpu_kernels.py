"""What torchtitan's mixtures ask of a GPU, computed on a CPU, where they are tested and not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.overrides import TorchFunctionMode


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float | None, groups: int
) -> tuple[Tensor, Tensor]:
    """(output, logarithm of the sum of exponentials of a query's scores) of attention with flex attention's mask.

    queries [B, N, S, H], keys and values [B, N / groups, S, H].
    """
    size, rows, columns = query.shape[0], query.shape[2], key.shape[2]
    mask = create_mask(block_mask.mask_mod, size, 1, rows, columns, device=query.device)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp().to(value.dtype) @ value, sums


def on_cpu(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward pass of a layer of experts with operations that CPUs have."""

    def plain(*args: Any) -> Tensor:
        with _PlainKernels():
            return forward(*args)

    return plain


class _PlainKernels(TorchFunctionMode):
    """Products of experts in the dtype of their weights, one expert at a time: torchtitan 0.3 casts them to 16 bits in
    every precision, and grouped products have no backward on CPUs. Counts of whole numbers, as CUDA has them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0]
        if func is torch._grouped_mm:
            return _grouped(*args, **(kwargs or {}))
        if func is torch.histc:
            return func(args[0].float(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _grouped(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    rows = [x[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    out = torch.cat([one @ weight for one, weight in zip(rows, weights, strict=True)])
    return torch.cat([out, out.new_zeros(len(x) - len(out), out.shape[1])])
