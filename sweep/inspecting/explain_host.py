"""What ``explain`` says of an optimizer on the host: the memory that it needs there, and the parts of its update."""

from __future__ import annotations

from typing import Any

from results.text.numbers import format_bytes, listed
from workloads.costs.memory.host import node_host_bytes, rank_host_bytes
from workloads.costs.time.host_update import host_update, unknown_rates
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment


def host_lines(e: Experiment, cluster: ClusterSpec | None) -> list[str]:
    """Lines for an experiment with ``optimizer_offload`` above 0; none for others."""
    if not e.optimizer_offload:
        return []
    share = f"{100 * e.optimizer_offload:g} % of the optimizer on the host"
    rank = f"{share}: {format_bytes(rank_host_bytes(e), 2)} of its memory for the fullest rank"
    if cluster is None:
        return [rank]
    has = cluster.host.memory_bytes
    known = f"of {format_bytes(has)}" if has is not None else "(not checked: host.memory_bytes is not known)"
    node = f"{format_bytes(node_host_bytes(e, cluster.devices_per_node))} {known} on a node of {cluster.name}"
    if (update := host_update(e, cluster)) is None:
        lacks = listed(unknown_rates(cluster) or ["device.memory_bandwidth"])
        return [f"{rank}, {node}", f"the time of its update is not known: {lacks} of {cluster.name} is null"]
    parts = {
        "gradients down": update.down_s,
        "AdamW on the processors": update.update_s,
        "weights up": update.up_s,
    }
    steps = ", ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in parts.items())
    return [
        f"{rank}, {node}",
        f"its update, predicted with the rates of {cluster.name}: {steps}; overlapped {1e3 * update.host_s:,.1f} ms, "
        f"beside {1e3 * update.device_s:,.1f} ms of the rest on the device: {1e3 * update.added_s:+,.1f} ms a step",
    ]


def host_fields(e: Experiment, cluster: ClusterSpec | None) -> dict[str, Any] | None:
    """The same for ``explain --json``; None without ``optimizer_offload``. None inside: not known."""
    if not e.optimizer_offload:
        return None
    update = host_update(e, cluster) if cluster is not None else None
    return {
        "cluster": cluster.name if cluster is not None else None,
        "rank_bytes": rank_host_bytes(e),
        "node_bytes": node_host_bytes(e, cluster.devices_per_node) if cluster is not None else None,
        "node_memory_bytes": cluster.host.memory_bytes if cluster is not None else None,
        "update": update._asdict() if update is not None else None,
    }
