"""The stand-in workload: an ordinary pilot whose ranks sleep and fail by script instead of training.

``python tests/slurm/standin.py SWEEP_DIR CONFIG_ID`` is ``python -m launchers.pilot`` with three parts replaced: the
rank's main function, the check of the GPUs (a virtual node has none) and, in tests that need it, the node's clock. All
other modules come from the sweep's own copy of the code, as in every job.

The name of its model sets a rank's behaviour: ``ok``, ``ok_3`` (runs for three seconds), ``oom``, ``raises``,
``killed``, ``hangs``, ``stale``. Points of other models sometimes fail, decided by the experiment's id, so that every
attempt repeats the failure. With a table of answers (`ANSWERS`) every layout is as fast as in the table, or runs out of
memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # run by its path: neighbouring files must not be importable

FAULTS = ("oom", "raises", "killed", "hangs", "stale")
SHARES = {"oom": 0.04, "raises": 0.02, "killed": 0.005}
"""Shares of the points that fail where the model's name sets no behaviour."""
ONE_PROCESS = "STANDIN_ONE_PROCESS"
"""Environment variable: one process represents all ranks of a node, since a point of 512 processes needs many cores."""
FAILING_FILES = "STANDIN_FAILING_FILES"
"""Environment variable: the share of a pilot's own calls on the sweep's files that fail."""
ANSWERS = "STANDIN_ANSWERS"
"""Environment variable: a JSON file with the step time in seconds of every layout, null where it runs out of memory."""
SECONDS = "STANDIN_SECONDS"
"""Environment variable: how long every point runs whose model's name says nothing; none of them fails."""
STEP_S = 0.01
SHARE_OF_STEP, LONGEST_STEP_S = 0.3, 2.0
"""A step of a layout from the table really takes this share of its reported time, and at most so many seconds."""
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """Script of an experiment's ranks."""

    kind: str
    """``ok`` or one of `FAULTS`."""
    steps: int
    warmup_steps: int
    """Number of those steps that are warm-up."""
    lasts_s: float
    """Real seconds of a step."""
    step_time_s: float
    """Reported seconds of a step."""
    beats: bool
    """Whether each step sends a heartbeat; in tests of many short points it does not."""


def shift_clock() -> None:
    """Give this process and its children the clock that the test has set for this node (`Lab.set_clock`)."""
    file = Path(os.environ.get("SLURM_CONF", "/none")).parent / "clock" / socket.gethostname()
    if file.exists():
        real, offset = time.time, float(file.read_text())
        time.time = lambda: real() + offset


class FakeGpus:
    """The GPUs that Slurm claims to have allocated: a virtual node has no real ones to check."""

    def __init__(self, count: int) -> None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        indices = [index for index in given.split(",") if index] or [str(number) for number in range(count)]
        if len(indices) < count:
            from launchers.node.devices import DeviceUnavailable

            raise DeviceUnavailable(f"num_devices={count} GPUs were asked for; Slurm gave {given}")
        host = socket.gethostname()
        self.ids: tuple[str, ...] | None = tuple(f"GPU-{host}-{index}" for index in indices[:count])

    def notes(self) -> list[str]:
        return []

    def wait_until_free(self, count: int, limit_s: float, meanwhile: Callable[[], None]) -> str | None:
        return None


def open_fake(device: str, num_devices: int) -> Any:
    from launchers.node.devices import CpuDevices

    return FakeGpus(num_devices) if device == "cuda" else CpuDevices()


def behaviour(name: str, experiment_id: str) -> tuple[str, float]:
    """Behaviour of an experiment's ranks, and its seconds."""
    kind, _, seconds = name.partition("_")
    if kind == "ok" or kind in FAULTS:
        return kind, float(seconds) if seconds else 0.0
    if SECONDS in os.environ:
        return "ok", float(os.environ[SECONDS])
    dice = int.from_bytes(hashlib.sha256(experiment_id.encode()).digest()[:4]) / 2**32
    for fault, share in SHARES.items():
        if dice < share:
            return fault, 0.0
        dice -= share
    return "ok", 0.0


def layout_key(layout: Any, model: str) -> str:
    """A layout's name in the table of answers."""
    x = layout
    return f"{model} {x.world_size} dp{x.dp} tp{x.tp} pp{x.pp} mbs{x.micro_batch_size} zero{x.zero_stage}"


def script_of(task: Any) -> Script:
    """The script of an experiment. Raises `KeyError` for a layout missing in the table of answers: the rank then
    fails."""
    experiment, measure = task.experiment, task.measure
    if ANSWERS in os.environ:
        answers = json.loads(Path(os.environ[ANSWERS]).read_text())
        return recorded_script(answers[layout_key(experiment, experiment.model.name)], measure)
    kind, seconds = behaviour(experiment.model.name, experiment.id)
    count = measure.steps_of(None)
    lasts_s = max(STEP_S, seconds / count)
    return Script(kind, count, measure.warmup_steps, lasts_s, STEP_S, beats=bool(seconds))


def recorded_script(step_time_s: float | None, measure: Any) -> Script:
    """Script with equal step times; a slow run ends early, as in `workloads.measuring.step.measure`."""
    from workloads.contract.measure_spec import WARM_STEPS

    if step_time_s is None:
        return Script("oom", 2, 2, STEP_S, STEP_S, beats=True)
    warmup = min(WARM_STEPS, measure.warmup_steps) if measure.is_slow(step_time_s) else measure.warmup_steps
    count = warmup + measure.timed_steps_of(step_time_s)
    return Script("ok", count, warmup, min(LONGEST_STEP_S, SHARE_OF_STEP * step_time_s), step_time_s, beats=True)


