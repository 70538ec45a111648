"""Expected slowdown of a run, from what its pilot measured on its nodes before its first point.

The reference is the median over the sweep's runs with as many devices. The check gives the relative speed of matrix
products, copies and both kinds of links; the closed form turns these into the slowdown of the run's layout.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import log
from statistics import median
from typing import Any

from sweep.predicting.forecast import Forecast
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

MATMUL, COPY = "check_matmul_flops", "check_copy_bytes_per_s"
INSIDE, BETWEEN = "check_all_reduce_inside_node_bytes_per_s", "check_all_reduce_between_nodes_bytes_per_s"
CHECKS = (MATMUL, COPY, INSIDE, BETWEEN)
"""Columns of an attempt's row; null if its pilot did not check."""
EQUAL = 0.03
"""Rates of equal nodes differ by up to this share: a rate within it counts as usual."""


class Checks:
    """The checks of a sweep's rows, and the slowdown that they predict for each run."""

    def __init__(self, cluster: ClusterSpec, rows: Iterable[Mapping[str, Any]]) -> None:
        values_by_check: dict[tuple[int, str], list[float]] = defaultdict(list)
        for row in rows:
            for name in CHECKS:
                if row[name]:
                    values_by_check[row["world_size"], name].append(row[name])
        self._usual = {key: median(values) for key, values in values_by_check.items()}
        self._cluster = cluster
        self._forecast: Forecast | None = None

    def probed(self, row: Mapping[str, Any], experiment: Experiment) -> float:
        """Logarithm of the predicted slowdown of this run relative to the usual one; 0 if unknown."""
        shares = {name: row[name] / self._usual[row["world_size"], name] for name in CHECKS if row[name]}
        shares = {name: share for name, share in shares.items() if abs(log(share)) > EQUAL}
        if not shares:
            return 0.0
        if self._forecast is None:
            self._forecast = Forecast.of(self._cluster)
        (usual,) = self._forecast.times([experiment])
        (checked,) = dataclasses.replace(self._forecast, cluster=scaled(self._cluster, shares)).times([experiment])
        return 0.0 if usual is None or checked is None else log(checked.step_time_s / usual.step_time_s)


def scaled(cluster: ClusterSpec, shares: Mapping[str, float]) -> ClusterSpec:
    """The cluster with its rates multiplied by these shares; an unknown rate stays unknown."""

    def times(rate: float | None, name: str) -> float | None:
        return None if rate is None else rate * shares.get(name, 1.0)

    device = dataclasses.replace(cluster.device, memory_bandwidth=times(cluster.device.memory_bandwidth, COPY))
    efficiency = times(cluster.matmul_efficiency, MATMUL)
    slower = dataclasses.replace(cluster, device=device, matmul_efficiency=efficiency)
    return slower.with_scaled_links(inside=shares.get(INSIDE, 1.0), outside=shares.get(BETWEEN, 1.0))
