"""Runs a block's forward again in its backward, with little for the host to do.

Torch's checkpoint does the same (`torch.utils.checkpoint`, ``use_reentrant=False``): the place of each saved tensor in
the order of saving stands for it, and the first backward that asks for one runs the block again until all of them are
there. It is made for every kind of function, though, and an eager block that is bound by the host pays for that: what
is compared and remembered of each tensor takes about as long as the block's second forward. A block of this engine
takes its input and two tables, has no random numbers and no autocast, and its backward runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Block: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Enough(Exception):
    """All that backward needs is there."""


def checkpointed(
    block: Block, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, again: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """``block(x_TD, cos_SH, sin_SH)``, of whose saved tensors only ``x_TD`` is kept until its backward.

    ``again``: a context in which the second forward runs. Raises `RuntimeError` in a backward whose second forward
    saves fewer tensors than the first or finds ``x_TD`` changed in place, and in a second backward of the same forward.
    That the second forward saves the same values is not checked.
    """
    saved = _Saved(block, (x_TD, cos_SH, sin_SH), again)
    with saved_tensors_hooks(saved.count, saved.take):
        return block(x_TD, cos_SH, sin_SH)


class _Saved:
    """The saved tensors of one forward."""

    __slots__ = ("again", "block", "inputs", "made", "number", "version")

    def __init__(
        self, block: Block, inputs: tuple[Tensor, Tensor, Tensor], again: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.block, self.again = block, again
        self.inputs: tuple[Tensor, Tensor, Tensor] | None = inputs
        self.version = inputs[0]._version
        self.number = 0
        self.made: list[Tensor | None] = []

    def count(self, tensor: Tensor) -> int:
        """Of the first forward: the place of a tensor, which is not kept."""
        self.number += 1
        return self.number - 1

    def take(self, place: int) -> Tensor:
        if self.inputs is not None:
            self._make()
        tensor, self.made[place] = self.made[place], None
        if tensor is None:
            raise RuntimeError(f"saved tensor {place} of a checkpointed block is asked for a second time")
        return tensor

    def _make(self) -> None:
        assert self.inputs is not None
        x_TD, cos_SH, sin_SH = self.inputs
        if x_TD._version != self.version:
            raise RuntimeError("the input of a checkpointed block was changed in place before its backward")
        self.made.clear()
        inputs = x_TD.detach().requires_grad_(x_TD.requires_grad), cos_SH, sin_SH
        try:
            with torch.enable_grad(), self.again(), saved_tensors_hooks(self._keep, _as_it_is):
                self.block(*inputs)
        except _Enough:
            self.inputs = None
            return
        raise RuntimeError(f"a checkpointed block saved {self.number} tensors first and {len(self.made)} again")

    def _keep(self, tensor: Tensor) -> Tensor:
        """Of the second forward, which ends with the last tensor. Detached where it has a graph, since an output that
        keeps itself would never be freed."""
        kept = tensor.detach() if tensor.requires_grad else tensor
        self.made.append(kept)
        if len(self.made) == self.number:
            raise _Enough
        return kept


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