def run_rank(folder: Path, rank: int, local_rank: int, beat: Any) -> NoReturn:
    """Replaces `workloads.worker.run_rank`. The last rank is the one that fails, at the second step."""
    from workloads.contract import protocol

    task = protocol.read_task(folder)
    script = script_of(task)
    ranks = range(rank, rank + 1)
    if ONE_PROCESS in os.environ:
        ranks = range(rank, min(rank + task.cluster.devices_per_node, task.experiment.world_size))
    started: dict[str, float] = {}
    for phase in ("spawn", "rendezvous", "build"):
        started[phase] = time.time()
    beat("build")
    for step in range(script.steps):
        phase: Any = "warmup" if step < script.warmup_steps else "step"
        started.setdefault(phase, time.time())
        if script.beats or step in (0, 1):
            beat(phase, step)
        if step == 1 and script.kind in FAULTS:
            _fail(folder, ranks, script.kind, task.experiment.world_size)
        _sleep(script.lasts_s, lambda: beat(phase, step))  # noqa: B023
    started["teardown"] = time.time()
    for one in ranks:
        protocol.write_json(protocol.result_path(folder, one), _result(task, script, one, started))
    beat("done")
    os._exit(0)


def _sleep(seconds: float, beat: Callable[[], None]) -> None:
    while seconds > 1:
        time.sleep(1)
        seconds -= 1
        beat()
    time.sleep(seconds)


def _fail(folder: Path, ranks: range, kind: str, world_size: int) -> None:
    gone = folder / "gone"
    if kind == "hangs":
        time.sleep(3600)
    if ranks[-1] != world_size - 1:
        end = time.monotonic() + 60
        while not gone.exists() and time.monotonic() < end:
            time.sleep(0.02)
        _error(folder, ranks, "nccl_error", "[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:42")
    gone.touch()
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "oom":
        _error(folder, ranks, "oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB")
    if kind == "stale":
        _error(folder, ranks, "crash", f"OSError: [Errno 116] Stale file handle: '{folder}'")
    _error(folder, ranks, "crash", "ZeroDivisionError: division by zero")


def _error(folder: Path, ranks: range, kind: Any, message: str) -> NoReturn:
    from workloads.contract import protocol

    for rank in ranks:
        error = protocol.RankError(rank=rank, phase="step", step=1, kind=kind, message=message, traceback="")
        protocol.write_json(protocol.error_path(folder, rank), error)
    os._exit(1)


def _result(task: Any, script: Script, rank: int, started: Mapping[str, float]) -> Any:
    from workloads.contract import protocol
    from workloads.spec.mesh import coordinates

    experiment = task.experiment
    position = coordinates(experiment, rank)
    steps = [
        protocol.StepRecord(
            step=step,
            is_warmup=step < script.warmup_steps,
            step_time_s=script.step_time_s,
            loss=5.5 - 0.1 * step,
            grad_norm=1.0,
            peak_allocated_bytes=2 * GIB,
            peak_reserved_bytes=4 * GIB,
            allocator_retries=0,
        )
        for step in range(script.steps)
    ]
    return protocol.RankResult(
        rank=rank,
        coordinates={**position, "dp": position["dp_replicate"] * experiment.dp_shard + position["dp_shard"]},
        steps=steps,
        phase_started_at=dict(started),
        host=socket.gethostname(),
        device_name=task.cluster.device.driver_names[0] if task.cluster.device.driver_names else "cpu",
    )


def one_process() -> type:
    """Ranks of one node as `launchers.node.agent` starts them. With `ONE_PROCESS` only the first rank is a process of
    its own; the others end when it ends."""
    from launchers.node.fork import RankExit
    from launchers.node.rank_group import LocalRanks

    class NodeOfRanks(LocalRanks):
        def __init__(self) -> None:
            super().__init__()
            self._followers: list[int] = []

        def fork(self, folder: Path, rank: int, local_rank: int, environment: Mapping[str, str], run: Any) -> None:
            if ONE_PROCESS in environment and local_rank > 0:
                self._followers.append(rank)
            else:
                super().fork(folder, rank, local_rank, environment, run)

        def poll(self) -> list[RankExit]:
            exits = super().poll()
            if exits and self._followers:
                exits += [dataclasses.replace(exits[0], rank=rank) for rank in self._followers]
                self._exits.update({exit_.rank: exit_ for exit_ in exits})
                self._followers.clear()
            return exits

    return NodeOfRanks


def fail_files(sweep_dir: str, rate: float) -> None:
    """Make some of this process's calls on files of the sweep fail, as on a failing shared filesystem."""
    path = Path(__file__).resolve().parents[1] / "launchers" / "failing_calls.py"
    spec = importlib.util.spec_from_file_location("failing_calls", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FailingFiles(setattr, Path(sweep_dir), seed=os.getpid(), rate=rate).active = True


def main(argv: list[str] | None = None) -> int:
    """Run as a pilot, or as one of its agents, with the stand-in for its ranks."""
    shift_clock()
    if FAILING_FILES in os.environ and os.environ.get("SLURM_PROCID", "0") == "0":
        fail_files((argv or sys.argv[1:])[0], float(os.environ[FAILING_FILES]))
    from launchers.node import agent, devices
    from launchers.slurm import pilot_job

    devices.open_devices = open_fake
    agent.open_devices = open_fake
    agent.LocalRanks = one_process()
    return pilot_job.main(argv, run_rank=run_rank)


if __name__ == "__main__":
    sys.exit(main())
