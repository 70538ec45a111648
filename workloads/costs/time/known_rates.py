"""Rates of a cluster without which the steps of an experiment have no predicted time."""

from __future__ import annotations

from workloads.spec.cluster import ClusterSpec


def absent_rates(cluster: ClusterSpec, precision: str, *, uses_host: bool) -> list[str]:
    """Names of the fields of the cluster file that are null. ``uses_host``: whether part of the optimizer, or of the
    activations, is on the host."""
    device = cluster.device
    absent = [f"device.peak_flops.{precision}"] if device.peak_of(precision) is None else []
    absent += ["device.memory_bandwidth"] if device.memory_bandwidth is None else []
    absent += ["matmul_efficiency"] if cluster.matmul_efficiency is None else []
    no_link = uses_host and cluster.host.link_bandwidth is None
    return absent + (["host.link_bandwidth"] if no_link else [])
