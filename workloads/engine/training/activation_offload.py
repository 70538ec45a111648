"""Activations of layers that wait for their backward in the memory of the host (``activation_offload``).

When a layer's forward has ended, the storages of its named tensors (`workloads.engine.layers.saved_tensors`) are copied
to pinned buffers, each once, however many views of it autograd has saved. When the next layer's forward has ended,
compute waits for these copies and the device's memory is freed; so at most two layers hold theirs at one time. When the
backward of a layer begins, compute waits for the layer's tensors, and those of the layer before it begin to come back:

    forward   compute  | layer 0 | layer 1 | layer 2 |        backward   compute  | layer 2 | layer 1 | layer 0 |
              down               | 0       | 1       | 2                 up       | 1       | 0       |

A schedule's next action does the waiting for the last layer of the one before. All waiting is of streams, never of the
host, and device memory is allocated and freed on the stream of compute alone. Buffers return to a pool once their copy
back is joined, so that later steps allocate none: as many are pinned as the schedule has micro-batches in flight. On a
CPU, and on FakeTensors, the same code runs with plain copies.

Weights, statistics and whatever else has no name stay where they are. So does the input of a stage that came from
another one, which the pipeline holds, and the last layer before the head, whose backward comes next
(`workloads.spec.activations.offload.last_layer_stays`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from workloads.engine.layers.saved_tensors import kept_by
from workloads.engine.training.host_copies import copies_of, host_buffer


class OffloadedBlock(nn.Module):
    """A layer whose tensors of ``words`` wait on the host; it may recompute others."""

    def __init__(
        self, block: nn.Module, store: ActivationStore, words: Collection[str], *, is_first: bool, input_stays: bool
    ) -> None:
        """``is_first``: of its chunk. ``input_stays``: whether its input is held by others too."""
        super().__init__()
        self.block, self.store, self.words = block, store, frozenset(words)
        self.is_first, self.input_stays = is_first, input_stays

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, *seen: Any) -> Tensor:
        layer = LayerTensors(self.store, self.words, None if self.is_first else self.store.newest)
        if self.input_stays:
            layer.leave_out(x_TD)
        with kept_by(layer), saved_tensors_hooks(layer.keep, _Handle.tensor):
            out: Tensor = self.block(x_TD, cos_SH, sin_SH, *seen)
        layer.leave()
        self.store.newest = layer
        if out.requires_grad:
            out.register_hook(layer.before_backward)
        return out


class ActivationStore:
    """Copies to and from the host, and the buffers there, of all layers of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = copies_of(device), copies_of(device)
        self.newest: LayerTensors | None = None
        """The layer whose forward came last."""
        self._leaving: LayerTensors | None = None
        """The layer whose copies to the host may still run."""
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._buffers: list[Tensor] = []

    def launch(self, layer: LayerTensors) -> None:
        """Copy a layer's tensors to the host, once those of the layer before are gone."""
        self.finish()
        self.down.follow()
        for tensor in layer.moved:
            assert tensor.on_device is not None
            tensor.on_host = self._take(tensor.on_device)
            self.down.launch(tensor.on_host, tensor.on_device)
        self._leaving = layer if layer.moved else None

    def finish(self) -> None:
        """Let compute wait for the copies to the host, and free the device's memory that they have read."""
        if self._leaving is None:
            return
        self.down.join()
        self.down.restart()
        for tensor in self._leaving.moved:
            tensor.on_device = None
        self._leaving = None

    def fetch(self, layer: LayerTensors) -> None:
        """Begin to copy a layer's tensors back. `join` must follow before another layer's are fetched."""
        self.finish()
        if all(tensor.on_device is not None for tensor in layer.moved):
            return
        for tensor in layer.moved:
            assert tensor.on_host is not None
            tensor.on_device = torch.empty(tensor.on_host.shape, dtype=tensor.on_host.dtype, device=self.device)
        self.up.follow()
        for tensor in layer.moved:
            assert tensor.on_host is not None and tensor.on_device is not None
            self.up.launch(tensor.on_device, tensor.on_host)

    def join(self, layer: LayerTensors) -> None:
        """Let compute wait for a layer's tensors. Their buffers may be used again: what is copied to them next follows
        compute."""
        if not layer.moved:
            return
        self.up.join()
        self.up.restart()
        for tensor in layer.moved:
            assert tensor.on_host is not None
            self._free[tensor.on_host.numel(), tensor.on_host.dtype].append(tensor.on_host)
            tensor.on_host = None
        layer.moved.clear()  # from now on autograd alone holds them

    def tensors(self) -> list[Tensor]:
        """Every buffer on the host."""
        return self._buffers

    def host_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def _take(self, tensor: Tensor) -> Tensor:
        free = self._free.setdefault((tensor.numel(), tensor.dtype), [])
        if not free:
            pinned = self.device.type == "cuda"
            free.append(host_buffer(self, tensor.numel(), tensor.dtype, "activation_offload", pinned=pinned))
            self._buffers.append(free[0])
        return free.pop()


