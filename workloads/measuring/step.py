"""Runs and times training steps: warm-up, a memory probe, then timed steps without a host-device round trip.

Every step sets marks on the device's time line:

    start ─ forward/backward (pipeline waits marked) ─ last backward ─ exposed gradient reduction ─ optimizer ─ end

With several pipeline stages, time spent waiting for the slowest stage after the last backward also counts as pipeline
idle time. This happens in the sums of loss and gradient norm over all ranks, and of a tied embedding's gradients.

All batches are copied to the device before the first warm-up step, or before the first timed one: a copy between two
steps would make host and device wait for each other. The host may run ahead of the device by at most one step. So
launching costs no device time, and a heartbeat is at most one step early. One small all-reduce gives every rank the
same loss and gradient norm of the global batch.

The timed steps begin on all ranks together, after each has collected its garbage. Python's garbage collector is off
until they end; otherwise one rank's collection would make all ranks wait.

With ``cuda_graph`` a step is captured after all warm-up steps but one, and replayed from there on
(`workloads.engine.training.captured_step`); with ``auto`` only if the graph will find its memory. The marks of a
captured step are set again by every replay, so the times of a step's parts are those of the last timed step; the time
of a step is that of every step. Peak memory is that of the capture, since a replay allocates nothing.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from workloads.contract.measure_spec import WARM_STEPS, MeasureSpec
from workloads.contract.protocol import MemoryAtPeak, RoutingRecord, StepRecord
from workloads.engine.observing.breakdown import OPTIMIZER_RANGE, STEP_RANGE
from workloads.engine.observing.memory import MemoryProbe
from workloads.engine.training import loss_scale
from workloads.engine.training.balance import finish_routing, routing_record
from workloads.engine.training.build import Engine
from workloads.engine.training.captured_step import Batches, CapturedStep, Launched, no_room, own_stream, stacked
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import step_batches
from workloads.measuring.device_times import Pending, host_lead_s, micro_batch_s, spans_of
from workloads.rules.captured_steps import not_captured
from workloads.spec.errors import UnsupportedByEngine

BeforeStep = Callable[[int, bool], None]
"""``(step, is_warmup)``"""


class Diverged(RuntimeError):
    """The loss or the gradient norm is not finite; in fp16 at a loss scale below `loss_scale.COLLAPSED`."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one rank over all its steps; times in seconds."""

    steps: list[StepRecord]
    memory_at_peak: MemoryAtPeak | None
    forward_s: float | None
    """Median over the timed steps of one micro-batch's forward through all chunks of this rank."""
    backward_s: float | None
    timed_wall_s: float
    """Host time from the launch of the first timed step to the end of the last one on the device."""
    timed_spans: dict[int, tuple[float, float]]
    """Start and end of every timed step on the device, in seconds of `time.perf_counter`."""
    routing: RoutingRecord | None
    host_lead_s: float | None = None
    """Time from when the host has launched the last backward until the device has finished it; median over the timed
    steps. Near 0: the device waited for the host. None on a CPU, which has no separate device, and for other engines.
    """
    cuda_graph: Literal["none", "step"] | None = None
    """Whether the timed steps were replays of a captured one; None for other engines."""
    not_captured: str | None = None
    """Why not, if ``cuda_graph=auto`` allowed it."""
    shares_memory: bool | None = None
    """Whether tensor-parallel ranks exchange tokens through memory that they share; None without such a layout."""
    host_memory_bytes: int | None = None
    """Bytes that optimizer and activations hold on the host; None without any there."""


def measure(
    engine: Engine,
    spec: MeasureSpec,
    before_step: BeforeStep = lambda step, warm: None,
    counter: TorchDispatchMode | None = None,
    before_replay: BeforeStep | None = None,
) -> Measurements:
    """Run the warm-up steps and then the timed steps of ``spec``; call ``before_step(step, is_warmup)`` before each, or
    ``before_replay`` (None: the same) before a replay.

    The memory probe runs in the last warm-up step, or in the second one if the run may end early
    (``spec.slow_step_s``). ``counter`` counts sent messages in the second warm-up step. If there is only one, it counts
    there, unless blocks are compiled: nothing can be compiled while a counter is active. With ``cuda_graph`` the last
    warm-up step is the first replay, and "last" above means the one before it. Raises `Diverged` when a loss or
    gradient norm is not finite: after all warm-up steps, or after all timed steps.
    """
    reason = _not_captured(engine, spec)
    captures = engine.experiment.cuda_graph != "none" and reason is None
    with own_stream(engine.groups.device) if captures else nullcontext():
        return _measure(engine, spec, before_step, counter, before_replay or before_step, reason, captures=captures)


