"""Divides the time of one profiled step among the kinds of its kernels. A pure function over the kernels; no torch
here.

Kernels of several streams run at once. Each moment of the step is assigned to the first of these kinds that has a
kernel running: matmul, attention, optimizer, memory-bound (every other kernel and copy), communication, launch gaps
(nothing runs: the device waits for the host). So the parts add up to the step. Communication is exposed in the moments
that are assigned to it, and hidden in the others. If several axes communicate at once without compute, the axis of the
innermost ranks counts as exposed.

A kernel that receives from another stage runs from its launch until the message has arrived. If nothing else runs, this
time is the bubble. With several stages, the bubble includes waiting for the slowest one in the sums over all ranks and
over the two copies of a tied embedding (like ``pipeline_idle_s`` of a timed step).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from workloads.contract.protocol import AxisTime, Breakdown

STEP_RANGE = "ultrasweep.step"
OPTIMIZER_RANGE = "ultrasweep.optimizer"
"""Names of the ranges that the engine marks for the profiler: a whole step; gradient norm, clipping and update."""

Kind = Literal["matmul", "attention", "optimizer", "memory_bound", "communication"]

_COMPUTE: tuple[Kind, ...] = ("matmul", "attention", "optimizer", "memory_bound")
"""Kinds by priority for a moment that several of them share."""
_INNERMOST_FIRST = ("tp", "cp", "dp_shard", "dp_replicate")
_FUSED = re.compile(r"triton_(poi|red|per|for)_")
"""Inductor's memory-bound kernels, named after the operations around them."""
_ATTENTION = re.compile(r"fmha|flash|attention|attn|sdpa", re.IGNORECASE)
_MATMUL = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|splitk|triton_tem_.*mm", re.IGNORECASE)

SHARED_MEMORY = re.compile(r"^Memcpy PtoP|barrier_kernel")
"""Copies between devices, and barriers of torch's symmetric memory: exchanges of tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """One kernel or copy on the device."""

    name: str
    start_s: float
    end_s: float
    kind: Kind
    axis: str | None = None
    """Axis of a communication kernel, as in `workloads.contract.protocol.AxisTime`."""


def kind_of(name: str, *, in_optimizer: bool = False) -> Kind:
    """Kind of a kernel by its name. ``in_optimizer``: whether it was launched inside `OPTIMIZER_RANGE`.

    Matmuls are named by cuBLAS (``nvjet_…``, ``sm90_xmma_gemm_…``, ``cublas…``), CUTLASS, and Inductor's templates;
    attention by cuDNN (``…native_sdpa…flash…``), FlashAttention, ``fmha_…``. Names of attention may contain parts of
    matmul names.
    """
    if name.startswith("nccl") or SHARED_MEMORY.search(name):
        return "communication"
    if in_optimizer:
        return "optimizer"
    if _FUSED.match(name):
        return "memory_bound"
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name) else "memory_bound"


def break_down(
    spans: Iterable[KernelSpan], start_s: float, end_s: float, waiting: Collection[str] = ("pp",)
) -> Breakdown:
    """Breakdown of the time from ``start_s`` to ``end_s``. ``waiting``: axes whose exposed time is the bubble."""
    changes: list[tuple[float, int, Kind, str | None]] = []
    for span in spans:
        begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
        if begin < end:
            changes += [(begin, 1, span.kind, span.axis), (end, -1, span.kind, span.axis)]
    changes.sort(key=lambda change: change[0])
    parts: defaultdict[str, float] = defaultdict(float)
    exposed: defaultdict[str | None, float] = defaultdict(float)
    hidden: defaultdict[str | None, float] = defaultdict(float)
    computing: Counter[Kind] = Counter()
    sending: Counter[str | None] = Counter()
    edges = [start_s, *(change[0] for change in changes), end_s]
    for number, (begin, end) in enumerate(pairwise(edges)):
        if number > 0:
            _, change, kind, axis = changes[number - 1]
            if kind == "communication":
                sending[axis] += change
            else:
                computing[kind] += change
        length = end - begin
        if length <= 0:
            continue
        axes = sorted((axis for axis, count in sending.items() if count), key=_place)
        part = next((kind for kind in _COMPUTE if computing[kind]), None)
        if part is not None:
            parts[part] += length
        elif axes:
            exposed[axes.pop(0)] += length
        else:
            parts["launch_gaps"] += length
        for axis in axes:
            hidden[axis] += length
    reported_axes = sorted({*exposed, *hidden}, key=_place)
    return Breakdown(
        step_time_s=end_s - start_s,
        **{f"{part}_s": parts[part] for part in (*_COMPUTE, "launch_gaps")},
        comm_exposed_s=sum((exposed[axis] for axis in reported_axes if axis not in waiting), 0.0),
        bubble_s=sum((exposed[axis] for axis in reported_axes if axis in waiting), 0.0),
        comm_hidden_s=sum(hidden.values(), 0.0),
        comm_by_axis=[
            AxisTime(axis=axis, exposed_s=None if axis in waiting else exposed[axis], hidden_s=hidden[axis])
            for axis in reported_axes
        ],
    )


def _place(axis: str | None) -> tuple[int, str]:
    """Sort key of an axis among those that share a moment. Axes that may be waited for come last."""
    known = _INNERMOST_FIRST.index(axis) if axis in _INNERMOST_FIRST else len(_INNERMOST_FIRST)
    return known, axis or ""
