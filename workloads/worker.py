"""A rank's main: one experiment in, measurements out, through the files of `workloads.protocol`.

Called in a process forked from a parent that has imported torch but never touched CUDA. A rank leaves by ``os._exit``:
a process group whose other members are gone cannot be torn down with a collective.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

from workloads import protocol
from workloads.errors import UnsupportedByEngine
from workloads.protocol import Phase, RankError, RankResult, Task

LEAVE_TOGETHER_S = 10.0
"""How long a finished rank waits for its peers before it leaves (gloo peers may still be reading from it)."""


def preload() -> None:
    """Import everything slow. Touches no device and starts no thread, so that the caller may fork afterwards."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.checkpoint

    import workloads.rehearse
    import workloads.step

    if torch.cuda.is_available() and hasattr(torch, "_dynamo"):
        import torch._inductor  # noqa: F401
    assert not torch.cuda.is_initialized()


@dataclass
class _Progress:
    """Where the rank is now; every phase change is a heartbeat."""

    folder: Path
    rank: int
    phase: Phase = "spawn"
    step: int | None = None
    started_at: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        self.phase, self.step = phase, step
        self.started_at.setdefault(phase, time.time())
        protocol.heartbeat(self.folder, self.rank, phase, step)


def run_rank(folder: Path, rank: int, local_rank: int) -> NoReturn:
    """Run one rank of the task in ``folder`` and exit: 0 with a result file, 1 with an error file."""
    progress = _Progress(folder, rank)
    progress.enter("spawn")
    status = 0
    try:
        task = protocol.read_task(folder)
        if task.method == "measured":
            result = _measured(task, rank, local_rank, progress)
        else:
            from workloads.rehearse import rehearse

            result = rehearse(task, rank, local_rank, progress.enter, progress.started_at)
        protocol.write_json(protocol.result_path(folder, rank), result)
        progress.enter("teardown")
        if task.method == "measured":
            _leave_together(task.experiment.world_size, rank)
        progress.enter("done")
    except BaseException as error:
        status = 1
        text = traceback.format_exc()
        sys.stderr.write(text)
        failure = RankError(
            rank=rank,
            phase=progress.phase,
            step=progress.step,
            kind=classify(error),
            message=f"{type(error).__name__}: {error}"[:4000],
            traceback=text[-8000:],
        )
        protocol.write_json(protocol.error_path(folder, rank), failure)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def classify(error: BaseException) -> Literal["oom", "nccl_error", "diverged", "unsupported", "crash"]:
    """Kind of failure, by type where there is one. The texts are those of allocators that raise a plain RuntimeError."""
    import torch

    from workloads.step import Diverged

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if isinstance(error, RuntimeError) and any(
        sign in text for sign in ("can't allocate memory", "CUDA out of memory", "ALLOC_FAILED", "failure 2 'out of memory'")
    ):
        return "oom"
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, UnsupportedByEngine):
        return "unsupported"
    if isinstance(error, torch.distributed.DistError) or "gloo" in text.lower() or "NCCL" in text:
        return "nccl_error"
    return "crash"


def _measured(task: Task, rank: int, local_rank: int, progress: _Progress) -> RankResult:
    import torch
    import torch.distributed as dist

    from workloads.engine.build import build, choose_attention
    from workloads.engine.groups import make_groups
    from workloads.step import measure

    progress.enter("rendezvous")
    device = prepare_device(task, local_rank)
    store = dist.TCPStore(
        task.rendezvous_host,
        task.rendezvous_port,
        task.experiment.world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=task.collective_timeout_s),
        wait_for_workers=False,
    )
    dist.init_process_group(
        "nccl" if task.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=task.experiment.world_size,
        timeout=timedelta(seconds=task.collective_timeout_s),
    )
    groups = make_groups(task.experiment, rank, device)
    dist.all_reduce(torch.ones(1, device=device))  # start the communicator here, so that its cost is not the build's
    progress.enter("build")
    choose_attention(task.experiment.attention)
    engine = build(task.experiment, groups)
    report = DeviceReport(device)
    measurements = measure(engine, task.measure, _announce(progress, report))
    state = report.sampler.stop() if report.sampling else protocol.DeviceState()
    position = groups.position
    return RankResult(
        rank=rank,
        coordinates={**position, "dp": groups.data_rank},
        steps=measurements.steps,
        phase_started_at={**progress.started_at, "teardown": time.time()},
        memory_at_peak=measurements.memory_at_peak,
        forward_s=measurements.forward_s,
        backward_s=measurements.backward_s,
        device_state=state,
        **report.identity(),
    )


class _announce:  # noqa: N801 - reads as the function it is used as
    """Heartbeat before each step; sample the device during the timed ones."""

    def __init__(self, progress: _Progress, report: DeviceReport) -> None:
        self.progress, self.report = progress, report

    def __call__(self, step: int, is_warmup: bool) -> None:
        self.progress.enter("warmup" if is_warmup else "step", step)
        if not is_warmup and not self.report.sampling:
            self.report.sampling = True
            self.report.sampler.start()


class DeviceReport:
    """What this rank's device is, and how it fared."""

    def __init__(self, device: object) -> None:
        import torch

        from workloads.device_state import DeviceSampler

        assert isinstance(device, torch.device)
        self.device = device
        self.device_id: str | None = None
        if device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.device_id = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self.sampler = DeviceSampler(self.device_id or "")
        self.sampling = False

    def identity(self) -> dict[str, object]:
        import torch

        cuda = self.device.type == "cuda"
        properties = torch.cuda.get_device_properties(self.device) if cuda else None
        return {
            "device_memory_bytes": properties.total_memory if properties else None,
            "device_name": properties.name if properties else platform.processor() or platform.machine(),
            "device_id": self.device_id,
            "host": socket.gethostname(),
            "versions": {
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
                "triton": _triton_version(),
                "driver": self.sampler.driver_version,
                "python": platform.python_version(),
            },
        }


def prepare_device(task: Task, local_rank: int) -> object:
    """This rank's `torch.device`. A CPU rank gets the memory its cluster description promises, and no more."""
    import torch

    if task.device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    torch.set_num_threads(task.cpu_threads)
    limit = task.cluster.device.memory_bytes
    if limit is not None:
        used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, hard))
    return torch.device("cpu")


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _leave_together(world_size: int, rank: int) -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"measured/{rank}", "")
    try:
        store.wait([f"measured/{other}" for other in range(world_size)], timedelta(seconds=LEAVE_TOGETHER_S))
    except RuntimeError:
        pass  # a peer is gone or slow; this rank's result is safe and it has nothing more to do
