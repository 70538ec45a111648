"""Runs a block's forward again in its backward, with little work for the host.

Torch's checkpoint does the same (`torch.utils.checkpoint`, ``use_reentrant=False``): each saved tensor is replaced by
its index in the order of saving, and the first backward that requests one runs the block again until all of them exist.
It supports every kind of function, though, and a host-bound eager block pays for that: comparing and recording each
tensor takes about as long as the block's second forward. A block of this engine takes its input and tables, has no
random numbers and no autocast, and its backward runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workloads.engine.kind_ops.document_attention import Seen
from workloads.engine.layers.saved_tensors import MaybeElsewhere, back, kept

Block: TypeAlias = Callable[..., Tensor]


class _Enough(Exception):
    """Raised in the second forward once every saved tensor exists."""


def checkpointed(
    block: Block,
    x_TD: Tensor,
    cos_SH: Tensor,
    sin_SH: Tensor,
    context: Callable[[], AbstractContextManager[None]],
    *seen: Seen,
) -> Tensor:
    """Compute ``block(x_TD, cos_SH, sin_SH, *seen)``, keeping only ``x_TD`` of its saved tensors until its backward.

    ``context``: makes the context in which the second forward runs. Raises `RuntimeError` in a backward whose second
    forward saves fewer tensors than the first or finds ``x_TD`` changed in place, and in a second backward of the same
    forward. Whether the second forward saves the same values is not checked.
    """
    tables = cos_SH, sin_SH, *seen
    saved = _Saved(block, x_TD, tables, context)
    with saved_tensors_hooks(saved.count, saved.take):
        return block(x_TD, *tables)


class _Saved:
    """Saved tensors of one forward."""

    __slots__ = ("block", "context", "inputs", "number", "requires_grad", "tensors", "version")

    def __init__(
        self, block: Block, x_TD: Tensor, tables: tuple[Any, ...], context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.block, self.context = block, context
        self.inputs: tuple[MaybeElsewhere, tuple[Any, ...]] | None = (kept(x_TD), tables)
        self.version, self.requires_grad = x_TD._version, x_TD.requires_grad
        self.number = 0
        self.tensors: list[Tensor | None] = []

    def count(self, tensor: Tensor) -> int:
        """Pack hook of the first forward: returns the tensor's index instead of keeping the tensor."""
        self.number += 1
        return self.number - 1

    def take(self, index: int) -> Tensor:
        if self.inputs is not None:
            self._recompute()
        tensor, self.tensors[index] = self.tensors[index], None
        if tensor is None:
            raise RuntimeError(f"saved tensor {index} of a checkpointed block is requested a second time")
        return tensor

    def _recompute(self) -> None:
        assert self.inputs is not None
        saved, tables = self.inputs
        x_TD = back(saved)
        if x_TD is saved and x_TD._version != self.version:
            raise RuntimeError("the input of a checkpointed block was changed in place before its backward")
        self.tensors.clear()
        own = x_TD.detach().requires_grad_(self.requires_grad)
        try:
            with torch.enable_grad(), self.context(), saved_tensors_hooks(self._keep, _as_it_is):
                self.block(own, *tables)
        except _Enough:
            self.inputs = None
            return
        raise RuntimeError(
            f"a checkpointed block saved {self.number} tensors in the first forward "
            f"and {len(self.tensors)} in the second"
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        """Pack hook of the second forward, which it ends with the last tensor. A tensor with a graph is detached, since
        an output that keeps itself alive would never be freed."""
        kept = tensor.detach() if tensor.requires_grad else tensor
        self.tensors.append(kept)
        if len(self.tensors) == self.number:
            raise _Enough
        return kept


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
