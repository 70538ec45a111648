"""AdamW whose moments are partly in the memory of the host: the device updates them as they stream through it.

Of each shard the last elements, a ``share`` of them, have their moments on the host; AdamW's update is element by
element, so a slice is as good as a whole parameter, every rank gives the same share, and the sum of bytes is exact to
one element a shard. Weights and gradients stay on the device, where FSDP and the backward need them. The moments of all
these elements lie one after another in pinned memory, in pieces of `PIECE` elements, and the device has room for
`PIECES` of them:

    link to the device   | 0 | 1 | 2 | 3 | 4 | ...
    device                   | 0 | 1 | 2 | 3 | ...       beside it: AdamW of the other elements
    link to the host             | 0 | 1 | 2 | ...

The first pieces come while the gradient norm is summed. Streams wait for each other, and the host for nothing, so a
step can be captured as a CUDA graph. The kernel is that of the other elements, so weights are the same, bit by bit, as
without a share on the host; where an address is no multiple of 16 bytes Triton compiles another one, whose last bit may
differ. ZeRO-Offload (arXiv:2101.06840) and Megatron-LM's ``HybridDeviceOptimizer`` let the host's processors update
instead; gradients and weights then cross the link, and AdamW reads and writes 9 numbers an element in the host's memory
rather than 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workloads.costs.memory.host import PIECE, PIECES
from workloads.engine.training.host_copies import copies_of, host_buffer
from workloads.engine.update_ops.adamw import count_step, update_flat
from workloads.engine.update_ops.stochastic_rounding import Segment, cut

MOMENTS = 2
"""Numbers of an element that stream: the means of its gradients and of their squares."""


def kept_elements(elements: int, share: float) -> int:
    """Number of elements of a shard whose moments stay on the device."""
    return elements - int(share * elements)


class _Run(NamedTuple):
    """Elements of one shard in one piece."""

    shard: int
    """Index of the shard."""
    first: int
    """Place of the first element in the flat shard."""
    at: int
    """Place of the first element in the piece."""
    size: int


class StreamedAdamW:
    """AdamW over the last elements of ``shards``, contiguous tensors of one dtype on one device, which stay where they
    are. On a CPU the host is the device itself: the same path without streams.

    Call `begin`, `launch` and `finish` in this order in each step."""

    def __init__(
        self,
        shards: Sequence[Tensor],
        share: float,
        state_dtype: torch.dtype | None = None,
        segments: Sequence[Sequence[Segment]] = (),
    ) -> None:
        """``state_dtype`` and ``segments``: as `AdamW` takes them, of whole shards."""
        device = shards[0].device
        dtype = shards[0].dtype if state_dtype is None else state_dtype
        self._weights = [shard.view(-1) for shard in shards]
        self._segments = segments
        self._pieces = list(_pieces([len(weight) for weight in self._weights], share))
        self._sizes = [sum(run.size for run in piece) for piece in self._pieces]
        self._moments = host_buffer(
            self, MOMENTS * sum(self._sizes), dtype, "optimizer_offload", pinned=device.type == "cuda"
        )
        rooms = min(PIECES, len(self._pieces))
        self._staged = torch.empty(rooms, MOMENTS * max(self._sizes, default=0), dtype=dtype, device=device)
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self.up, self.down = copies_of(device), copies_of(device)
        """Copies of moments to the device and to the host."""
        self._work: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._begun = False

    def begin(self) -> None:
        """Begin to copy the first pieces to the device."""
        assert not self._begun, "a step begins once"
        self._begun = True
        self.up.restart()
        self.down.restart()
        if self._pieces:  # streams that have nothing to do stay out of a capture
            self.up.follow()
        for number in range(len(self._staged)):
            self._copy_up(number)

    @torch.no_grad()
    def launch(
        self, gradients: Sequence[Tensor], factor: Tensor, skip: Tensor | None, rates: Mapping[str, Any]
    ) -> None:
        """Launch one update beside whatever the current stream does next. ``gradients``: one for each shard. ``factor``
        and ``skip``: as `AdamW.update` takes them. ``rates``: ``lr``, ``betas``, ``eps`` and ``weight_decay``."""
        assert self._begun, "no step was begun"
        numbers = rates["lr"], *rates["betas"], rates["eps"], rates["weight_decay"]
        flat = [gradient.view(-1) for gradient in gradients]
        with self._beside():
            count_step([self._step], skip)
            for number, piece in enumerate(self._pieces):
                self.up.join(number)
                first, second = self._room(number).view(MOMENTS, -1)
                for run in piece:
                    of_shard, of_piece = slice(run.first, run.first + run.size), slice(run.at, run.at + run.size)
                    weight, gradient = self._weights[run.shard][of_shard], flat[run.shard][of_shard]
                    moments = first[of_piece], second[of_piece]
                    segments = cut(self._segments[run.shard], of_shard) if self._segments else ()
                    update_flat(weight, gradient, *moments, self._step, factor, skip, numbers, segments)
                self.down.follow()
                self.down.launch(self._on_host(number), self._room(number))
                if number + len(self._staged) < len(self._pieces):
                    self.up.follow(self.down)
                    self._copy_up(number + len(self._staged))

    def finish(self) -> None:
        """Let the current stream wait for the update and for all copies."""
        self._begun = False
        if self._work is not None:
            torch.cuda.current_stream().wait_stream(self._work)
        self.up.join()
        self.down.join()

    @property
    def updates(self) -> int:
        """Number of updates so far, without skipped steps."""
        return int(self._step.item())

    def host_bytes(self) -> int:
        return self._moments.numel() * self._moments.element_size()

    def host_tensors(self) -> list[Tensor]:
        return [self._moments]

    def device_tensors(self) -> list[Tensor]:
        return [self._staged, self._step]

    def _copy_up(self, number: int) -> None:
        self.up.launch(self._room(number), self._on_host(number))

    def _room(self, number: int) -> Tensor:
        """Where the moments of a piece are on the device, first means and then squares."""
        return self._staged[number % len(self._staged)][: MOMENTS * self._sizes[number]]

    def _on_host(self, number: int) -> Tensor:
        start = MOMENTS * PIECE * number
        return self._moments[start : start + MOMENTS * self._sizes[number]]

    def _beside(self) -> AbstractContextManager[Any]:
        """The stream of the update, which first waits for the current one."""
        if self._work is None:
            return nullcontext()
        self._work.wait_stream(torch.cuda.current_stream())
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._work)
        return stream


def _pieces(elements: Sequence[int], share: float) -> Iterator[list[_Run]]:
    """The runs of each piece, of shards with so many elements."""
    piece: list[_Run] = []
    filled = 0
    for shard, count in enumerate(elements):
        first = kept_elements(count, share)
        while first < count:
            size = min(count - first, PIECE - filled)
            piece.append(_Run(shard, first, filled, size))
            first, filled = first + size, filled + size
            if filled == PIECE:
                yield piece
                piece, filled = [], 0
    if piece:
        yield piece
