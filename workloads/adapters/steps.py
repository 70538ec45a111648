"""Step loop of engines that report a step's loss and norm only after it: warm-up, then timed steps.

Such an engine synchronises host and device once a step, as it does for its users; nothing else in a step is
synchronised here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import StepRecord
from workloads.engine.training.clock import Clock
from workloads.measuring.step import BeforeStep, Diverged, Measurements, garbage_collector_off


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine's results of one step of the global batch."""

    loss: float
    grad_norm: float | None
    """None if the engine reports a wrong norm that cannot be corrected."""
    backward_end: Any
    """Clock mark after the last backward."""
    graph_bytes: int = 0
    """Peak of allocated memory while the CUDA graph that this step replays was captured: a replay allocates nothing."""


def measure_steps(
    run: Callable[[int], Ended], clock: Clock, device: torch.device, spec: MeasureSpec, before_step: BeforeStep
) -> Measurements:
    """Run all warm-up steps of ``spec`` and then the timed ones; ``run(step)`` runs one step.

    Raises `Diverged` for a loss or norm that is not finite.
    """
    spans: dict[int, tuple[float, float]] = {}
    warm = [_step(run, clock, device, step, before_step, spans, True) for step in range(spec.warmup_steps)]
    shared = torch.tensor(spec.timed_steps_of(min((r.step_time_s for r in warm), default=None)), device=device)
    dist.broadcast(shared, src=0)
    last = spec.warmup_steps + int(shared.item())
    with garbage_collector_off():
        dist.all_reduce(torch.zeros((), device=device))
        begin = time.perf_counter()
        timed = [_step(run, clock, device, step, before_step, spans, False) for step in range(spec.warmup_steps, last)]
        wall_s = time.perf_counter() - begin
    timed_spans = {record.step: spans[record.step] for record in timed}
    return Measurements([*warm, *timed], None, None, None, wall_s, timed_spans, None)


def _step(
    run: Callable[[int], Ended],
    clock: Clock,
    device: torch.device,
    step: int,
    before_step: BeforeStep,
    spans: dict[int, tuple[float, float]],
    is_warmup: bool,
) -> StepRecord:
    before_step(step, is_warmup)
    cuda = device.type == "cuda"
    retries = _retries() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    launched_at, start = time.perf_counter(), clock.mark()
    ended = run(step)
    end = clock.mark()
    clock.finish()
    spans[step] = launched_at, launched_at + clock.seconds(start, end)
    if not math.isfinite(ended.loss) or not math.isfinite(ended.grad_norm or 0.0):
        raise Diverged(f"step {step}: loss {ended.loss}, gradient norm {ended.grad_norm}")
    return StepRecord(
        step=step,
        is_warmup=is_warmup,
        step_time_s=clock.seconds(start, end),
        forward_backward_s=clock.seconds(start, ended.backward_end),
        optimizer_s=clock.seconds(ended.backward_end, end),
        loss=ended.loss,
        grad_norm=ended.grad_norm,
        peak_allocated_bytes=max(torch.cuda.max_memory_allocated(), ended.graph_bytes) if cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if cuda else None,
        allocator_retries=_retries() - retries if cuda else None,
    )


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
