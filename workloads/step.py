"""Runs and times training steps: warm-up, a memory probe, then timed steps without a host-device round trip.

Every step sets marks on the device's time line:

    start ─ forward/backward (pipeline waits marked) ─ last backward ─ reduction left exposed ─ optimizer ─ end

With several pipeline stages, waiting for the slowest one after the last backward (in the sums of loss and gradient norm
over all ranks, and of a tied embedding's gradients) is pipeline idle time too.

All batches are copied to the device before the first warm-up step, or before the first timed one: a copy between two
steps would make host and device wait for each other. The host may run ahead of the device by at most one step, so that
launching costs no device time and a heartbeat is never more than a step early. One small all-reduce gives every rank
the same loss and gradient norm of the global batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.engine.build import Engine
from workloads.engine.data import step_batches
from workloads.engine.memory import MemoryProbe
from workloads.engine.pipeline import PipelineMarks
from workloads.protocol import MeasureSpec, MemoryAtPeak, StepRecord

Batches = list[tuple[Tensor, Tensor]]


class Diverged(RuntimeError):
    """The loss or the gradient norm is not finite."""


@dataclass(frozen=True)
class _Pending:
    """A step that the host has launched; the device may not have computed its numbers yet."""

    step: int
    is_warmup: bool
    start: Any
    reduced: Any
    end: Any
    marks: PipelineMarks
    totals: Tensor
    """(loss, squared gradient norm) of the global batch, on the device."""
    memory: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class Measurements:
    """What one rank measured over all its steps; times in seconds."""

    steps: list[StepRecord]
    memory_at_peak: MemoryAtPeak | None
    forward_s: float | None
    """Median over the timed steps of one micro-batch's forward on this stage."""
    backward_s: float | None


def measure(
    engine: Engine, spec: MeasureSpec, before_step: Callable[[int, bool], None] = lambda step, warm: None
) -> Measurements:
    """Run the warm-up steps and then the timed steps of ``spec``; call ``before_step(step, is_warmup)`` before each.

    Raises `Diverged` when a loss or gradient norm is not finite: after all warm-up steps, or after all timed steps.
    """
    # In the very first step there is no optimizer state yet, and its peak says nothing about later ones.
    probe = MemoryProbe(engine) if spec.memory_probe and spec.warmup_steps > 1 else None
    records: list[StepRecord] = []
    spans: dict[str, list[float]] = {"F": [], "B": []}
    for first, count, warm in ((0, spec.warmup_steps, True), (spec.warmup_steps, spec.timed_steps, False)):
        pending: list[_Pending] = []
        steps = range(first, first + count)
        batches = {step: _batches(engine, step) for step in steps}
        for step in steps:
            before_step(step, warm)
            probing = probe is not None and warm and step == first + count - 1
            with _watched(probe) if probing else nullcontext():
                pending.append(run_step(engine, step, batches.pop(step), is_warmup=warm))
            if probing and probe is not None and probe.tracker is not None:
                pending[-1].memory["peak_allocated_bytes"] = probe.peak_bytes
            if len(pending) > 1:
                _wait_for(pending[-2].end)
        engine.clock.finish()
        records += [_finish(engine, p) for p in pending]
        if not warm:
            for action, start, end in (span for p in pending for span in p.marks.actions):
                spans[action.kind].append(engine.clock.seconds(start, end))
    forward, backward = (statistics.median(times) if times else None for times in spans.values())
    return Measurements(records, probe.at_peak if probe is not None else None, forward, backward)


def _batches(engine: Engine, step: int) -> Batches:
    return step_batches(engine.experiment, step, engine.groups.data_rank, engine.groups.device)


def run_step(engine: Engine, step: int, batches: Batches, *, is_warmup: bool) -> _Pending:
    """Launch one optimizer step. Its times and its loss are read later, by `_finish`."""
    groups, clock = engine.groups, engine.clock
    cuda = groups.device.type == "cuda"
    retries = _retries() if cuda else None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = clock.mark()
    loss, marks = engine.pipeline.run(batches)
    engine.optimizer.finish_gradients()
    reduced = clock.mark()
    # What follows waits for the slowest stage: it is not this stage's reduction, nor its optimizer.
    engine.optimizer.add_tied_copies()
    square_norm = engine.optimizer.local_square_norm()
    own_loss = loss if loss is not None and groups.tp.rank == 0 else torch.zeros((), device=groups.device)
    totals = torch.stack([own_loss.to(square_norm.dtype), square_norm])
    dist.all_reduce(totals)
    summed = clock.mark()
    if engine.experiment.pp > 1:
        marks.late_waits.append((reduced, summed))
    engine.optimizer.step(totals[1].sqrt())
    end = clock.mark()
    memory: dict[str, int | None] = {}
    if cuda:
        memory = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocator_retries": _retries() - (retries or 0),
        }
    return _Pending(step, is_warmup, start, reduced, end, marks, totals, memory)


def _finish(engine: Engine, pending: _Pending) -> StepRecord:
    clock = engine.clock
    loss, square_norm = pending.totals.tolist()
    if not engine.groups.is_rehearsal and not (math.isfinite(loss) and math.isfinite(square_norm)):
        raise Diverged(f"step {pending.step}: loss {loss}, squared gradient norm {square_norm}")
    marks, backward_end = pending.marks, pending.marks.last_backward
    assert backward_end is not None
    early = sum(clock.seconds(a, b) for a, b in marks.waits)
    (sends, *sums) = [clock.seconds(a, b) for a, b in marks.late_waits]
    return StepRecord(
        step=pending.step,
        is_warmup=pending.is_warmup,
        step_time_s=clock.seconds(pending.start, pending.end),
        forward_backward_s=clock.seconds(pending.start, backward_end) - early,
        reduce_exposed_s=clock.seconds(backward_end, pending.reduced) - sends,
        optimizer_s=clock.seconds(pending.reduced, pending.end) - sum(sums),
        pipeline_idle_s=early + sends + sum(sums),
        loss=None if engine.groups.is_rehearsal else loss,
        grad_norm=None if engine.groups.is_rehearsal else math.sqrt(square_norm),
        **pending.memory,
    )


@contextmanager
def _watched(probe: MemoryProbe | None) -> Iterator[None]:
    assert probe is not None
    with probe.watch():
        yield


def _wait_for(mark: Any) -> None:
    if isinstance(mark, torch.cuda.Event):
        mark.synchronize()


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
