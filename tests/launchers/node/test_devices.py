"""Devices as reported by NVML: which exist, and when their memory is free."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from launchers.node import devices
from launchers.node.devices import CudaDevices, DeviceUnavailable, open_devices

GIB = 2**30


class FakeNvml:
    """Four GPUs; their used memory may change between two queries."""

    class NVMLError(Exception):
        pass

    instances = 0
    """How many of ``used``, the last ones, are MIG devices."""

    def __init__(self, used: list[list[int]]) -> None:
        self.used = used
        self.looks = [0] * len(used)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used) - self.instances

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaa" if handle < len(self.used) - self.instances else f"MIG-{handle}bbb"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for handle in range(len(self.used)):
            if self.nvmlDeviceGetUUID(handle) == uuid:
                return handle
        raise self.NVMLError("not found")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        values = self.used[handle]
        value = values[min(self.looks[handle], len(values) - 1)]
        self.looks[handle] += 1
        return SimpleNamespace(used=value)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4242)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(used: list[list[int]], visible: str | None = None) -> FakeNvml:
        fake = FakeNvml(used)
        monkeypatch.setattr(devices, "_nvml", lambda: fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return install


@pytest.mark.slow
def test_memory_that_becomes_free_is_waited_for(nvml: Any) -> None:
    fake = nvml([[GIB // 4], [0]])
    cuda = CudaDevices(2)
    fake.used[0] = [*[70 * GIB] * 5, *[30 * GIB] * 5, GIB // 4 + 1000]
    beats: list[int] = []
    assert cuda.wait_until_free(2, 5.0, lambda: beats.append(1)) is None
    assert len(beats) >= 5
    fake.used[0] = [*[70 * GIB] * 5000]
    assert cuda.wait_until_free(2, 0.05, lambda: None) is not None


def test_memory_that_stays_in_use_is_reported_with_size_and_pid(nvml: Any) -> None:
    fake = nvml([[0], [0]])
    cuda = CudaDevices(2)
    fake.used[1] = [12 * GIB]
    held = cuda.wait_until_free(2, 0.05, lambda: None)
    assert held == "GPU 1 still holds 12288 MiB (pids 4242) 0 s after the last process ended"


def test_only_the_devices_of_the_point_must_be_free(nvml: Any) -> None:
    fake = nvml([[0], [0]])
    cuda = CudaDevices(2)
    fake.used[1] = [12 * GIB]
    assert cuda.wait_until_free(1, 0.05, lambda: None) is None


def test_memory_of_other_programs_is_reported_and_does_not_block_the_sweep(nvml: Any) -> None:
    nvml([[3 * GIB]])
    cuda = CudaDevices(1)
    assert cuda.notes() == ["GPU 0 already holds 3.00 GiB of memory (pids 4242); points on it will have that much less"]
    assert cuda.wait_until_free(1, 0.05, lambda: None) is None


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ("GPU-0aaa", "GPU-1aaa", "GPU-2aaa", "GPU-3aaa")),
        ("2,0", ("GPU-2aaa", "GPU-0aaa")),
        ("GPU-3aaa,GPU-1", ("GPU-3aaa", "GPU-1aaa")),
        ("1,9,2", ("GPU-1aaa",)),
    ],
)
def test_devices_are_those_that_the_scheduler_gave_in_its_order(
    nvml: Any, visible: str | None, ids: tuple[str, ...]
) -> None:
    nvml([[0]] * 4, visible)
    assert CudaDevices(len(ids)).ids == ids


def test_a_mig_device_is_one_device(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process only the first one of several."""
    monkeypatch.setattr(FakeNvml, "instances", 2)
    for visible in ("MIG-2bbb", "MIG-2bbb,MIG-1bbb"):
        nvml([[0], [GIB], [0]], visible)
        assert CudaDevices(1).ids == ("MIG-2bbb",)
    with pytest.raises(DeviceUnavailable, match=r"this machine shows 1 \(CUDA_VISIBLE_DEVICES=MIG-2bbb,MIG-1bbb; a "):
        CudaDevices(2)
    nvml([[0], [0], [0]], "MIG-unknown")
    with pytest.raises(DeviceUnavailable, match=r"this machine shows 0 \(CUDA_VISIBLE_DEVICES=MIG-unknown\)\. Set"):
        CudaDevices(1)


def test_devices_that_are_not_there_are_refused(nvml: Any) -> None:
    def broken() -> None:
        raise DeviceUnavailable("needs a driver")

    nvml([[0]], "")
    with pytest.raises(DeviceUnavailable, match="needs a driver"):
        devices._in_child(broken, 5.0, lambda: None)
    with pytest.raises(DeviceUnavailable, match="did not answer within 0 s"):
        devices._in_child(lambda: time.sleep(30), 0.05, lambda: None)
    with pytest.raises(DeviceUnavailable, match="num_devices=8 GPUs were asked for; this machine shows 0"):
        open_devices("cuda", 8)
    assert open_devices("cpu", 8).ids is None
