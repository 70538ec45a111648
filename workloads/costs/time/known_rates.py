"""Rates of a cluster without which the steps of an experiment have no predicted time."""

from __future__ import annotations

from workloads.costs.time.host_update import unknown_rates
from workloads.spec.cluster import ClusterSpec


def absent_rates(cluster: ClusterSpec, precision: str, *, updates_on_host: bool, waits_on_host: bool) -> list[str]:
    """Names of the fields of the cluster file that are null. ``updates_on_host``, ``waits_on_host``: whether part of
    the optimizer, or of the activations, is on the host."""
    device = cluster.device
    absent = [f"device.peak_flops.{precision}"] if device.peak_of(precision) is None else []
    absent += ["device.memory_bandwidth"] if device.memory_bandwidth is None else []
    absent += ["matmul_efficiency"] if cluster.matmul_efficiency is None else []
    of_host = unknown_rates(cluster) if updates_on_host or waits_on_host else []
    return absent + [name for name in of_host if updates_on_host or name == "host.link_bandwidth"]