class LayerTensors:
    """The saved tensors of one layer and one micro-batch: the `Keeper` of its forward."""

    def __init__(self, store: ActivationStore, words: Collection[str], before: LayerTensors | None) -> None:
        """``before``: the layer before it in the same chunk, whose backward comes next."""
        self.store, self.words, self.before = store, words, before
        self.moved: list[_Moved] = []
        """Tensors that go to the host, until they are back."""
        self._named: dict[int, Tensor] = {}
        """By storage; held, so that no other tensor gets its address during the forward."""
        self._handles: list[_Handle] = []
        self._left_out: int | None = None

    def leave_out(self, tensor: Tensor) -> None:
        """Keep this tensor on the device, whatever its name."""
        self._left_out = _storage_of(tensor)

    def name(self, word: str, tensors: tuple[Tensor, ...]) -> None:
        if word in self.words:
            self._named |= {_storage_of(tensor): tensor.detach() for tensor in tensors}

    def keep(self, tensor: Tensor) -> _Handle:
        """Pack hook. A tensor with a graph is detached, since an output that keeps itself alive would never be
        freed."""
        self._handles.append(_Handle(tensor.detach() if tensor.requires_grad else tensor))
        return self._handles[-1]

    def leave(self) -> None:
        """The forward has ended: send away what has a name and is saved."""
        moved: dict[int, _Moved] = {}
        for handle in self._handles:
            key = _storage_of(handle.tensor())
            if key in self._named and key != self._left_out:
                if key not in moved:
                    moved[key] = _Moved(_whole(self._named[key]))
                handle.move(moved[key])
        self.moved = list(moved.values())
        self._named.clear()
        self._handles.clear()
        self.store.launch(self)

    def before_backward(self, grad: Tensor) -> None:
        """Hook on the gradient of the layer's output."""
        self.store.fetch(self)
        self.store.join(self)
        if self.before is not None:
            self.store.fetch(self.before)


class _Moved:
    """A storage that goes to the host and comes back."""

    __slots__ = ("on_device", "on_host")

    def __init__(self, on_device: Tensor) -> None:
        self.on_device: Tensor | None = on_device
        self.on_host: Tensor | None = None


class _Handle:
    """What autograd holds of a saved tensor: the tensor, or a view of one that moves."""

    __slots__ = ("_moved", "_tensor", "_view")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._moved: _Moved | None = None

    def move(self, moved: _Moved) -> None:
        tensor = self.tensor()
        self._view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self._tensor, self._moved = None, moved

    def tensor(self) -> Tensor:
        """Unpack hook."""
        if self._tensor is not None:
            return self._tensor
        assert self._moved is not None and self._moved.on_device is not None, "its layer's backward has not begun"
        return self._moved.on_device.as_strided(*self._view)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor's storage, as one dim."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
