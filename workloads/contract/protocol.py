"""The files through which a launcher and the ranks of one attempt communicate. No torch here.

A launcher writes ``task.json``. Rank ``r`` writes ``rank_r.result.json`` as soon as its last step is measured (before
teardown, so that a hang there loses nothing), or ``rank_r.error.json`` when it fails; its output goes to
``rank_r.log``. Every JSON file is written to a temporary name and then renamed. When the attempt's row is written, the
launcher packs the files into one. The current phase and step of a rank are in shared memory
(`workloads.contract.beats`).
"""

from __future__ import annotations

import dataclasses
import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from results.shared_filesystem import packed_folder
from results.shared_filesystem.patience import repeated
from results.shared_filesystem.whole_files import read_text, write_whole
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.probe_figures import Figure, ProbeKind
from workloads.costs.traffic.sent import Traffic
from workloads.spec import experiment as ex
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.hardware.cluster_fields import cluster_from_dict
from workloads.spec.hardware.cluster_fields import to_dict as cluster_to_dict

Phase = Literal["spawn", "rendezvous", "build", "warmup", "replay", "step", "teardown", "done"]
"""``replay``: a warm-up step or timed step that replays a captured one. Profiled steps after it are steps again."""
Method = Literal["measured", "rehearsed", "rehearsed_fake"]
FailureKind = Literal["oom", "nccl_error", "diverged", "unsupported", "crash"]