def _not_captured(engine: Engine, spec: MeasureSpec) -> str | None:
    """Why steps cannot be captured; None if they can, or if ``cuda_graph=none``. Raises `UnsupportedByEngine` if the
    experiment requires it."""
    asked = engine.experiment.cuda_graph
    if asked == "none":
        return None
    if engine.groups.is_rehearsal:
        return "a rehearsal runs eagerly"
    reason = not_captured(engine.experiment, engine.groups.device.type) or spec.too_few_to_capture
    if reason is not None and asked == "step":
        raise UnsupportedByEngine(f"cuda_graph=step: {reason}; or use cuda_graph=none or auto")
    return reason


def _measure(
    engine: Engine,
    spec: MeasureSpec,
    before_step: BeforeStep,
    counter: TorchDispatchMode | None,
    before_replay: BeforeStep,
    reason: str | None,
    *,
    captures: bool,
) -> Measurements:
    if captures:
        engine.optimizer.allocate()
    # The very first eager step has no optimizer state yet, so its peak is not that of later steps.
    probe = MemoryProbe(engine) if spec.memory_probe and spec.warmup_steps > 1 else None
    if spec.warmup_steps == 1 and engine.experiment.compile != "none":
        counter = None
    # If the run may turn out to be slow, step times are checked after the first of the warm-up steps.
    eager = spec.warmup_steps - 1 if captures else spec.warmup_steps
    first = eager if spec.slow_step_s is None else min(WARM_STEPS, eager)
    warmed = run_steps(engine, range(first), before_step, is_warmup=True, probe=probe, counter=counter)
    records = [_finish(engine, pending) for pending in warmed]
    slow = spec.slow_step_s is not None and bool(_agreed(engine, int(spec.is_slow(_quickest_s(records)))))
    if first < eager and not slow:
        warmed = run_steps(engine, range(first, eager), before_step, is_warmup=True)
        records += [_finish(engine, pending) for pending in warmed]
    if captures and engine.experiment.cuda_graph == "auto":
        reason = no_room(max(record.peak_reserved_bytes or 0 for record in records))
        if reason is not None:
            captures = False
            warmed = run_steps(engine, range(len(records), len(records) + 1), before_step, is_warmup=True)
            records += [_finish(engine, pending) for pending in warmed]
    captured = None
    if captures:
        before_step(len(records), True)
        captured = CapturedStep(
            engine.chunks, engine.clock, lambda batches: _launch(engine, batches), _batches(engine, len(records))
        )
        before_step = before_replay
        warmed = run_steps(
            engine, range(len(records), len(records) + 1), before_step, is_warmup=True, captured=captured
        )
        records += [_finish(engine, pending) for pending in warmed]

    timed: list[Pending] = []
    count, wall_s = _agreed(engine, spec.timed_steps_of(_quickest_s(records))), 0.0
    while len(timed) < count:
        steps = range(len(records), len(records) + count - len(timed))
        with garbage_collector_off():
            ran = run_steps(engine, steps, before_step, is_warmup=False, captured=captured)
        wall_s += time.perf_counter() - ran[0].launched_at
        timed += ran
        records += [_finish(engine, pending) for pending in ran]
        if slow:  # The run seemed slow in warm-up. If its timed steps are fast, it continues.
            count = _agreed(engine, spec.timed_steps_of(_quickest_s(records[-len(ran) :])))
    forward, backward = (micro_batch_s(engine, timed, kinds) for kinds in ("F", "BIW"))
    at_peak = probe.at_peak if probe is not None else None
    routing = routing_record(engine.chunks, engine.groups)
    lead = host_lead_s(engine, timed)
    spans = spans_of(engine, timed)
    if captured is not None:
        captured.release()
    ran_as: Literal["none", "step"] = "step" if captures else "none"
    shares = engine.peers.is_open if engine.peers is not None else None
    on_host = [one.host_bytes() for one in (engine.optimizer.streamed, engine.store) if one is not None]
    of_host = sum(on_host) if on_host else None
    return Measurements(
        records, at_peak, forward, backward, wall_s, spans, routing, lead, ran_as, reason, shares, of_host
    )


