"""The files through which a launcher and the ranks of one attempt talk to each other. No torch here.

A launcher writes ``task.json``; rank ``r`` writes ``rank_r.result.json`` as soon as its last step is measured (before
teardown, so that a hang there loses nothing) or ``rank_r.error.json`` when it fails, and its output to ``rank_r.log``.
Every JSON file appears by temp + rename. Where a rank is now it says in memory (`workloads.contract.beats`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workloads.contract.probe_figures import Figure, ProbeKind
from workloads.costs.traffic.sent import Traffic
from workloads.spec import experiment as ex
from workloads.spec.cluster import ClusterSpec, cluster_from_dict
from workloads.spec.experiment import Experiment

Phase = Literal["spawn", "rendezvous", "build", "warmup", "step", "teardown", "done"]
Method = Literal["measured", "rehearsed", "rehearsed_fake"]
FailureKind = Literal["oom", "nccl_error", "diverged", "unsupported", "crash"]

STACKS_SIGNAL = signal.SIGUSR1
"""A rank answers with the Python stacks of its threads in its log, even while it hangs inside a collective."""
FLIGHT_SIGNAL = signal.SIGRTMIN + 1
"""A rank answers with its last collectives, in ``rank_r.flight.json``."""


FEW_STEPS, MANY_STEPS = 5, 10
SHORT_STEP_S = 1.0
"""A median of many steps is better known, and as long as a step is short they cost little."""
WARM_STEPS, SLOW_STEPS = 2, 1
"""Of a run that ends early because it is slow: steps of warm-up, and timed ones."""
HOST_WAIT = 0.01
"""A host that is ahead of its device by less than this share of a step sets the pace."""
PROFILED_STEPS = 3
"""Steps after the timed ones where a run is profiled: one for the profiler's own start, and two that are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSpec:
    """How a run is measured. Not part of an experiment's identity."""

    warmup_steps: int = 3
    timed_steps: int | None = None
    """None: `MANY_STEPS` where a step takes less than `SHORT_STEP_S`, else `FEW_STEPS`."""
    memory_probe: bool = True
    """Record memory by category at its peak in the last warm-up step, which costs host time in that step only. Needs
    two warm-up steps: in the first one there is no optimizer state yet."""
    profile: bool = False
    """After the timed steps, record `PROFILED_STEPS` more and divide the last one's time among its kernels. On GPUs."""

    slow_step_s: float | None = None
    """Where the faster of the first `WARM_STEPS` steps takes longer, in seconds, `SLOW_STEPS` more are timed and the
    run ends: it is too slow to matter. None: no run is."""

    def is_slow(self, step_time_s: float | None) -> bool:
        """Whether a run with such a step ends early."""
        return self.slow_step_s is not None and step_time_s is not None and step_time_s > self.slow_step_s

    def timed_steps_of(self, step_time_s: float | None) -> int:
        """How many steps are timed where one takes so many seconds; None: that is not known."""
        if self.is_slow(step_time_s):
            return SLOW_STEPS
        if self.timed_steps is not None:
            return self.timed_steps
        return MANY_STEPS if step_time_s is not None and step_time_s < SHORT_STEP_S else FEW_STEPS

    def steps_of(self, step_time_s: float | None) -> int:
        """All steps of a run, those before and after the timed ones included."""
        return self.warmup_steps + self.timed_steps_of(step_time_s) + (PROFILED_STEPS if self.profile else 0)

    @property
    def in_words(self) -> str:
        """Warm-up and timed steps, such as ``3 + 5`` or ``3 + 5 to 10``."""
        timed = f"{FEW_STEPS} to {MANY_STEPS}" if self.timed_steps is None else str(self.timed_steps)
        return f"{self.warmup_steps} + {timed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything a rank needs to know besides its rank."""

    attempt_id: str
    experiment: Experiment
    measure: MeasureSpec
    cluster: ClusterSpec
    method: Method = "measured"
    device: Literal["cuda", "cpu"] = "cpu"
    devices_per_node: int | None = None
    """Ranks fill one node after the other, so many on each; None: not known."""
    rendezvous_host: str = "127.0.0.1"
    rendezvous_port: int = 0
    probe: ProbeKind | None = None
    """What the ranks do besides, or in the place of, training steps (`workloads.probe`)."""
    collective_timeout_s: float = 120.0
    """NCCL's and gloo's time-out: a collective that takes longer makes its ranks fail."""
    cpu_threads: int = 1
    """Intra-op threads of a CPU rank. One on every machine, so that layouts with more or fewer ranks are comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank. Times in seconds, memory in bytes; None where not measurable."""

    step: int
    is_warmup: bool
    step_time_s: float
    forward_backward_s: float | None = None
    reduce_exposed_s: float | None = None
    optimizer_s: float | None = None
    pipeline_idle_s: float | None = None
    loss: float | None = None
    """Mean over the global batch, the same on every rank."""
    grad_norm: float | None = None
    """None in a skipped step: it is not finite."""
    loss_scale: float | None = None
    """By which the step's gradients were scaled; of fp16 runs."""
    skipped: bool | None = None
    """Gradients overflowed, and nothing was updated; of fp16 runs."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocator_retries: int | None = None
    sm_clock_mhz: float | None = None
    """Mean clock during a timed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtPeak:
    """Device memory of one rank at the moment of its peak, in bytes by category."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTime:
    """Time that one rank's communication along one axis took in one step, in seconds."""

    axis: str | None
    """As `workloads.costs.traffic.sent.Traffic.axis`; None: the trace does not say which group a kernel belongs to."""
    exposed_s: float | None
    """Nothing else ran. None where that time is waiting for other stages, which is the bubble."""
    hidden_s: float
    """Beside compute, or beside communication to which the time is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of one profiled step of one rank went, in seconds.

    All but ``comm_hidden_s`` add up to ``step_time_s``: each moment is given to the first of these that ran.
    """

    step_time_s: float
    """From the end of the step before to its own end, on the device."""
    matmul_s: float
    attention_s: float
    optimizer_s: float
    memory_bound_s: float
    """All other kernels and copies."""
    comm_exposed_s: float
    bubble_s: float
    """Waiting for other pipeline stages, the transfer of their messages included."""
    launch_gaps_s: float
    """The device was idle."""
    comm_hidden_s: float
    """Sum over the axes."""
    comm_by_axis: list[AxisTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """How evenly a rank's layers with routed experts were loaded, over the ranks of its pipeline stage and all steps.

    Each is the mean over the layers.
    """

    expert_imbalance: float
    """Copies of tokens of the most loaded expert over the mean of all experts."""
    rank_imbalance: float
    """The same of expert-parallel ranks."""
    load_entropy: float
    """Entropy of the loads' distribution over the experts, over that of an even one."""
    dropped_share: float
    """Of all copies: those dropped for want of capacity."""
    host_waits: float | None = None
    """How often the host waited for the device in the last step, for the sizes of exchanged messages, on one rank. None
    in a rehearsal of learned routing, which takes a forced choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """What NVML reported during the timed steps; None for what it did not report."""

    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank measured, in ``rank_r.result.json``."""

    rank: int
    coordinates: dict[str, int]
    """``dp``, ``tp``, ``cp``, ``pp`` coordinates of this rank."""
    steps: list[StepRecord]
    phase_started_at: dict[str, float]
    """Unix time at which each phase began on this rank; ``teardown`` begins when the last step ended."""
    memory_at_peak: MemoryAtPeak | None = None
    forward_s: float | None = None
    """Median over the timed steps of one micro-batch's forward on this stage, waits excluded."""
    backward_s: float | None = None
    stand_ins_forward_s: float | None = None
    """Of ``forward_s``: copies that stand for what other ranks would send (`workloads.engine.observing.stand_ins`).
    None: not known, or a real run, which has none."""
    stand_ins_backward_s: float | None = None
    timed_wall_s: float | None = None
    """Host time from the launch of the first timed step to the end of the last one."""
    host_launch_s: float | None = None
    """Of the host's time, to launch one small operation: mean of before the steps and after them
    (`workloads.measuring.host_pace`)."""
    host_lead_s: float | None = None
    """How much later than the host the device is through with a step's last backward, the median over timed steps; near
    0: it waited for the host."""
    device_memory_bytes: int | None = None
    device_name: str | None = None
    device_id: str | None = None
    device_state: DeviceState = field(default_factory=DeviceState)
    host: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    """``torch``, ``cuda``, ``nccl``, ``triton``, ``driver``, ``python``."""
    nccl_environment: dict[str, str] | None = None
    """Variables that steer NCCL; None where NCCL is not used."""
    traffic: list[Traffic] | None = None
    """What this rank sends in one step, counted in a warm-up step; None where it was not counted."""
    breakdown: Breakdown | None = None
    """Of the ranks that were profiled: the first one of every pipeline stage."""
    trace: str | None = None
    """Name of the trace's file in the attempt's folder, where this rank has kept one."""
    routing: RoutingRecord | None = None
    """None where this rank holds no routed experts."""
    probe: list[Figure] | None = None
    """What a probe has measured on this rank; None in other runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Why one rank failed, in ``rank_r.error.json``."""

    rank: int
    phase: Phase
    step: int | None
    kind: FailureKind
    message: str
    traceback: str


CANNOT_WRITE = 74
"""Exit status of a rank that could not write its error file: the disk is full or the file system is gone (EX_IOERR)."""


def trace_path(folder: Path, rank: int) -> Path:
    """The profiled steps of a rank, to be opened in Perfetto (https://ui.perfetto.dev)."""
    return folder / f"rank_{rank}.trace.json.gz"


def flight_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.flight.json"


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write a dataclass or plain data as JSON so that a reader sees the whole file or none.

    ``private``: readable by this user alone.
    """
    data = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    # A process on another node may have the same pid, so the name also has a random part.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(data))
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `OSError`, or `ValueError` when it is damaged: no JSON, no text, or nested so
    deep that no program of ours has written it."""
    try:
        return json.loads(path.read_text())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_task(folder: Path, task: Task) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "task.json", task)


