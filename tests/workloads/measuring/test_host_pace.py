"""The host's pace: measured on GPUs, unknown elsewhere."""

from __future__ import annotations

import time

import pytest
import torch

from workloads.measuring import host_pace
from workloads.probe import layers


def test_on_a_cpu_nothing_is_launched() -> None:
    assert host_pace.launch_s(torch.device("cpu")) is None


def test_the_mean_of_two_moments_is_unknown_where_one_is() -> None:
    assert host_pace.mean_of(2e-5, 4e-5) == pytest.approx(3e-5)
    assert host_pace.mean_of(None, 4e-5) is None and host_pace.mean_of(2e-5, None) is None


@pytest.mark.gpu
def test_a_launch_takes_microseconds_and_leaves_no_memory() -> None:
    device = torch.device("cuda", 0)
    host_pace.launch_s(device)
    before = torch.cuda.memory_allocated(device)
    found = host_pace.launch_s(device)
    assert found is not None and 2e-6 < found < 1e-3
    until = time.monotonic() + 5  # autograd's thread may hold its last gradient for a moment
    while torch.cuda.memory_allocated(device) != before and time.monotonic() < until:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated(device) == before


def test_a_probe_takes_the_middle_of_its_moments() -> None:
    (figure,) = layers.launch_figures([4e-5, None, 9e-5, 5e-5])
    assert (figure.kind, figure.name, figure.value) == ("host", "launch", pytest.approx(5e-5))
    assert figure.repeats == 3 * host_pace.ROUNDS
    assert list(layers.launch_figures([None, None])) == []
