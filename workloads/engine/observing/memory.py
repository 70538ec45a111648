"""Measures the device memory of one rank by category, at the moment of its peak.

Parameters, gradients and optimizer state are counted from the live tensors; activations are the rest of the peak (saved
tensors, temporaries, communication buffers). The peak itself comes from CUDA's allocator, or from `StorageTracker`
without one (CPU tensors, FakeTensors). The probe counts between blocks, in forward and backward, and keeps the counts
from when the peak last rose, so the moment is right to within one block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from workloads.contract.protocol import MemoryAtPeak
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.training.build import Engine
from workloads.engine.training.data_parallel import param_groups_of


class StorageTracker(TorchDispatchMode):
    """Bytes of all tensor storages that were created while active and are still alive, and their peak.

    A storage counts once over its lifetime however many views it has. Works with repeated forwards, where torch's own
    trackers raise, and skips the global-shape tensors that DTensor makes for itself under another fake mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._bytes: dict[int, int] = {}
        self._left_out: dict[int, Tensor] = {}
        self._fake_mode: Any = None

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of these tensors, which are not on the device that is watched."""
        self._left_out |= {tensor.untyped_storage()._cdata: tensor for tensor in tensors}

    def __enter__(self) -> StorageTracker:
        self._fake_mode = active_fake_mode()
        super().__enter__()
        return self

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, or count it again after it was resized in place. One on the meta device has no
        memory."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._left_out:
            return
        if key not in self._bytes:
            weakref.finalize(storage, self._remove, key)
        self.current += size - self._bytes.get(key, 0)
        self._bytes[key] = size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int) -> None:
        self.current -= self._bytes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:
            tree_map_only(Tensor, self.add, out)
        return out


@contextmanager
def tracked_storages(tracker: StorageTracker) -> Iterator[StorageTracker]:
    """Run with the tracker on, and notify it also when FSDP allocates or frees gathered parameters in place."""
    alloc, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def alloc_and_count(tensor: Tensor) -> None:
        alloc(tensor)
        tracker.add(tensor)

    def free_and_count(tensor: Tensor) -> None:
        free(tensor)
        tracker.add(tensor)

    _fsdp_param.alloc_storage, _fsdp_param.free_storage = alloc_and_count, free_and_count
    try:
        with tracker:
            yield tracker
    finally:
        _fsdp_param.alloc_storage, _fsdp_param.free_storage = alloc, free


class MemoryProbe:
    """Watches one step. Use as a context manager around it; then read `at_peak`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tracker = None if engine.groups.device.type == "cuda" else StorageTracker()
        self._highest = -1
        self._master_bytes = {
            (id(named.module), named.attribute): _bytes(local_shard(named.current))
            for named in engine.optimizer.parameters
        }
        """Bytes of every parameter's master shard, which FSDP hides while the parameter is gathered."""
        self.at_peak: MemoryAtPeak | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        for chunk in self.engine.chunks:
            chunk.between_blocks = self._between_blocks
        try:
            if self.tracker is None:
                yield
            else:
                self.tracker.leave_out(self.engine.host_tensors())
                for tensor in self._resident():
                    self.tracker.add(tensor)
                with tracked_storages(self.tracker):
                    yield
        finally:
            for chunk in self.engine.chunks:
                chunk.between_blocks = None
            self.look()

    @property
    def peak_bytes(self) -> int:
        if self.tracker is None:
            return torch.cuda.max_memory_allocated()
        return self.tracker.peak

    def look(self) -> None:
        """If the peak rose since the last call, record the bytes of each category."""
        peak = self.peak_bytes
        if peak <= self._highest:
            return
        self._highest = peak
        parameters, gradients = self._parameters(), self._gradients()
        optimizer = self.engine.optimizer.state_bytes()
        self.at_peak = MemoryAtPeak(
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            activations_bytes=max(peak - parameters - gradients - optimizer, 0),
        )

    def _between_blocks(self, x: Tensor) -> Tensor:
        self.look()
        if x.requires_grad:
            x.register_hook(lambda grad: self.look())
        return x

    def _parameters(self) -> int:
        total = 0
        for named in self.engine.optimizer.parameters:
            current = named.current
            total += _bytes(local_shard(current))
            if not isinstance(current, DTensor):
                total += self._master_bytes[id(named.module), named.attribute]
        return total

    def _gradients(self) -> int:
        total = 0
        modules = (module for chunk in self.engine.chunks for module in chunk.modules())
        for group in (
            group for module in modules if isinstance(module, FSDPModule) for group in param_groups_of(module)
        ):
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                for gradient in (
                    parameter.sharded_param.grad,
                    unsharded.grad if unsharded is not None else None,
                    parameter.unsharded_accumulated_grad,
                ):
                    if gradient is not None:
                        total += _bytes(local_shard(gradient))
        return total

    def _resident(self) -> list[Tensor]:
        """Tensors that exist before the step: master weights, optimizer state, the RoPE tables and memory that ranks
        share."""
        shards = [local_shard(named.current) for named in self.engine.optimizer.parameters]
        peers = self.engine.peers
        return [
            *shards,
            *([peers.memory] if peers is not None else []),
            *self.engine.optimizer.state_tensors(),
            *(buffer for chunk in self.engine.chunks for buffer in chunk.buffers()),
        ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