def read_task(folder: Path) -> Task:
    data = read_json(folder / "task.json")
    data["experiment"] = ex.from_dict(data["experiment"])
    data["measure"] = MeasureSpec(**data["measure"])
    data["cluster"] = cluster_from_dict(data["cluster"])
    return Task(**data)


def read_result(folder: Path, rank: int) -> RankResult | None:
    data = _read(result_path(folder, rank))
    if data is None:
        return None
    data["steps"] = [StepRecord(**step) for step in data["steps"]]
    if data["memory_at_peak"] is not None:
        data["memory_at_peak"] = MemoryAtPeak(**data["memory_at_peak"])
    data["device_state"] = DeviceState(**data["device_state"])
    if data.get("traffic") is not None:
        data["traffic"] = [Traffic(**sent) for sent in data["traffic"]]
    if data.get("breakdown") is not None:
        axes = [AxisTime(**time) for time in data["breakdown"]["comm_by_axis"]]
        data["breakdown"] = Breakdown(**{**data["breakdown"], "comm_by_axis": axes})
    if data.get("routing") is not None:
        data["routing"] = RoutingRecord(**data["routing"])
    if data.get("probe") is not None:
        data["probe"] = [Figure(**figure) for figure in data["probe"]]
    return RankResult(**data)


def read_error(folder: Path, rank: int) -> RankError | None:
    data = _read(error_path(folder, rank))
    return RankError(**data) if data is not None else None


def result_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.result.json"


def error_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.error.json"


def heartbeats_path(folder: Path) -> Path:
    """Where every rank was last, for people: written when an attempt did not end by itself."""
    return folder / "heartbeats.json"


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        return None
    return data
