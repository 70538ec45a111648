"""The devices of this machine, and how to wait until their memory is free again between two points.

All questions go to NVML, the driver's management library, because a process that has touched CUDA cannot fork ranks
that use it. NVML leaves a thread behind even when it is shut down, and a process with threads must not fork either. So
each question to NVML is asked in a short-lived child process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from results.errors import UltrasweepError
from results.text.numbers import GIB, MIB, format_bytes

FREE_SLACK_BYTES = 256 * MIB
"""Bytes that the driver may use above the level before the first point: its own buffers grow with the first use."""
_POLL_S = 0.01
_ANSWER_LIMIT_S = 60.0
"""Seconds after which a driver that has not answered is taken to hang."""


class DeviceUnavailable(UltrasweepError):
    """Requested devices are missing, or the driver does not answer."""


class Devices(Protocol):
    """The devices of one machine, as an agent uses them."""

    @property
    def ids(self) -> tuple[str, ...] | None:
        """UUIDs in the format of ``CUDA_VISIBLE_DEVICES``; None for CPU processes."""

    def notes(self) -> list[str]:
        """One line for people about each device whose memory was in use before the first point."""

    def wait_until_free(self, count: int, limit_s: float, meanwhile: Callable[[], None]) -> str | None:
        """Wait until the memory of the first ``count`` devices is as free as before the first point.

        Returns None when it is, or after ``limit_s`` seconds a line about the devices with memory still in use.
        ``meanwhile`` is called every few milliseconds.
        """


@dataclass(frozen=True, slots=True)
class CpuDevices:
    """CPU processes: their memory is free as soon as they have ended."""

    ids: None = None

    def notes(self) -> list[str]:
        return []

    def wait_until_free(self, count: int, limit_s: float, meanwhile: Callable[[], None]) -> str | None:
        return None


class CudaDevices:
    """The GPUs that this process may use, in the order of its ranks."""

    def __init__(self, num_devices: int) -> None:
        """Raises `DeviceUnavailable` without a driver, or with fewer devices than ``num_devices``."""
        seen = _in_child(_read_devices, _ANSWER_LIMIT_S, lambda: None)
        if len(seen) < num_devices:
            raise DeviceUnavailable(
                f"num_devices={num_devices} GPUs were asked for; this machine shows {len(seen)}{_why_so_few(seen)}. "
                f"Set launcher.num_devices={max(1, len(seen))} or device=cpu"
            )
        self._seen = seen[:num_devices]
        self.ids: tuple[str, ...] | None = tuple(device["id"] for device in self._seen)

    def notes(self) -> list[str]:
        return [
            f"GPU {index} already holds {format_bytes(device['used'], 2)} of memory{_pids(device['pids'])}; "
            "points on it will have that much less"
            for index, device in enumerate(self._seen)
            if device["used"] > GIB
        ]

    def wait_until_free(self, count: int, limit_s: float, meanwhile: Callable[[], None]) -> str | None:
        levels = {device["id"]: device["used"] for device in self._seen[:count]}
        try:
            busy = _in_child(lambda: _wait(levels, limit_s), limit_s + _ANSWER_LIMIT_S, meanwhile)
        except DeviceUnavailable as error:
            return str(error)
        if not busy:
            return None
        index = {device["id"]: number for number, device in enumerate(self._seen)}
        held = "; ".join(
            f"GPU {index[device['id']]} still holds "
            f"{(device['used'] - levels[device['id']]) / MIB:.0f} MiB{_pids(device['pids'])}"
            for device in busy
        )
        return f"{held} {limit_s:.0f} s after the last process ended"


def open_devices(device: str, num_devices: int) -> Devices:
    """The first ``num_devices`` devices of this machine of the kind ``device`` (``cuda``, ``cpu``). Raises
    `DeviceUnavailable`."""
    return CudaDevices(num_devices) if device == "cuda" else CpuDevices()


def count_cuda_devices() -> int:
    """Number of GPUs that this process may use; 0 without a driver."""
    try:
        return len(_visible_handles(_nvml()))
    except DeviceUnavailable:
        return 0


def _read_devices() -> list[dict[str, Any]]:
    """UUID (``id``), used memory in bytes and pids of every device that this process may use."""
    nvml = _nvml()
    return [_read_device(nvml, handle) for handle in _visible_handles(nvml)]


def _wait(levels: dict[str, int], limit_s: float) -> list[dict[str, Any]]:
    """Wait until each device's used memory has fallen to its level (bytes by UUID). Returns the devices still above
    it."""
    nvml = _nvml()
    handles = [handle for handle in _visible_handles(nvml) if _text(nvml.nvmlDeviceGetUUID(handle)) in levels]
    until = time.monotonic() + limit_s
    while True:
        seen = [_read_device(nvml, handle) for handle in handles]
        busy = [device for device in seen if device["used"] > levels[device["id"]] + FREE_SLACK_BYTES]
        if not busy or time.monotonic() > until:
            return busy
        time.sleep(_POLL_S)


def _read_device(nvml: Any, handle: Any) -> dict[str, Any]:
    try:
        pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except nvml.NVMLError:
        pids = []
    return {
        "id": _text(nvml.nvmlDeviceGetUUID(handle)),
        "used": int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "pids": pids,
    }


def _pids(pids: Sequence[int]) -> str:
    return f" (pids {', '.join(map(str, pids))})" if pids else ""


def _in_child(query: Callable[[], Any], limit_s: float, meanwhile: Callable[[], None]) -> Any:
    """The result of ``query`` (plain data), run in a forked child, so that libraries it loads stay out of this process.

    Raises `DeviceUnavailable` with the child's error, or when it takes longer than ``limit_s`` seconds.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            try:
                answer = {"answer": query()}
            except Exception as error:
                answer = {"error": str(error) or type(error).__name__}
            with os.fdopen(writer, "w") as pipe:
                json.dump(answer, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    until = time.monotonic() + limit_s
    text = b""
    try:
        while time.monotonic() < until:
            ready, _, _ = select.select([reader], [], [], _POLL_S)
            if ready:
                if not (chunk := os.read(reader, 65_536)):
                    break
                text += chunk
            meanwhile()
    finally:
        os.close(reader)
        _kill_and_reap(pid)
    try:
        reply = json.loads(text)
    except ValueError:
        raise DeviceUnavailable(f"the NVIDIA driver did not answer within {limit_s:.0f} s") from None
    if "error" in reply:
        raise DeviceUnavailable(reply["error"])
    return reply["answer"]


def _nvml() -> Any:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceUnavailable(
            f"device=cuda needs NVIDIA's driver, and NVML says: {error}; device=cpu works"
        ) from None
    return pynvml


def _kill_and_reap(pid: int) -> None:
    """Kill the child and reap it. A child that hangs in the driver, where no signal reaches it, is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 1.0
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(0.001)


def _visible_handles(nvml: Any) -> Sequence[Any]:
    """NVML handles in the order of ``CUDA_VISIBLE_DEVICES``, as Slurm sets it, or in PCI bus order without it."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return every
    by_uuid = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in every}
    visible = []
    for name in (part.strip() for part in asked.split(",")):
        if name.isdigit() and int(name) < len(every):
            visible.append(every[int(name)])
        elif matches := [
            handle for uuid, handle in by_uuid.items() if name.startswith("GPU-") and uuid.startswith(name)
        ]:
            visible.append(matches[0])
        elif (instance := _mig_device(nvml, name)) is not None:
            visible.append(instance)
            break  # CUDA shows a process only one MIG device
        else:
            break  # CUDA does the same: it ignores everything after the first unknown name
    return visible


def _mig_device(nvml: Any, name: str) -> Any | None:
    """The handle of a part of a GPU, such as ``MIG-...``; None for another name, or an unknown one."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name) if name.startswith("MIG-") else None
    except nvml.NVMLError:
        return None


def _why_so_few(seen: Sequence[Mapping[str, Any]]) -> str:
    """What limits the visible devices, in brackets; empty if nothing does."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return ""
    mig = "; a process can use only one MIG device" if any(device["id"].startswith("MIG-") for device in seen) else ""
    return f" (CUDA_VISIBLE_DEVICES={asked}{mig})"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
