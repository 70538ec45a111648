"""Copies between a device and its host that are launched now and that streams wait for later."""

from __future__ import annotations

import mmap
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from workloads.spec.errors import UnsupportedByEngine


class Copies(Protocol):
    """Copies in one direction, in the order in which they are launched."""

    def follow(self, other: Copies | None = None) -> None:
        """Begin nothing before what was launched so far: on the current stream, or by ``other``."""

    def launch(self, target: Tensor, source: Tensor) -> None:
        """Copy as soon as all before it is done. Copies are numbered, from 0 in each round."""

    def join(self, number: int | None = None) -> None:
        """Let the current stream wait for a copy, and so for all before it; None: for all copies."""

    def restart(self) -> None:
        """Begin a new round. The current stream must have joined the last one."""


def host_buffer(owner: Any, elements: int, dtype: torch.dtype, field: str, *, pinned: bool) -> Tensor:
    """Memory of the host that lives as long as ``owner``: zeros [elements]. It is pinned where it lies, since torch's
    own allocator of pinned memory rounds sizes up to a power of two; as a mapping of its own, since pages are pinned
    once and torch asks of a tensor whether the first byte of its storage is pinned. ``field``: the field of the
    experiment for which it is. Raises `UnsupportedByEngine` if the host cannot pin it."""
    if not pinned or not elements:
        return torch.zeros(elements, dtype=dtype, device="cpu")
    size = elements * dtype.itemsize
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype)
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
    if status != 0:
        raise UnsupportedByEngine(
            f"{field}: the host cannot pin {size / 2**30:.1f} GiB (CUDA error {status}); "
            "its limit of locked memory may be too low (ulimit -l)"
        )
    weakref.finalize(owner, _unpin, buffer)  # holds the buffer until then
    return buffer


def _unpin(buffer: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(buffer.data_ptr())


def copies_of(device: torch.device) -> Copies:
    """On a CPU, which has no streams, a copy is done when it is launched."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies()


class StreamCopies:
    """Copies on a CUDA stream of their own. The host's memory must be pinned."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events: list[Any] = []
        """One for each copy of a round, reused in the next."""
        self._launched = 0

    def follow(self, other: Copies | None = None) -> None:
        assert other is None or isinstance(other, StreamCopies)
        if other is None:
            self._stream.wait_stream(torch.cuda.current_stream())
        elif other._launched:
            self._stream.wait_event(other._events[other._launched - 1])

    def launch(self, target: Tensor, source: Tensor) -> None:
        if self._launched == len(self._events):
            self._events.append(torch.cuda.Event())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events[self._launched].record(self._stream)
        self._launched += 1

    def join(self, number: int | None = None) -> None:
        current = torch.cuda.current_stream()
        if number is not None:
            current.wait_event(self._events[number])
        elif self._launched:
            current.wait_stream(self._stream)

    def restart(self) -> None:
        self._launched = 0


class PlainCopies:
    """Copies of a CPU to itself."""

    def follow(self, other: Copies | None = None) -> None:
        pass

    def launch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def join(self, number: int | None = None) -> None:
        pass

    def restart(self) -> None:
        pass
