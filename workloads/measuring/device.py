"""Prepares the device of one rank, identifies it, and samples its power, clocks and temperature (NVML)."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from workloads.contract.protocol import DeviceState, StepRecord, Task

SAMPLE_EVERY_S = 0.2
"""Seconds between two samples of clocks, temperature and throttle reasons."""
_REASONS = {
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""NVML clock event reasons, without 0x1 (idle)."""


class Identity(TypedDict):
    """Fields of `workloads.contract.protocol.RankResult` that describe a rank's device, host and software."""

    device_memory_bytes: int | None
    device_name: str | None
    device_id: str | None
    host: str | None
    versions: dict[str, str | None]


def prepare_device(task: Task, local_rank: int) -> torch.device:
    """Select this rank's device. A CPU rank can allocate only as much memory as its cluster file states."""
    torch.set_num_threads(task.cpu_threads)
    if task.device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    limit = task.cluster.device.memory_bytes
    if limit is not None:
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_pages * resource.getpagesize() + limit, hard))
    return torch.device("cpu")


def identity(device: torch.device) -> Identity:
    """The device, the host and the versions of the software that this rank runs on."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Identity(
        device_memory_bytes=properties.total_memory if properties else None,
        device_name=properties.name if properties else platform.processor() or platform.machine(),
        device_id=_device_id(device),
        host=socket.gethostname(),
        versions={
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": _nccl_version() if properties else None,
            "triton": _triton_version(),
            "driver": DeviceSampler(device).driver_version,
            "python": platform.python_version(),
        },
    )


def own_device_id(device: torch.device) -> str | None:
    """``GPU-`` and the UUID of a device; None for a CPU, and for a part of a GPU (MIG), which has the whole's."""
    if device.type != "cuda" or " MIG " in torch.cuda.get_device_properties(device).name:
        return None
    return _device_id(device)


def _device_id(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def nccl_environment() -> dict[str, str]:
    """Environment variables in effect for NCCL and torch's use of it, by name.

    A variable that is not set in the environment is read from the user's file (``NCCL_CONF_FILE``, else
    ``~/.nccl.conf``), then from ``/etc/nccl.conf``, as NCCL does (NCCL's documentation, "Environment Variables").
    """
    names = ("NCCL_", "TORCH_NCCL_")
    values = dict(_assignments(Path("/etc/nccl.conf")))
    with contextlib.suppress(RuntimeError):  # a user without a home directory
        values |= _assignments(Path(os.environ.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf"))
    values |= os.environ
    return {name: value for name, value in sorted(values.items()) if name.startswith(names)}


def _assignments(path: Path) -> Iterator[tuple[str, str]]:
    """``NAME=value`` lines of a file; empty if the file cannot be read. If a name is repeated, its first line is the
    last one returned, so that it wins in a dict."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in reversed(lines):
        name, assigned, value = line.partition("=")
        if assigned and not name.startswith("#"):
            yield name, value


def clock_between(samples: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """Mean in MHz of the samples (time, MHz) from ``start`` to ``end``. If there are none, the nearest sample, provided
    it is at most `SAMPLE_EVERY_S` away; otherwise None."""
    inside = [mhz for at, mhz in samples if start <= at <= end]
    if inside:
        return statistics.fmean(inside)
    away, mhz = min(((max(start - at, at - end), mhz) for at, mhz in samples), default=(SAMPLE_EVERY_S, None))
    return mhz if away <= SAMPLE_EVERY_S else None


class DeviceSampler:
    """Samples a GPU in a thread between ``start()`` and ``stop()``. Without NVML all values of the result are None."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        self._clocks: list[tuple[float, float]] = []
        """(seconds of `time.perf_counter`, MHz)"""
        self._temperatures: list[float] = []
        self._reasons: int | None = None
        self._started = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._energy_start: tuple[float, float] | None = None
        device_id = _device_id(device)
        if device_id is None:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(device_id)
            self._nvml = pynvml
        except pynvml.NVMLError:
            self._handle = None  # without NVML all values are None

    @property
    def driver_version(self) -> str | None:
        if self._nvml is None:
            return None
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None

    def start(self) -> None:
        """Start sampling; a second call does nothing."""
        if self._handle is not None and not self._started:
            self._started = True
            self._energy_start = self._energy()
            self._thread.start()

    def stop(self) -> DeviceState:
        if not self._started:
            return DeviceState()
        self._stop.set()
        self._thread.join()
        power = None
        end = self._energy()
        if self._energy_start is not None and end is not None and end[0] > self._energy_start[0]:
            power = (end[1] - self._energy_start[1]) / (end[0] - self._energy_start[0])
        return DeviceState(
            power_w=power,
            power_limit_w=self._power_limit_w(),
            sm_clock_mhz=statistics.fmean(mhz for _, mhz in self._clocks) if self._clocks else None,
            temperature_c=max(self._temperatures, default=None),
            throttle_reasons=None
            if self._reasons is None
            else ",".join(name for bit, name in _REASONS.items() if self._reasons & bit),
        )

    def now(self) -> dict[str, float | None]:
        """``sm_clock_mhz``, ``power_w`` and ``temperature_c`` at this moment; None for unknown values."""
        values: dict[str, float | None] = dict.fromkeys(("sm_clock_mhz", "power_w", "temperature_c"))
        if self._handle is None:
            return values
        nvml, handle = self._nvml, self._handle
        with contextlib.suppress(nvml.NVMLError):
            values["sm_clock_mhz"] = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        with contextlib.suppress(nvml.NVMLError):
            values["power_w"] = float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3
        with contextlib.suppress(nvml.NVMLError):
            values["temperature_c"] = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return values

    def with_clocks(self, steps: Sequence[StepRecord], spans: Mapping[int, tuple[float, float]]) -> list[StepRecord]:
        """Returns the steps with their mean SM clock, if it is known. ``spans``: start and end of steps by number."""
        return [
            replace(step, sm_clock_mhz=clock_between(self._clocks, *spans[step.step])) if step.step in spans else step
            for step in steps
        ]

    def _power_limit_w(self) -> float | None:
        """Power limit in watts that the driver enforces now, whoever set it."""
        try:
            return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None

    def _energy(self) -> tuple[float, float] | None:
        """(seconds, joules) from the device's energy counter; two readings give the exact mean power between them."""
        try:
            return time.perf_counter(), self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def _sample(self) -> None:
        nvml, handle = self._nvml, self._handle
        while not self._stop.wait(SAMPLE_EVERY_S):
            # Each value is queried separately: a device that refuses one query (MIG, virtual GPUs) may answer the
            # others.
            with contextlib.suppress(nvml.NVMLError):
                clock = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
                self._clocks.append((time.perf_counter(), clock))
            with contextlib.suppress(nvml.NVMLError):
                self._temperatures.append(float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)))
            with contextlib.suppress(nvml.NVMLError):
                seen = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
                self._reasons = (self._reasons or 0) | seen