def _quickest_s(records: list[StepRecord]) -> float | None:
    """The shortest step time; None if there are no records. Among warm-up steps it is the nearest to a timed step,
    because the first step compiles and one may be probed."""
    return min((record.step_time_s for record in records), default=None)


def run_steps(
    engine: Engine,
    steps: range,
    before_step: BeforeStep,
    *,
    is_warmup: bool,
    probe: MemoryProbe | None = None,
    counter: TorchDispatchMode | None = None,
    captured: CapturedStep | None = None,
) -> list[Pending]:
    """Launch the steps, or replays of ``captured``, and wait until the device has finished them. ``probe`` watches the
    last step, ``counter`` the second one (or the only one)."""
    pending: list[Pending] = []
    batches: dict[int, Any] = {step: _batches(engine, step) for step in steps}
    if captured is not None:
        batches = {step: stacked(of_step) for step, of_step in batches.items()}
    if not is_warmup:
        _line_up(engine)
    for step in steps:
        before_step(step, is_warmup)
        watching = probe if step == steps[-1] else None
        counting = counter if step == steps[:2][-1] else None
        with record_function(STEP_RANGE), _watched(watching, counting):
            if captured is None:
                pending.append(run_step(engine, step, batches.pop(step), is_warmup=is_warmup))
            else:
                pending.append(_replay_step(engine, captured, step, batches.pop(step), is_warmup=is_warmup))
        if watching is not None and watching.tracker is not None:
            pending[-1].memory["peak_allocated_bytes"] = watching.peak_bytes
        if len(pending) > 1:
            _wait_for(pending[-2].end)
    engine.clock.finish()
    if captured is not None:
        pending[-1] = replace(pending[-1], launched=captured.last())
    return pending


