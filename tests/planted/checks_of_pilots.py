"""A check of what a search makes of its pilots' checks: a slow machine says nothing of the layouts that ran on it."""

from __future__ import annotations

import dataclasses
from math import exp, log
from typing import Any

import numpy as np
import pytest

from sweep.composing.search_settings import Settings
from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from sweep.searching.checked import BETWEEN, CHECKS, COPY, INSIDE, MATMUL, Checks
from sweep.searching.session import Session
from tests.planted.plant import Fault, planted
from tests.pool import Pool
from tests.sweep.searching.spaces import space
from tests.workloads.costs.shapes import LLAMA_8B
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

CLUSTER = read_clusters()["h100_efa"]
ONE_NODE, TWO_NODES, EIGHT_NODES = (
    Experiment.canonical(model=LLAMA_8B, seq_len=4096, global_batch_size=64, dp=dp, tp=tp)
    for dp, tp in ((2, 4), (4, 4), (16, 4))
)
USUAL: dict[str, float | None] = {MATMUL: 7e14, COPY: 3e12, INSIDE: 4e11}
OF_SIZE = {8: USUAL | {BETWEEN: None}, 16: USUAL | {BETWEEN: 4e10}, 64: USUAL | {BETWEEN: 2e10}}
"""What usual pilots find, by devices: more nodes share more of the network."""


def pilots(pool: Pool, fault: Fault | None) -> None:
    """Runs on slower or faster devices are expected to take what a cluster file with their rates predicts, and teach a
    search the same as runs on usual ones."""
    del pool  # nothing is run
    with planted(fault):
        _usual_runs_are_as_predicted()
        _slower_runs_are_as_on_a_slower_cluster()
        _slow_pilots_teach_the_same()


def _row(one: Experiment, **shares: float) -> dict[str, Any]:
    """A run's row, of a pilot with these shares of the usual rates."""
    usual = OF_SIZE[one.world_size]
    return {"world_size": one.world_size} | {
        name: None if (rate := usual[name]) is None else rate * shares.get(name, 1.0) for name in CHECKS
    }


def _usual_runs_are_as_predicted() -> None:
    """Usual is what most runs on as many devices found, give or take the noise of a check."""
    sizes = {ONE_NODE: 5, TWO_NODES: 3, EIGHT_NODES: 7}
    rows = [(one, _row(one)) for one, count in sizes.items() for _ in range(count)]
    noisy = [(one, _row(one, **dict.fromkeys(CHECKS, share))) for one in sizes for share in (0.98, 1.02)]
    fast = _row(ONE_NODE, **{MATMUL: 1.2})
    checks = Checks(CLUSTER, [fast, *(row for _, row in (*rows, *noisy))])
    assert all(checks.probed(row, one) == 0.0 for one, row in (*rows, *noisy))
    assert checks.probed(fast, ONE_NODE) < -0.02
    assert checks.probed(dict.fromkeys(CHECKS) | {"world_size": 8}, ONE_NODE) == 0.0, "a pilot that did not check"


def _slower_runs_are_as_on_a_slower_cluster() -> None:
    """Each rate by itself, on a layout that feels it, against a cluster that is described with half of it."""
    device, inside, between = CLUSTER.device, CLUSTER.intra_node, CLUSTER.inter_node
    assert CLUSTER.matmul_efficiency is not None and device.memory_bandwidth is not None and between is not None
    halved: dict[str, tuple[Experiment, dict[str, Any]]] = {
        MATMUL: (ONE_NODE, {"matmul_efficiency": CLUSTER.matmul_efficiency / 2}),
        COPY: (ONE_NODE, {"device": dataclasses.replace(device, memory_bandwidth=device.memory_bandwidth / 2)}),
        INSIDE: (ONE_NODE, {"intra_node": dataclasses.replace(inside, bandwidth=inside.bandwidth / 2)}),
        BETWEEN: (TWO_NODES, {"inter_node": dataclasses.replace(between, bandwidth=between.bandwidth / 2)}),
    }
    for name, (one, described) in halved.items():
        slow = _row(one, **{name: 0.5})
        found = Checks(CLUSTER, [*[_row(one)] * 3, slow]).probed(slow, one)
        expected = log(_step_s(dataclasses.replace(CLUSTER, **described), one) / _step_s(CLUSTER, one))
        assert expected > 0.01, f"{name}: this layout does not feel it"
        assert found == pytest.approx(expected)


def _step_s(cluster: ClusterSpec, one: Experiment) -> float:
    (time,) = Forecast.of(cluster).times([one])
    assert time is not None
    return time.step_time_s


def _slow_pilots_teach_the_same() -> None:
    """Two searches are told of the same runs, one of them with every second one on a pilot of 0.4 more or less."""
    candidates, truth = space(cells=1)
    usual, mixed = (Session(candidates, Settings()) for _ in range(2))
    for number, one in enumerate(range(0, 20, 2)):
        probed = (0.0, 0.4, 0.0, -0.4)[number % 4]
        for session, slower in ((usual, 0.0), (mixed, probed)):
            session.expect(one)
            session.tell(one, "ok", exp(float(truth[one]) + slower), slower)
    ran = np.isfinite(usual.seen.residual)
    assert np.allclose(usual.seen.residual[ran], (truth - candidates.log_time)[ran])
    assert np.allclose(mixed.seen.residual[ran], usual.seen.residual[ran])
    assert np.allclose(*([one.off / one.spread for one in of.seen.surprises] for of in (mixed, usual)))
