"""AdamW on the host: a share of every shard's optimizer state lives in its memory, and its processors update it.

Of each shard the last elements, a ``share`` of them, belong to the host; AdamW's update is element by element, so a
slice is as good as a whole parameter, every rank gives the host the same share, and the sum of bytes is exact to one
element a shard. (Megatron-LM's ``HybridDeviceOptimizer`` moves whole parameters until its share is reached.) For each
of these elements the host holds both moments, its own copy of the master weight and a buffer for the gradient. The
device keeps the master weight too: FSDP gathers weights from it, in the dtype of the compute. So the device saves the
moments.

    device   ─ backward ─┬─ norm, all-reduce ─┬─ AdamW of the other elements ─────┬─ next step
    link               gradients down ·  ·  ·  ·  ·  ·     weights up ·  ·  ·  ·  ┤
    host                                  factor ┴─ AdamW piece by piece ─────────┘

Gradients are copied down on a stream of their own as soon as they are final, which is before the norm is known; the
host applies the factor of clipping and of the loss scale. It updates one piece after another while earlier pieces go up
and later ones come down. The next step waits for all copies: the host that updates is also the one that launches the
next forward, so its first layers do not overlap with the update of the last ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workloads.engine.training.host_copies import copies_of, host_buffer

PIECE = 2**22
"""Largest number of elements that are copied and updated at once: 16 MiB in fp32, so that the three steps of different
pieces overlap and a piece stays in the processor's cache between the factor and the update."""


def kept_elements(elements: int, share: float) -> int:
    """Number of elements of a shard whose state stays on the device; the rest belongs to the host."""
    return elements - int(share * elements)


class _Piece(NamedTuple):
    weight: Tensor
    """On the device."""
    at: slice
    """Place in the buffers on the host."""
    shard: int
    """Index of its shard."""
    first: int
    """Its first element in the flat shard."""


class HostAdamW:
    """AdamW over the elements of ``shards`` that belong to the host. ``shards`` are contiguous tensors of one dtype on
    one device, and stay where they are. On a CPU the host is the device itself: the same path without streams.

    Call `start_copies`, `announce` and `update` in this order in each step."""

    def __init__(self, shards: Sequence[Tensor], share: float, ranks: int = 1) -> None:
        """``ranks``: number of processes of the layout; those of one host share its processors."""
        device, dtype = shards[0].device, shards[0].dtype
        self._cuda = device.type == "cuda"
        self._pieces: list[_Piece] = []
        total = 0
        for number, shard in enumerate(shards):
            flat = shard.view(-1)
            for first in range(kept_elements(flat.numel(), share), flat.numel(), PIECE):
                weight = flat[first : first + PIECE]
                self._pieces.append(_Piece(weight, slice(total, total + weight.numel()), number, first))
                total += weight.numel()
        self._weights, self._gradients = (self._buffer(total, dtype) for _ in range(2))
        self._moments = [torch.zeros(total, dtype=dtype, device="cpu") for _ in range(2)]  # these cross no link
        self._numbers = self._buffer(2, dtype if dtype == torch.float64 else torch.float32)
        """(factor on the gradients, 1 for a step that is skipped)"""
        self._step = torch.zeros((), dtype=torch.float32, device="cpu")
        self.down, self.up = copies_of(device), copies_of(device)
        """Copies of gradients to the host and of weights to the device."""
        self.control = copies_of(device, beside=False)
        """Copies of `announce`."""
        self._threads = host_threads(min(ranks, torch.cuda.device_count())) if self._cuda else None
        self._started, self._last = False, 0
        with torch.no_grad():
            for piece in self._pieces:
                self._weights[piece.at].copy_(piece.weight)

    def start_copies(self, gradients: Sequence[Tensor]) -> None:
        """Copy final gradients, one for each shard, to the host. Their memory must stay as it is until `update` has
        returned: the host has then waited for all copies."""
        assert not self._started, "the gradients of a step are copied once"
        self._started = True
        self.down.restart()
        self.down.follow()
        for piece in self._pieces:
            gradient = gradients[piece.shard].view(-1)[piece.first : piece.first + piece.weight.numel()]
            self.down.launch(self._gradients[piece.at], gradient)

    def announce(self, factor: Tensor, skip: Tensor | None) -> None:
        """Tell the host the factor on the gradients and whether the step is skipped (0-dim tensors on the device). Call
        this before the device's own update is launched, or the host would wait for it."""
        self.control.restart()
        self._numbers[1] = 0.0
        if skip is not None:
            self.control.launch(self._numbers[1], skip)
        self._last = self.control.launch(self._numbers[0], factor)

    @torch.no_grad()
    def update(self, rates: Mapping[str, Any]) -> None:
        """Update once. ``rates``: ``lr``, ``betas``, ``eps`` and ``weight_decay``. The current stream then waits for
        the new weights."""
        assert self._started, "no gradients were copied"
        self._started = False
        self.control.wait(self._last)
        self.up.restart()
        self.up.follow(self.control)
        factor, skip = self._numbers[0], self._numbers[1].float()
        self._step.add_(1.0 - skip)
        with threads(self._threads):
            for number, piece in enumerate(self._pieces):
                self.down.wait(number)
                self._update_piece(piece.at, factor, skip, rates)
                self.up.launch(piece.weight, self._weights[piece.at])
        self.up.join()

    def _update_piece(self, at: slice, factor: Tensor, skip: Tensor, rates: Mapping[str, Any]) -> None:
        first, second = self._moments
        update_on_host(self._weights[at], self._gradients[at], first[at], second[at], self._step, factor, skip, rates)

    @property
    def updates(self) -> int:
        """Number of updates so far, without skipped steps."""
        return int(self._step.item())

    def tensors(self) -> list[Tensor]:
        """Every tensor on the host."""
        return [self._weights, self._gradients, *self._moments, self._numbers, self._step]

    def host_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def _buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host, pinned if the device copies from and to it."""
        return host_buffer(self, elements, dtype, "optimizer_offload", pinned=self._cuda)


def update_on_host(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    factor: Tensor,
    skip: Tensor | None,
    rates: Mapping[str, Any],
) -> None:
    """One update of a piece in place, with torch's fused AdamW for processors. ``step`` counts this update; ``skip``,
    if 1, leaves everything but the gradient as it was. All are on the host."""
    gradient.mul_(factor)
    torch._fused_adamw_(
        [weight],
        [gradient],
        [first],
        [second],
        [],
        [step],
        lr=rates["lr"],
        beta1=rates["betas"][0],
        beta2=rates["betas"][1],
        weight_decay=rates["weight_decay"],
        eps=rates["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def host_threads(ranks_of_host: int) -> int:
    """Processors for each of the ranks that share a host, of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks_of_host))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch's operations on the host use ``count`` threads; None: as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