@contextmanager
def _watched(probe: MemoryProbe | None, counter: TorchDispatchMode | None) -> Iterator[None]:
    with ExitStack() as stack:
        if probe is not None:
            stack.enter_context(probe.watch())
        if counter is not None:
            # If dynamo is asked to compile something under a dispatch mode, it leaves it uncompiled for good. So it
            # must not ask.
            stack.enter_context(torch.compiler.set_stance("eager_on_recompile"))
            stack.enter_context(counter)
        yield


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Collect garbage now, and not again before the block ends."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _agreed(engine: Engine, value: int) -> int:
    """Returns the first rank's value on every rank."""
    shared = torch.tensor(value, device=engine.groups.device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def _line_up(engine: Engine) -> None:
    """Wait until every rank has reached this point."""
    dist.all_reduce(torch.zeros((), device=engine.groups.device))
    engine.clock.finish()


def _batches(engine: Engine, step: int) -> Batches:
    groups = engine.groups
    return step_batches(engine.experiment, step, groups.data_rank, groups.device, groups.position["cp"], engine.source)


def run_step(engine: Engine, step: int, batches: Batches, *, is_warmup: bool) -> Pending:
    """Launch one optimizer step. Its times and its loss are read later, by `_finish`."""
    with _memory_of(engine) as memory:
        launched_at = time.perf_counter()
        start = engine.clock.mark()
        launched = _launch(engine, batches)
        end = engine.clock.mark()
    return Pending(step, is_warmup, launched_at, start, end, launched.totals, launched, memory)


def _replay_step(engine: Engine, captured: CapturedStep, step: int, batches: Tensor, *, is_warmup: bool) -> Pending:
    """As `run_step`, for a captured step."""
    with _memory_of(engine) as memory:
        launched_at = time.perf_counter()
        start = engine.clock.mark()
        totals = captured.replay(batches)
        end = engine.clock.mark()
    memory["peak_allocated_bytes"] = max(memory.get("peak_allocated_bytes") or 0, captured.peak_bytes) or None
    return Pending(step, is_warmup, launched_at, start, end, totals, None, memory)


def _launch(engine: Engine, batches: Batches) -> Launched:
    """Launch everything that a step computes."""
    groups, clock = engine.groups, engine.clock
    losses, marks = engine.pipeline.run(batches)
    engine.optimizer.finish_gradients()
    reduced = clock.mark()
    # The operations from here on wait for the slowest stage, so their time is not part of this stage's gradient
    # reduction.
    engine.optimizer.add_tied_copies()
    with record_function(OPTIMIZER_RANGE):
        square_norm = engine.optimizer.local_square_norm()
    if not (losses and groups.axes["tp"].rank == 0):
        losses = [torch.zeros((), device=groups.device)] * (2 if engine.experiment.model.mtp_modules else 1)
    own_loss, *of_modules = (loss.to(square_norm.dtype) for loss in losses)
    totals = torch.stack([own_loss, square_norm, *of_modules])
    dist.all_reduce(totals)
    summed = clock.mark()
    if engine.experiment.pp > 1:
        marks.late_waits.append((reduced, summed))
    with record_function(OPTIMIZER_RANGE):
        if (scale := engine.optimizer.loss_scale) is not None:
            totals = torch.cat([totals, scale.value[None]])  # a copy, because the step will change it
        skipped = engine.optimizer.step(totals[1].sqrt())
        finish_routing(engine.chunks, groups, skipped)
    return Launched(totals, marks, reduced)


@contextmanager
def _memory_of(engine: Engine) -> Iterator[dict[str, int | None]]:
    """The columns of device memory of what is launched inside, once it has been; empty on a CPU."""
    memory: dict[str, int | None] = {}
    if engine.groups.device.type != "cuda":
        yield memory
        return
    retries = _retries()
    torch.cuda.reset_peak_memory_stats()
    yield memory
    memory |= {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocator_retries": _retries() - retries,
    }


def _finish(engine: Engine, pending: Pending) -> StepRecord:
    clock = engine.clock
    loss, square_norm, *others = pending.totals.tolist()
    mtp_loss, scale = (others[0], others[1:]) if engine.experiment.model.mtp_modules else (None, others)
    rehearsed = engine.groups.is_rehearsal
    finite = math.isfinite(loss) and math.isfinite(square_norm)
    if not rehearsed and not finite and (not scale or scale[0] < loss_scale.COLLAPSED):
        with_scale = f" at a loss scale of {scale[0]:g}" if scale else ""
        raise Diverged(f"step {pending.step}: loss {loss}, squared gradient norm {square_norm}{with_scale}")
    return StepRecord(
        step=pending.step,
        is_warmup=pending.is_warmup,
        step_time_s=clock.seconds(pending.start, pending.end),
        loss=None if rehearsed or not math.isfinite(loss) else loss,
        mtp_loss=None if rehearsed or mtp_loss is None or not math.isfinite(mtp_loss) else mtp_loss,
        grad_norm=None if rehearsed or not math.isfinite(square_norm) else math.sqrt(square_norm),
        loss_scale=scale[0] if scale and not rehearsed else None,
        skipped=not math.isfinite(square_norm) if scale and not rehearsed else None,
        **(_parts(clock, pending, pending.launched) if pending.launched is not None else {}),
        **pending.memory,
    )


def _parts(clock: Clock, pending: Pending, launched: Launched) -> dict[str, Any]:
    """Times of the step's parts, in seconds, as columns of `StepRecord`."""
    marks, backward_end = launched.marks, launched.marks.last_backward
    assert backward_end is not None
    early = sum(clock.seconds(a, b) for a, b in marks.waits)
    (sends, *sums) = [clock.seconds(a, b) for a, b in marks.late_waits]
    return {
        "forward_backward_s": clock.seconds(pending.start, backward_end) - early,
        "reduce_exposed_s": clock.seconds(backward_end, launched.reduced) - sends,
        "optimizer_s": clock.seconds(launched.reduced, pending.end) - sum(sums),
        "pipeline_idle_s": early + sends + sum(sums),
    }


def _wait_for(mark: Any) -> None:
    if isinstance(mark, torch.cuda.Event):
        mark.synchronize()


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
