"""What becomes of tensors that a layer saves for its backward: they stay, or leave the device.

Recomputation comes before this. Modules name their tensors (`named`) by the words of
`workloads.spec.activations.offload`. While a layer runs whose tensors may leave, a `Keeper` decides on every tensor
that is saved, also on those that recomputation reads (`kept`). Without one all of this does nothing. A keeper is there
in the forward alone: a second forward, in a backward, saves tensors that are needed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


class Saved(Protocol):
    """A saved tensor that may be elsewhere until its backward."""

    def tensor(self) -> Tensor:
        """The tensor, on the device."""


class Keeper(Protocol):
    """Decides on the saved tensors of one layer and one micro-batch."""

    def name(self, word: str, tensors: tuple[Tensor, ...]) -> None:
        """These tensors are those of ``word``."""

    def keep(self, tensor: Tensor) -> Saved:
        """Save a tensor, or a view of one."""


MaybeElsewhere: TypeAlias = Tensor | Saved

_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def kept_by(keeper: Keeper) -> Iterator[None]:
    """Let ``keeper`` decide on what is saved."""
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)


def named(word: str, *tensors: Tensor) -> None:
    """Say that these tensors are those of ``word``. Their values do not change from now on. Nothing is said while a
    block is compiled, whose tensors have no names."""
    if not torch.compiler.is_compiling() and (keeper := _keeper.get()) is not None:
        keeper.name(word, tensors)


def kept(tensor: Tensor) -> MaybeElsewhere:
    """What to hold of ``tensor`` until the backward, which passes it to `back`."""
    keeper = _keeper.get()
    return tensor if keeper is None else keeper.keep(tensor)


def back(saved: MaybeElsewhere) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.tensor()