STACKS_SIGNAL = signal.SIGUSR1
"""Signal on which a rank writes the Python stacks of its threads to its log, even while it hangs inside a
collective."""
FLIGHT_SIGNAL = signal.SIGRTMIN + 1
"""Signal on which a rank writes its last collectives to ``rank_r.flight.json``."""
HOST_WAIT = 0.01
"""A step is host-bound if the host is ahead of its device by less than this share of the step."""


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
    """Ranks per node; ranks fill one node after the other. None: not known."""
    rendezvous_host: str = "127.0.0.1"
    rendezvous_port: int = 0
    probe: ProbeKind | None = None
    """Kind of probe that the ranks run, in addition to or instead of training steps (`workloads.probe`)."""
    collective_timeout_s: float = 120.0
    """Time-out of NCCL and gloo: the ranks of a collective that takes longer fail."""
    cpu_threads: int = 1
    """Intra-op threads of a CPU rank. One on every machine, so that layouts with different numbers of ranks are
    comparable."""


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
    """Mean over the global batch, the same on every rank; without that of modules of multi-token prediction."""
    mtp_loss: float | None = None
    """Mean of the losses of these modules, without their weight; None without any."""
    grad_norm: float | None = None
    """Norm of all gradients; None in a skipped step, where it is not finite."""
    loss_scale: float | None = None
    """Factor by which the gradients of the step were scaled; in fp16 runs only."""
    skipped: bool | None = None
    """Gradients overflowed and nothing was updated; in fp16 runs only."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocator_retries: int | None = None
    sm_clock_mhz: float | None = None
    """Mean SM clock during a timed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtPeak:
    """Device memory of one rank at the moment of its peak, in bytes by category."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTime:
    """Time of one rank's communication along one axis in one step, in seconds."""

    axis: str | None
    """Name as in `workloads.costs.traffic.sent.Traffic.axis`; None: the trace does not say which group a kernel belongs
    to."""
    exposed_s: float | None
    """Time when nothing else ran. None where that time is waiting for other stages, which counts as bubble."""
    hidden_s: float
    """Time that overlaps with compute, or with communication of another axis to which that time is assigned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Parts of the time of one profiled step of one rank, in seconds.

    All parts but ``comm_hidden_s`` add up to ``step_time_s``: each moment is assigned to one part
    (`workloads.engine.observing.breakdown`).
    """

    step_time_s: float
    """Time from the end of the previous step to the end of this one, on the device."""
    matmul_s: float
    attention_s: float
    optimizer_s: float
    memory_bound_s: float
    """All other kernels and copies."""
    comm_exposed_s: float
    bubble_s: float
    """Time spent waiting for other pipeline stages, including the transfer of their messages."""
    launch_gaps_s: float
    """Time when the device was idle."""
    comm_hidden_s: float
    """Sum over the axes."""
    comm_by_axis: list[AxisTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """How evenly a rank's layers with routed experts were loaded, over the ranks of its pipeline stage and all steps.

    Each value is the mean over the layers.
    """

    expert_imbalance: float
    """Token copies of the most loaded expert, divided by the mean over all experts."""
    rank_imbalance: float
    """Token copies of the most loaded expert-parallel rank, divided by the mean over these ranks."""
    load_entropy: float
    """Entropy of the distribution of the load over the experts, divided by that of an even distribution."""
    dropped_share: float
    """Share of all token copies that were dropped for want of capacity."""
    host_waits: float | None = None
    """Number of times the host waited for the device in the last step, for the sizes of exchanged messages, on one
    rank. None in a rehearsal of learned routing, which uses a forced choice of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of the device during the timed steps as NVML reported it; None for values that it did not report."""

    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Measurements of one rank, in ``rank_r.result.json``."""

    rank: int
    coordinates: dict[str, int]
    """``dp``, ``tp``, ``cp``, ``pp`` coordinates of this rank."""
    steps: list[StepRecord]
    phase_started_at: dict[str, float]
    """Unix time at which each phase began on this rank; ``teardown`` begins when the last step ended."""
    memory_at_peak: MemoryAtPeak | None = None
    forward_s: float | None = None
    """Median over the timed steps of the forward time of one micro-batch on this stage, without waiting."""
    backward_s: float | None = None
    stand_ins_forward_s: float | None = None
    """Part of ``forward_s`` taken by copies that stand in for data of other ranks
    (`workloads.engine.observing.stand_ins`). None: not known, or a real run, which has no such copies."""
    stand_ins_backward_s: float | None = None
    timed_wall_s: float | None = None
    """Host time from the launch of the first timed step to the end of the last one."""
    host_launch_s: float | None = None
    """Host time to launch one small operation: mean of a measurement before the steps and one after them
    (`workloads.measuring.host_pace`)."""
    host_lead_s: float | None = None
    """How much later than the host the device finishes a step's last backward, median over timed steps. Near 0: the
    device waited for the host, so the step is host-bound."""
    cuda_graph: str | None = None
    """Whether the timed steps were replays of a captured one: ``step`` or ``none``. None for other engines."""
    not_captured: str | None = None
    """Why they were not, although ``cuda_graph=auto`` allowed it."""
    shares_memory: bool | None = None
    """Whether tensor-parallel products exchanged their tokens through memory that ranks share. None where this engine's
    layouts cannot, and for other engines."""
    host_memory_bytes: int | None = None
    """Memory that this rank's optimizer and activations held on the host. None without any there, and for other
    engines."""
    device_memory_bytes: int | None = None
    device_name: str | None = None
    device_id: str | None = None
    device_state: DeviceState = field(default_factory=DeviceState)
    host: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    """``torch``, ``cuda``, ``nccl``, ``triton``, ``driver``, ``python``."""
    nccl_environment: dict[str, str] | None = None
    """Environment variables that configure NCCL; None where NCCL is not used."""
    nccl_transports: list[str] | None = None
    """Transports of NCCL's connections of this rank (`workloads.measuring.transports`); None where NCCL is not used or
    its log does not show them."""
    traffic: list[Traffic] | None = None
    """Messages that this rank sends in one step, counted in a warm-up step; None where they were not counted."""
    breakdown: Breakdown | None = None
    """Breakdown of a profiled step; only the first rank of every pipeline stage is profiled."""
    trace: str | None = None
    """Name of the trace file in the attempt's folder, if this rank has kept one."""
    routing: RoutingRecord | None = None
    """Load of routed experts; None if this rank holds none."""
    probe: list[Figure] | None = None
    """Figures that a probe has measured on this rank; None in other runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Why one rank failed, in ``rank_r.error.json``."""

    rank: int
    phase: Phase
    step: int | None
    kind: FailureKind
    message: str
    traceback: str


TRACE_ENDING = ".trace.json.gz"
CANNOT_WRITE = 74
"""Exit status of a rank that could not write its error file: the disk is full or the file system is gone (EX_IOERR)."""


def trace_path(folder: Path, rank: int) -> Path:
    """Path of the trace of a rank's profiled steps, which Perfetto (https://ui.perfetto.dev) opens."""
    return folder / f"rank_{rank}{TRACE_ENDING}"


def flight_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.flight.json"


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write a dataclass or plain data as JSON so that a reader sees the whole file or none.

    ``private``: readable by this user alone.
    """
    data = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    write_whole(path, json.dumps(data), private=private)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises `OSError`, or `ValueError` when the file is damaged: not JSON, not
    text, not a regular file, or nested deeper than any file of this project."""
    return _parsed(read_text(path))


def read_attempt_json(path: Path) -> Any:
    """As `read_json`, for a file in the folder of an attempt, which may be packed
    (`results.shared_filesystem.packed_folder`)."""
    return _parsed(repeated(lambda: packed_folder.read_text(path)))


def write_task(folder: Path, task: Task) -> None:
    repeated(lambda: folder.mkdir(parents=True, exist_ok=True))
    plain = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    parts = {"measure": dataclasses.asdict(task.measure), "cluster": cluster_to_dict(task.cluster)}
    write_json(folder / "task.json", {**plain, **parts, "experiment": ex.to_dict(task.experiment)})


def read_task(folder: Path) -> Task:
    data = read_attempt_json(folder / "task.json")
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
    """Path of the last position of every rank, for human readers; written when an attempt did not end by itself."""
    return folder / "heartbeats.json"


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = read_attempt_json(path)
    except FileNotFoundError:
        return None
    return data
