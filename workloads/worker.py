"""Runs one rank of an experiment and writes its measurements to the files of `workloads.contract.protocol`.

A rank is a process forked from a parent that has imported torch but never used CUDA. It ends with ``os._exit``:
destroying a process group is a collective, and the other ranks may be gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import textwrap
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from workloads.adapters.seam import engine_of, set_environment
from workloads.adapters.ultrasweep import Ultrasweep
from workloads.contract import protocol
from workloads.contract.beats import Beat
from workloads.contract.clock import SteadyClock
from workloads.contract.protocol import FailureKind, Phase, RankError, RankResult, Task
from workloads.measuring import host_pace
from workloads.measuring.device import DeviceSampler, identity, nccl_environment, own_device_id, prepare_device
from workloads.measuring.flight import answer_requests
from workloads.measuring.shared_devices import refuse_shared_devices
from workloads.measuring.step import Diverged
from workloads.measuring.transports import record_log, transports_in
from workloads.probe import run as probe
from workloads.rehearse import rehearse
from workloads.spec.errors import UnsupportedByEngine

LEAVE_TOGETHER_S = 5.0
"""Time in seconds that a finished rank waits for its peers before it exits (gloo peers may still be reading from
it)."""


def preload() -> None:
    """Prepare this process to fork ranks: import everything that every rank needs, without touching CUDA.

    Importing this module has imported torch. FSDP imports torch._dynamo when it wraps its first module, whether
    anything is compiled or not. If the import were left to the ranks, it would cost each of them more than a second.

    This function does not call `torch.cuda.is_available()`: a query to the driver is enough to break CUDA in every
    forked process.
    """
    importlib.import_module("torch._dynamo")
    assert not torch.cuda.is_initialized()


@dataclass
class _Progress:
    """Current phase and step of the rank; every change is sent as a heartbeat."""

    beat: Beat
    phase: Phase = "spawn"
    step: int | None = None
    started_at: dict[str, float] = field(default_factory=dict)
    clock: SteadyClock = field(default_factory=SteadyClock)

    def enter(self, phase: Phase, step: int | None = None, *, part: Phase | None = None) -> None:
        """``part``: the part of the run whose time it counts as; None: the phase."""
        self.phase, self.step = phase, step
        self.started_at.setdefault(part or phase, self.clock())
        self.beat(phase, step)


def run_rank(folder: Path, rank: int, local_rank: int, beat: Beat) -> NoReturn:
    """Run one rank of the task in ``folder`` and exit: 0 with a result file, 1 with an error file.

    ``beat`` is called at every change of phase or step, and once more when the error is written.
    """
    progress = _Progress(beat)
    status = 0
    try:
        progress.enter("spawn")
        task = protocol.read_task(folder)
        if task.probe == "check":
            result = probe.check(task, rank, local_rank, progress.enter, progress.started_at)
        elif task.probe == "probe":
            result = _probed(task, folder, rank, local_rank, progress)
        elif task.method == "measured":
            result = _measured(task, folder, rank, local_rank, progress)
        else:
            result = rehearse(task, rank, local_rank, progress.enter, progress.started_at, progress.clock)
        protocol.write_json(protocol.result_path(folder, rank), result)
        progress.enter("teardown")
        if task.method == "measured" and task.experiment.world_size > 1:
            _leave_together(task.experiment.world_size, rank)
        progress.enter("done")
    except BaseException as error:
        status = 1
        text = traceback.format_exc()
        sys.stderr.write(text)
        kind, message = described(error)
        failure = RankError(
            rank=rank,
            phase=progress.phase,
            step=progress.step,
            kind=kind,
            message=message[:4000],
            traceback=text[-8000:],
        )
        try:
            protocol.write_json(protocol.error_path(folder, rank), failure)
            beat(progress.phase, progress.step, failed=True)
        except OSError:
            status = protocol.CANNOT_WRITE
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _probed(task: Task, folder: Path, rank: int, local_rank: int, progress: _Progress) -> RankResult:
    """Runs a probe: measures the device alone, then trains as in a real run, then measures the ranks together. Layouts
    with tensor parallelism are only trained: one layout of a probe measures the rest."""
    if task.experiment.tp > 1:
        return _measured(task, folder, rank, local_rank, progress)
    figures = probe.alone(task, rank, local_rank, progress.enter)
    result = _measured(task, folder, rank, local_rank, progress)
    figures += probe.together(task, rank, local_rank, progress.enter)
    return dataclasses.replace(result, probe=figures)


_OUT_OF_MEMORY = (
    "can't allocate memory",  # torch's CPU allocator
    "CUDA error: out of memory",  # allocations outside torch's caching allocator
    "ALLOC_FAILED",  # cuBLAS, cuDNN
    "'out of memory'",  # NCCL
)


def classify(error: BaseException) -> FailureKind:
    """Kind of a failure, from the error's type, or from its text where an allocator raises a plain RuntimeError."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY):
        return "oom"
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, UnsupportedByEngine):
        return "unsupported"
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in text):
        return "nccl_error"
    return "crash"


