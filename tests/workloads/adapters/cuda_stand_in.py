"""Lets Megatron-Core compute on a CPU: it asks for CUDA by name where it could ask for the device of its tensors.

What is replaced is where tensors lie and how random states are kept, nothing of what is computed. The tests of the
adapter alone use it; a point on a CPU is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from workloads.rules import engine_support
from workloads.spec.experiment import Experiment

_CPU = torch.device("cpu")
_TYPES = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
_MASKS = ("get_default_causal_mask", "get_sliding_window_causal_mask")
_type = torch.Tensor.type
_exchange = dist.all_to_all_single


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


class _Stream:
    """Work on a CPU has ended when the call returns."""

    def wait_stream(self, _: _Stream) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _masks_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Also where full recomputation calls it from the backward pass, which leaves `_OnCpu`."""

    def masks(*args: Any) -> torch.Tensor:
        with _OnCpu():
            return make(*args)

    return masks


def _all_to_all(*args: Any, **kwargs: Any) -> Any:
    """With splits as lists: the dispatcher takes them from the device as arrays."""
    splits = {name: value for name, value in kwargs.items() if name.endswith("_split_sizes") and value is not None}
    return _exchange(*args, **{**kwargs, **{name: [int(rows) for rows in value] for name, value in splits.items()}})


def _cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _type(tensor, *args, **kwargs)
    return _TYPES[tensor.dtype]


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """While it is open, in a process that has not imported Megatron-Core before."""
    torch._dynamo.config.disable = True  # its small fused operations are compiled where they are defined
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random

    from workloads.adapters import megatron

    made = megatron.transformer_config

    def config_for_gloo(e: Experiment) -> Any:
        """gloo still reads what NCCL has in its stream already: outputs that were sent must live on."""
        config = made(e)
        config.deallocate_pipeline_outputs = False
        return config

    replaced = (
        (megatron, "transformer_config", config_for_gloo),
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "Stream", _Stream),
        (dist, "all_to_all_single", _all_to_all),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "manual_seed", lambda *_: None),
        (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", _cuda_type),
        *((fused_softmax, name, _masks_on_cpu(getattr(fused_softmax, name))) for name in _MASKS),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
        (megatron, "require_cuda", lambda device: None),
        (engine_support, "ON_CUDA_ALONE", ()),
    )
    patches = [mock.patch.object(owner, name, new) for owner, name, new in replaced]
    for patch in patches:
        patch.start()
    try:
        with _OnCpu():
            yield
    finally:
        for patch in reversed(patches):
            patch.stop()
