"""Power, clocks, temperature and throttle reasons of one GPU while it is measured, from NVML where it answers."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from workloads.protocol import DeviceState

SAMPLE_EVERY_S = 0.2
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


class DeviceSampler:
    """Samples between ``start()`` and ``stop()`` in a thread. Without NVML, ``stop()`` gives an empty `DeviceState`."""

    def __init__(self, device_id: str) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        self._clocks: list[float] = []
        self._temperatures: list[float] = []
        self._reasons = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._energy_start: tuple[float, float] | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(device_id)
            self._nvml = pynvml
        except Exception:  # no driver, no library, a device NVML does not know: then nothing is known, and null says so
            self._handle = None

    @property
    def driver_version(self) -> str | None:
        return str(self._nvml.nvmlSystemGetDriverVersion()) if self._nvml is not None else None

    def start(self) -> None:
        if self._handle is not None:
            self._energy_start = self._energy()
            self._thread.start()

    def stop(self) -> DeviceState:
        if self._handle is None:
            return DeviceState()
        self._stop.set()
        self._thread.join()
        power = None
        end = self._energy()
        if self._energy_start is not None and end is not None and end[0] > self._energy_start[0]:
            power = (end[1] - self._energy_start[1]) / (end[0] - self._energy_start[0])
        return DeviceState(
            power_w=power,
            sm_clock_mhz=statistics.fmean(self._clocks) if self._clocks else None,
            temperature_c=max(self._temperatures, default=None),
            throttle_reasons=",".join(name for bit, name in _REASONS.items() if self._reasons & bit),
        )

    def _energy(self) -> tuple[float, float] | None:
        """(seconds, joules) from the device's energy counter, which gives exact mean power between two readings."""
        try:
            return time.perf_counter(), self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def _sample(self) -> None:
        nvml = self._nvml
        while not self._stop.wait(SAMPLE_EVERY_S):
            try:
                self._clocks.append(float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)))
                self._temperatures.append(float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)))
                self._reasons |= int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
            except nvml.NVMLError:
                return
