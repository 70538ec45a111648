"""What is said of a rank's device: samples of its clock, its limits, and the variables that steer NCCL."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from workloads.contract.protocol import DeviceState, StepRecord
from workloads.measuring import device
from workloads.measuring.device import DeviceSampler, clock_between, nccl_environment


def test_clock_of_a_span() -> None:
    samples = [(10.0, 1000.0), (10.2, 1200.0), (10.4, 1800.0)]
    assert clock_between(samples, 9.9, 10.3) == 1100
    assert clock_between(samples, 10.21, 10.25) == 1200, "no sample inside: the nearest"
    assert clock_between(samples, 10.31, 10.35) == 1800
    assert clock_between(samples, 10.7, 10.8) is None, "too far away to say"
    assert clock_between([], 0.0, 1.0) is None


class FakeNVML:
    """A device at 500 W with a limit of 600 W, whose clock rises with every look at it."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

    def __init__(self, knows_limit: bool = True) -> None:
        self.clock, self.knows_limit = 900, knows_limit

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> float:
        return 500e3 * time.perf_counter()

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        if not self.knows_limit:
            raise self.NVMLError("not supported")
        return 600_000

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        self.clock += 100
        return self.clock

    def nvmlDeviceGetTemperature(self, handle: Any, kind: int) -> int:
        return 50

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 0x4


def sampler(nvml: FakeNVML) -> DeviceSampler:
    made = DeviceSampler(torch.device("cpu"))
    made._nvml, made._handle = nvml, object()
    return made


def test_samples_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SAMPLE_EVERY_S", 0.01)
    looking = sampler(FakeNVML())
    looking.start()
    start = time.perf_counter()
    time.sleep(0.1)
    end = time.perf_counter()
    state = looking.stop()
    assert state.power_w == pytest.approx(500, rel=0.01)
    assert state.power_limit_w == 600
    assert state.throttle_reasons == "sw_power_cap"
    steps = [StepRecord(step=step, is_warmup=step == 0, step_time_s=0.1) for step in range(3)]
    middle = (start + end) / 2
    spans = {1: (start, middle), 2: (middle, end)}
    none, early, late = (step.sm_clock_mhz for step in looking.with_clocks(steps, spans))
    assert none is None, "no span, no clock"
    assert early is not None and late is not None and state.sm_clock_mhz is not None
    assert 900 < early < state.sm_clock_mhz < late


def test_a_device_that_does_not_tell_its_limit() -> None:
    looking = sampler(FakeNVML(knows_limit=False))
    looking.start()
    assert looking.stop().power_limit_w is None


def test_nothing_is_known_of_a_cpu() -> None:
    looking = DeviceSampler(torch.device("cpu"))
    looking.start()
    assert looking.stop() == DeviceState()
    step = StepRecord(step=0, is_warmup=False, step_time_s=1.0)
    assert looking.with_clocks([step], {0: (0.0, 1.0)}) == [step]


def test_nccl_variables_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    conf.write_text("# ours\nNCCL_ALGO=Ring\nNCCL_ALGO=Tree\nNCCL_PROTO=Simple\nOTHER=1\nNCCL_NONSENSE\n")
    for name, value in {"NCCL_CONF_FILE": str(conf), "NCCL_PROTO": "LL128", "TORCH_NCCL_BLOCKING_WAIT": "1"}.items():
        monkeypatch.setenv(name, value)
    found = nccl_environment()
    assert (
        found.items()
        >= {
            "NCCL_ALGO": "Ring",  # NCCL sets what is not set yet: the first line counts
            "NCCL_PROTO": "LL128",
            "TORCH_NCCL_BLOCKING_WAIT": "1",
        }.items()
    )
    assert not {"OTHER", "NCCL_NONSENSE"} & set(found)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "absent"))
    assert "NCCL_ALGO" not in nccl_environment()
