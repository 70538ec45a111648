"""A stand-in for the engine: ranks whose behaviour is the name of their model. Run as a pilot with ``python -m
tests.launchers.scripted SWEEP_DIR PILOT_ID``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from launchers.pilot import command
from launchers.settings import LaunchSettings
from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import Point
from tests.launchers.processes import rank_pids
from workloads.contract import protocol
from workloads.contract.beats import Beat
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import RankError, RankResult, StepRecord
from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

STEP_S = 0.01
FORGED = "\x1b]0;owned\x07\x1b[2J\x1b[8mthe forged last words"
"""Text with terminal commands: set a title, clear the screen, write invisibly."""


def cluster(**device: Any) -> ClusterSpec:
    return ClusterSpec(
        name="test",
        backend="cpu",
        device=DeviceSpec(**{"name": "cpu", "memory_bytes": 8 * 2**30, **device}),
        devices_per_node=8,
        intra_node=LinkSpec(bandwidth=1e9, latency_s=1e-5),
        inter_node=None,
    )


def settings(**changes: Any) -> LaunchSettings:
    limits = {"spawn": 20.0, "rendezvous": 20.0, "build": 20.0, "warmup": 20.0, "step": 1.0, "teardown": 0.6}
    fields: dict[str, Any] = {
        "num_devices": 2,
        "cluster": cluster(),
        "measure": MeasureSpec(warmup_steps=1, timed_steps=2),
        "phase_limits_s": limits,
        "lease_s": 2.0,
    }
    return LaunchSettings(**{**fields, **changes})


def experiment(behaviour: str = "ok", seed: int = 1, **changes: Any) -> Experiment:
    """Two data-parallel ranks with this behaviour."""
    model = ModelSpec(
        name=behaviour,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=256,
    )
    fields: dict[str, Any] = {"model": model, "dp": 2, "global_batch_size": 4, "seq_len": 32, "seed": seed}
    return Experiment.canonical(**{**fields, **changes})


def points(*behaviours: str, deadline_s: float = 30.0, method: Any = "measured", **changes: Any) -> list[Point]:
    return [
        Point(
            index=index,
            grid="test",
            experiment=experiment(behaviour, seed=index, **changes),
            deadline_s=deadline_s,
            method=method,
        )
        for index, behaviour in enumerate(behaviours)
    ]


def attempt_record(
    number: int, outcome: str = "hang", infrastructure: bool = False, **changes: object
) -> AttemptRecord:
    """The record of an attempt on 8 ranks that took 45 s."""
    fields = {
        "attempt_id": f"a{number}",
        "attempt_number": number,
        "pilot_id": "p",
        "experiment_id": "e",
        "world_size": 8,
        "outcome": outcome,
        "phase": "step",
        "phase_step": 1,
        "failed_rank": 0,
        "evidence": "because",
        "infrastructure": infrastructure,
        "will_retry": False,
        "started_at": 100.0 * number,
        "ended_at": 100.0 * number + 45.0,
    }
    return AttemptRecord(**{**fields, **changes})  # type: ignore[arg-type]


def run_rank(folder: Path, rank: int, local_rank: int, beat: Beat) -> NoReturn:
    """Replaces `workloads.worker.run_rank`. Behaviours that fail do so on rank 1, at the second step."""
    task = protocol.read_task(folder)
    started: dict[str, float] = {}

    def enter(phase: Any, step: int | None = None) -> None:
        started.setdefault(phase, time.time())
        beat(phase, step)

    for phase in ("spawn", "rendezvous", "build"):
        enter(phase)
    behaviour = task.experiment.model.name
    _leave_a_trace(folder, behaviour)
    steps = []
    count = task.measure.steps_of(None)
    for step in range(count):
        warm = step < task.measure.warmup_steps
        enter("warmup" if warm else "step", step)
        if step == 1:
            _misbehave(folder, rank, behaviour, task.experiment.world_size)
        time.sleep({"slow": 30.0, "slowish": 1.0}.get(behaviour, STEP_S))
        steps.append(
            StepRecord(
                step=step,
                is_warmup=warm,
                step_time_s=STEP_S * (1 + rank),
                optimizer_s=STEP_S / 10,
                loss=5.5 - 0.1 * step + (0.2 if behaviour == "wrong" else 0.0),
                grad_norm=1.0,
                peak_allocated_bytes="much" if behaviour == "odd" else 2**30 * (2 + rank),  # type: ignore[arg-type]
                peak_reserved_bytes=2**30 * 4,
                allocator_retries=0,
            )
        )
    print("measured everything")
    started["teardown"] = time.time()
    result = RankResult(
        rank=rank,
        coordinates={"dp": rank, "tp": 0, "cp": 0, "pp": 0},
        steps=steps,
        phase_started_at=started,
        forward_s=0.01,
        backward_s=0.02,
        host=socket.gethostname(),
        device_name="cpu",
    )
    protocol.write_json(protocol.result_path(folder, rank), result)
    enter("teardown")
    if behaviour == "teardown" and rank == 1:
        time.sleep(60)
    enter("done")
    sys.stdout.flush()
    os._exit(0)


def _misbehave(folder: Path, rank: int, behaviour: str, world_size: int) -> None:
    if (
        behaviour in ("oom", "raises", "forges", "killed", "hangs", "first_hangs", "disk")
        and rank == 0
        and world_size > 1
    ):
        if behaviour == "first_hangs":
            time.sleep(0.3)
            _fail(folder, rank, "nccl_error", "[gloo/transport] Timed out waiting 300ms for recv operation to complete")
        while behaviour != "hangs" and _alive(folder, 1):
            time.sleep(0.02)
        if behaviour == "hangs":
            time.sleep(60)
        # gloo's error on the remaining ranks when one goes; this error may well come first in time.
        _fail(folder, rank, "nccl_error", "[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4242")
    if behaviour == "oom":
        _fail(folder, rank, "oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB")
    if behaviour == "raises":
        raise_from_here(folder, rank)
    if behaviour == "disk":
        _fail(folder, rank, "crash", "OSError: [Errno 28] No space left on device")
    if behaviour == "forges":
        print(FORGED, flush=True)
        _fail(folder, rank, "crash", f"ValueError: {FORGED}")
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour in ("hangs", "first_hangs"):
        time.sleep(60)
    if behaviour == "silent":
        if rank == 0:
            time.sleep(60)
        os._exit(0)


def raise_from_here(folder: Path, rank: int) -> NoReturn:
    print("about to divide", file=sys.stderr)
    _fail(folder, rank, "crash", "ZeroDivisionError: division by zero")


def _fail(folder: Path, rank: int, kind: Any, message: str) -> NoReturn:
    error = RankError(rank=rank, phase="step", step=1, kind=kind, message=message, traceback="")
    protocol.write_json(protocol.error_path(folder, rank), error)
    os._exit(1)


def _alive(folder: Path, rank: int) -> bool:
    """Whether a rank runs or has not started yet."""
    if protocol.error_path(folder, rank).exists():
        return False
    pid = rank_pids(folder).get(rank)
    return pid is not None or not protocol.log_path(folder, rank).exists()


def _leave_a_trace(folder: Path, behaviour: str) -> None:
    """Compilers start helpers that outlive a rank: one in its session, one that has left it."""
    if behaviour != "litters":
        return
    for number, leave in enumerate((False, True)):
        if os.fork() == 0:
            if leave:
                os.setsid()
            (folder / f"litter_{os.getppid()}_{number}").write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
    while len(list(folder.glob(f"litter_{os.getpid()}_*"))) < 2:
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(command.main(run_rank=run_rank))
