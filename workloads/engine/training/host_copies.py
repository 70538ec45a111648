"""Copies between a device and its host that are launched now and waited for later, each kind on a stream of its own."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from workloads.spec.errors import UnsupportedByEngine


class Copies(Protocol):
    """Copies in one direction, in the order in which they are launched."""

    def follow(self, other: Copies | None = None) -> None:
        """Begin nothing before what was launched so far: on the current stream, or by ``other``."""

    def launch(self, target: Tensor, source: Tensor) -> int:
        """Copy as soon as all before it is done; returns the number of the copy, from 0 in each round."""

    def wait(self, number: int) -> None:
        """Let the host wait for a copy, and so for all before it."""

    def join(self) -> None:
        """Let the current stream wait for all copies."""

    def restart(self) -> None:
        """Begin a new round. The host must have waited for the last one, or the current stream have joined it."""


_PAGE = 4096
"""Bytes of a page of the host's memory; larger ones are multiples of it."""


def host_buffer(owner: Any, elements: int, dtype: torch.dtype, field: str, *, pinned: bool) -> Tensor:
    """Memory of the host that lives as long as ``owner``: zeros [elements]. It is pinned where it lies, since torch's
    own allocator of pinned memory rounds sizes up to a power of two; on pages of its own, since a page is pinned once.
    ``field``: the field of the experiment for which it is. Raises `UnsupportedByEngine` if the host cannot pin it."""
    if not pinned or not elements:
        return torch.zeros(elements, dtype=dtype, device="cpu")
    size = elements * dtype.itemsize
    whole = -(-size // _PAGE) * _PAGE
    pages = torch.zeros(whole + _PAGE, dtype=torch.uint8, device="cpu")
    first = -pages.data_ptr() % _PAGE
    buffer = pages[first : first + size].view(dtype)
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(buffer.data_ptr(), whole, 0))
    if status != 0:
        raise UnsupportedByEngine(
            f"{field}: the host cannot pin {whole / 2**30:.1f} GiB (CUDA error {status}); "
            "its limit of locked memory may be too low (ulimit -l)"
        )
    weakref.finalize(owner, _unpin, buffer)  # holds the buffer until then
    return buffer


def _unpin(buffer: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(buffer.data_ptr())


def copies_of(device: torch.device, *, beside: bool = True) -> Copies:
    """``beside``: on a stream of its own instead of the current one. On a CPU, which has no streams, a copy is done
    when it is launched."""
    return StreamCopies(device, beside=beside) if device.type == "cuda" else PlainCopies()


class StreamCopies:
    """Copies on a CUDA stream. The host's memory must be pinned."""

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        self._own: Any = torch.cuda.Stream(device) if beside else None  # type: ignore[no-untyped-call]
        self._events: list[Any] = []
        """One for each copy of a round, reused in the next."""
        self._launched = 0

    @property
    def stream(self) -> Any:
        return self._own if self._own is not None else torch.cuda.current_stream()

    def follow(self, other: Copies | None = None) -> None:
        assert other is None or isinstance(other, StreamCopies)
        if other is None:
            self.stream.wait_stream(torch.cuda.current_stream())
        elif other._launched:
            self.stream.wait_event(other._events[other._launched - 1])

    def launch(self, target: Tensor, source: Tensor) -> int:
        if self._launched == len(self._events):
            self._events.append(torch.cuda.Event())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self._events[self._launched].record(self.stream)
        self._launched += 1
        return self._launched - 1

    def wait(self, number: int) -> None:
        self._events[number].synchronize()

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)

    def restart(self) -> None:
        self._launched = 0


class PlainCopies:
    """Copies of a CPU to itself."""

    def __init__(self) -> None:
        self._launched = 0

    def follow(self, other: Copies | None = None) -> None:
        pass

    def launch(self, target: Tensor, source: Tensor) -> int:
        target.copy_(source)
        self._launched += 1
        return self._launched - 1

    def wait(self, number: int) -> None:
        pass

    def join(self) -> None:
        pass

    def restart(self) -> None:
        self._launched = 0