def described(error: BaseException) -> tuple[FailureKind, str]:
    """Kind of a failure, and its message.

    Some libraries, such as torch's pipelines, raise a plain RuntimeError from any error that stopped a stage, including
    out of memory. So the first error in the chain of causes that has a known kind determines kind and message. If none
    has, the message joins the first and the last error.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        if (kind := classify(one)) != "crash":
            return kind, _in_words(one)
    return "crash", " because of ".join(dict.fromkeys((_in_words(chain[0]), _in_words(chain[-1]))))


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {textwrap.dedent(str(error)).strip()}"


def _measured(task: Task, folder: Path, rank: int, local_rank: int, progress: _Progress) -> RankResult:
    answer_requests(folder, rank, task.device)
    progress.enter("rendezvous")
    set_environment(task.experiment)
    device = prepare_device(task, local_rank)
    nccl_variables = nccl_environment() if task.device == "cuda" else None
    nccl_log = record_log(protocol.log_path(folder, rank), nccl_variables) if nccl_variables is not None else None
    store = TCPStore(
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
    refuse_shared_devices(store, rank, task.experiment.world_size, own_device_id(device))
    engine = engine_of(task.experiment, rank, device)
    # creates the communicator now, so that its time does not count as build
    dist.all_reduce(torch.ones(1, device=device))
    progress.enter("build")
    engine.build()
    sampler = DeviceSampler(device)

    def announce(step: int, is_warmup: bool) -> None:
        progress.enter("warmup" if is_warmup else "step", step)
        if not is_warmup:
            sampler.start()

    def announce_replay(step: int, is_warmup: bool) -> None:
        progress.enter("replay", step, part="warmup" if is_warmup else "step")
        if not is_warmup:
            sampler.start()

    if isinstance(engine, Ultrasweep):
        engine.before_replay = announce_replay
    pace = host_pace.launch_s(device)
    measurements, traffic = engine.measure(task.measure, announce, task.devices_per_node)
    state = sampler.stop()
    result = RankResult(
        rank=rank,
        coordinates=engine.coordinates,
        steps=sampler.with_clocks(measurements.steps, measurements.timed_spans),
        phase_started_at={**progress.started_at, "teardown": progress.clock()},
        memory_at_peak=measurements.memory_at_peak,
        forward_s=measurements.forward_s,
        backward_s=measurements.backward_s,
        timed_wall_s=measurements.timed_wall_s,
        host_launch_s=host_pace.mean_of(pace, host_pace.launch_s(device)),
        host_lead_s=measurements.host_lead_s,
        routing=measurements.routing,
        cuda_graph=measurements.cuda_graph,
        not_captured=measurements.not_captured,
        shares_memory=measurements.shares_memory,
        host_memory_bytes=measurements.host_memory_bytes,
        device_state=state,
        nccl_environment=nccl_variables,
        nccl_transports=transports_in(nccl_log),
        traffic=traffic,
        **identity(device),
    )
    if not task.measure.profile:
        return result
    protocol.write_json(protocol.result_path(folder, rank), result)  # keeps the result even if the profiler fails
    last = measurements.steps[-1].step
    breakdown, trace = engine.profile(folder, last + 1, lambda step, warm: progress.enter("step", step))
    return dataclasses.replace(result, breakdown=breakdown, trace=trace)


def _leave_together(world_size: int, rank: int) -> None:
    """Wait up to `LEAVE_TOGETHER_S` for the other ranks. The result is written, so a missing or slow peer is not an
    error."""
    store = _get_default_store()
    with contextlib.suppress(RuntimeError):  # rank 0, which hosts the store, may have exited
        store.set(f"measured/{rank}", "")
        store.wait([f"measured/{other}" for other in range(world_size)], timedelta(seconds=LEAVE_TOGETHER_S))
