"""What a network adds to a step whose hosts launch its work ahead."""

from __future__ import annotations

import numpy as np
import pytest

from workloads.predict.crossing import Added


def step(one_node: float, device: float, during: float, after: float) -> float:
    added = Added(np.array([during]), np.array([after]))
    return float(added.step_s(np.array([one_node]), np.array([device]))[0])


def test_a_network_adds_to_devices_and_hides_hosts() -> None:
    assert step(1.0, 1.0, 0.5, 0.0) == pytest.approx(1.5), "device-bound: all of it"
    assert step(1.0, 0.1, 0.5, 0.0) == pytest.approx(1.0, abs=0.02), "host-bound: the host launches meanwhile"
    assert step(1.0, 0.1, 9.0, 0.0) == pytest.approx(9.1, abs=0.02), "a host is as hidden as the network is slow"
    assert step(1.0, 0.1, 0.0, 0.5) == pytest.approx(1.5), "reductions after the last work launched"


def test_rows_across_nodes_teach_what_is_left_of_them() -> None:
    for one_node, device, during, after in ((1.0, 1.0, 0.4, 0.2), (1.0, 0.3, 0.1, 0.2)):
        measured = np.array([step(one_node, device, during, after)])
        added = Added(np.array([during]), np.array([after]))
        left = added.one_node_s(measured, np.array([one_node]), np.array([device]))
        assert left.tolist() == [pytest.approx(one_node)]
    # Mostly network; and a host-bound step as long as the device and the network take without it.
    for one_node, device, during, measured_s in ((1.0, 1.0, 3.0, 4.0), (1.0, 0.5, 0.45, 1.0)):
        added = Added(np.array([during]), np.array([0.0]))
        left = added.one_node_s(np.array([measured_s]), np.array([one_node]), np.array([device]))
        assert np.isnan(left).all()
