"""Reads the device's time line from a trace that torch's profiler has written (Chrome's JSON). No torch here.

It uses these events, with times in microseconds:

    cat kernel, gpu_memcpy, gpu_memset   what ran on the device; ``correlation`` in its args, and for NCCL's kernels
                                         ``Process Group Name``, the name under which torch has registered the group
    cat cuda_runtime, cuda_driver        the call that launched it, with the same ``correlation``, on the host
    cat user_annotation                  ranges that the engine has marked, on the host

A kernel belongs to the range in which it was launched, on whatever thread: backward runs on a separate thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.text.numbers import plural
from workloads.engine.observing.breakdown import OPTIMIZER_RANGE, SHARED_MEMORY, STEP_RANGE, KernelSpan, kind_of

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_US = 1e-6


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The last step of a trace on the device."""

    spans: list[KernelSpan]
    """All kernels and copies in the trace, of any step."""
    start_s: float
    """The end of the previous step, if it is in the trace, else the start of the step's first kernel."""
    end_s: float


def read_step(trace: Mapping[str, Any], axes: Mapping[str, str]) -> TracedStep:
    """Read the last `STEP_RANGE` of a trace. ``axes``: axis of every process group, by its registered name.

    Raises ValueError for a trace without such a range, or without a kernel in it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    steps, updates = _ranges(events, STEP_RANGE), _ranges(events, OPTIMIZER_RANGE)
    spans: list[KernelSpan] = []
    of_step: list[list[KernelSpan]] = [[] for _ in steps]
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        args = event.get("args", {})
        at = launched.get(args.get("correlation"))
        kind = kind_of(event["name"], in_optimizer=at is not None and _place(updates, at) is not None)
        axis = axes.get(str(args.get("Process Group Name"))) if kind == "communication" else None
        if SHARED_MEMORY.search(event["name"]):
            axis = "tp"
        start = float(event["ts"])
        span = KernelSpan(event["name"], start * _US, (start + float(event.get("dur", 0))) * _US, kind, axis)
        spans.append(span)
        if at is not None and (step := _place(steps, at)) is not None:
            of_step[step].append(span)
    if not of_step or not of_step[-1]:
        raise ValueError(f"the trace holds {plural(len(steps), 'step')} and, in the last of them, no kernel")
    start_s = min(span.start_s for span in of_step[-1])
    if len(of_step) > 1 and of_step[-2]:
        start_s = max(span.end_s for span in of_step[-2])
    return TracedStep(spans, start_s, max(span.end_s for span in of_step[-1]))


def _ranges(events: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Begin and end of the ranges of this name on the host, sorted, in microseconds."""
    return sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == name
    )


def _place(ranges: Sequence[tuple[float, float]], at: float) -> int | None:
    return next((number for number, (begin, end) in enumerate(ranges) if begin <= at <= end), None)
