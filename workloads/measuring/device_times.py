"""Computes times on the device from the marks of launched steps, after the device has passed them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workloads.engine.training.build import Engine
from workloads.engine.training.captured_step import Launched


@dataclass(frozen=True)
class Pending:
    """A step that the host has launched. The device may not have computed its numbers yet."""

    step: int
    is_warmup: bool
    launched_at: float
    """Seconds of `time.perf_counter`."""
    start: Any
    end: Any
    totals: Tensor
    """(loss, squared gradient norm) of the global batch, with modules of multi-token prediction their mean loss, and in
    fp16 the loss scale, on the device."""
    launched: Launched | None
    """The step's marks; None for a replay whose marks a later one sets again."""
    memory: dict[str, int | None]


def micro_batch_s(engine: Engine, timed: list[Pending], kinds: str) -> float | None:
    """Time of one micro-batch's actions of these kinds, summed over this rank's chunks; medians over the timed steps.

    A schedule such as DualPipeV may run the whole backward of some micro-batches at once (B) and split that of others
    (I and W). Each kind is weighted by its share of the micro-batches.
    """
    spans: dict[int, dict[str, list[float]]] = {}
    marks = (pending.launched.marks for pending in timed if pending.launched is not None)
    for action, start, end in (span for of_step in marks for span in of_step.actions):
        if action.kind in kinds:
            of_chunk = spans.setdefault(action.chunk, {})
            of_chunk.setdefault(action.kind, []).append(engine.clock.seconds(start, end))
    if not spans:
        return None
    return sum(_of_one_micro_batch(of_chunk) for of_chunk in spans.values())


def _of_one_micro_batch(times: dict[str, list[float]]) -> float:
    """Time of one micro-batch from the times of one chunk's actions, by kind. Every micro-batch has one action that is
    not a W, so these give the number of micro-batches."""
    micro_batches = sum(len(seconds) for kind, seconds in times.items() if kind != "W")
    return sum(statistics.median(seconds) * len(seconds) / micro_batches for seconds in times.values())


def spans_of(engine: Engine, timed: list[Pending]) -> dict[int, tuple[float, float]]:
    return {p.step: (_moment(engine, timed, p.start), _moment(engine, timed, p.end)) for p in timed}


def host_lead_s(engine: Engine, timed: list[Pending]) -> float | None:
    if engine.groups.device.type != "cuda":
        return None
    leads = []
    for marks in (pending.launched.marks for pending in timed if pending.launched is not None):
        assert marks.last_backward_at is not None
        leads.append(_moment(engine, timed, marks.last_backward) - marks.last_backward_at)
    return statistics.median(leads)


def _moment(engine: Engine, timed: list[Pending], mark: Any) -> float:
    """Time at which the device reached a mark, by `time.perf_counter`. The device was idle when the first timed step
    was launched, so the clocks of host and device are aligned there."""
    return timed[0].launched_at + engine.clock.seconds(timed[0].start, mark)
