"""Times a rehearsal's copies, which stand for the results of collectives, so that they can be subtracted from its step.

A rehearsal fills the results of collectives with this rank's own numbers (`Axis.is_rehearsal`), on the compute stream.
Communication is added to its times from the closed form, so the copies must not count as well. A dispatch mode records
the calls of one warm-up step; after the timed steps each distinct one is repeated alone.

Data parallelism is not recorded: FSDP communicates on its own streams, in parallel to the compute, as in a real run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workloads.engine.collectives.communication import Axis, exchange_async, gather_async, reduce_scatter_async, wait
from workloads.engine.training.build import Engine

_REPEATS = 20
_HEAD_START_CYCLES = 20_000_000
"""The device idles for about 10 ms, during which the host launches all repeats: only the copies are timed."""
_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


class StandIns(TorchDispatchMode):
    """Records the collectives of one step while it is active."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._axes: Mapping[str, Axis] = {
            axis.group_name: axis for axis in engine.groups.axes.values() if axis.group is not None
        }
        self._calls: dict[bool, Counter[_Call]] = {False: Counter(), True: Counter()}
        """Number of times of each call, by whether a backward was running."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "_c10d_functional":
            self._note(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in _NAMES or (axis := self._axes.get(args[-1])) is None:
            return
        x: Tensor = args[0]
        splits = tuple(map(tuple, args[1:3])) if name == "all_to_all_single" else ((), ())
        call = _Call(name, axis.name, tuple(x.shape), x.dtype, *splits)
        self._calls[self._engine.pipeline.running != "F"][call] += 1

    def seconds(self) -> tuple[float, float] | None:
        """Time of the copies in one micro-batch's (forward, backward) on this rank, in seconds.

        None on a CPU, where they cannot be timed apart from the host's work, and if the device's memory does not
        suffice.
        """
        if self._engine.groups.device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        micro_batches = self._engine.experiment.num_microbatches
        try:
            each = {call: self._time(call) for calls in self._calls.values() for call in calls}
        except torch.OutOfMemoryError:
            return None
        forward, backward = (
            sum(count * each[call] for call, count in self._calls[part].items()) / micro_batches
            for part in (False, True)
        )
        return forward, backward

    def _time(self, call: _Call) -> float:
        axis = next(axis for axis in self._axes.values() if axis.name == call.axis)
        x = torch.zeros(call.shape, dtype=call.dtype, device=self._engine.groups.device)
        clock = self._engine.clock
        run(call, x, axis)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start = clock.mark()
        for _ in range(_REPEATS):
            run(call, x, axis)
        end = clock.mark()
        clock.finish()
        return clock.seconds(start, end) / _REPEATS


def run(call: _Call, x: Tensor, axis: Axis) -> Tensor:
    """Repeat the call with ``x``."""
    if call.name == "all_gather_into_tensor":
        return wait(gather_async(x, axis))
    if call.name == "reduce_scatter_tensor":
        return wait(reduce_scatter_async(x, axis))
    return wait(exchange_async(x, list(call.received), list(call.sent), axis))
