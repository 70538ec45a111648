"""One figure measured by a probe, and the sizes of a probe's tests. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProbeKind = Literal["check", "probe"]
"""check: takes seconds, runs at the start of every pilot. probe: takes minutes, measures everything (``python -m sweep
probe``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value with the conditions under which it was measured. A field is None where it does not apply or is
    not known.

    ``docs/probe.md`` lists the kinds and names with their fields.
    """

    kind: str
    name: str
    value: float
    unit: str
    spread: float | None = None
    """Standard deviation of the repeats, divided by their mean."""
    repeats: int | None = None
    rows: int | None = None
    columns: int | None = None
    inner: int | None = None
    """``rows``, ``columns``, ``inner``: sizes of a product [rows, inner] x [inner, columns]."""
    bytes: int | None = None
    """Bytes as `workloads.costs.traffic.sent` counts them: the whole gathered, or not yet scattered, buffer of one
    rank."""
    group_size: int | None = None
    placement: str | None = None
    """inside_node, between_nodes (one rank of each node), or mixed (several ranks of several nodes)."""
    tp: int | None = None
    dp: int | None = None
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    seq_len: int | None = None
    recompute: str | None = None
    num_layers: int | None = None
    world_size: int | None = None
    beside: str | None = None
    """Operation that ran at the same time."""
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    """``sm_clock_mhz``, ``power_w``, ``temperature_c``: state of the device during the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and durations of a probe's tests."""

    seconds: float
    """Seconds of each test. The first test is preceded by a warm-up of the same length: power and clocks settle in a
    second."""
    layer_seconds: float
    tokens: tuple[int, ...]
    """Numbers of rows of the matrix products."""
    micro_batches: tuple[int, ...]
    seq_len: int
    short_seq_len: int
    """Sequence length so short that the step is host-bound."""
    host_rounds: int
    """Micro-batches per step in the host's test. With only one, a layer took 40 % longer on an H200's host than in the
    middle of a real step: the processor's caches are cold after the optimizer."""
    copy_bytes: int
    collective_bytes: tuple[int, ...]
    """Sizes of collectives inside a node."""
    network_bytes: tuple[int, ...]
    """Sizes of collectives between nodes: twice as many, because a network need not follow two numbers."""
    moments: int
    """How often collectives between nodes are timed, each time with new connections, which reach different rates."""
    check_matmul: int
    """Side of the square product of a check."""
    check_bytes: int
    optimizer_params: int


MIB = 2**20
ON_GPU = Sizes(
    seconds=0.12,
    layer_seconds=0.8,
    tokens=(1024, 2048, 4096, 8192, 16384),
    micro_batches=(1, 2, 4),
    seq_len=4096,
    short_seq_len=64,
    host_rounds=8,
    copy_bytes=1024 * MIB,
    collective_bytes=tuple(2**exponent for exponent in range(16, 30, 2)),
    network_bytes=tuple(2**exponent for exponent in range(16, 29)),
    moments=3,
    check_matmul=8192,
    check_bytes=256 * MIB,
    optimizer_params=2**28,
)
ON_CPU = Sizes(
    seconds=0.0,
    layer_seconds=0.0,
    tokens=(16, 32),
    micro_batches=(1,),
    seq_len=32,
    short_seq_len=16,
    host_rounds=1,
    copy_bytes=2**16,
    collective_bytes=(2**10, 2**14),
    network_bytes=(2**10, 2**14),
    moments=1,
    check_matmul=64,
    check_bytes=2**16,
    optimizer_params=2**12,
)
"""Sizes for tests and demos on a CPU; their figures are no basis for predictions."""


def sizes_of(device: str) -> Sizes:
    return ON_GPU if device == "cuda" else ON_CPU
