"""What ``explain`` says of optimizers and activations on the host: the memory that they need there, and their time."""

from __future__ import annotations

from typing import Any

from results.text.numbers import format_bytes
from workloads.costs.memory.host_activations import activation_bytes, link_bytes, node_host_bytes, rank_host_bytes
from workloads.costs.time.host_update import host_update
from workloads.costs.time.offload_times import added_by_offload
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment


def host_lines(e: Experiment, cluster: ClusterSpec | None) -> list[str]:
    """Lines for an experiment with ``optimizer_offload`` or ``activation_offload``; none for others."""
    return [*_of_activations(e, cluster), *_of_optimizer(e, cluster)]


def _of_activations(e: Experiment, cluster: ClusterSpec | None) -> list[str]:
    if e.activation_offload == "none":
        return []
    held, crossing = max(activation_bytes(e)), link_bytes(e)
    line = (
        f"activations on the host ({e.activation_offload}): {format_bytes(held, 2)} of its memory for the fullest "
        f"rank, {format_bytes(crossing, 2)} over its link a step"
    )
    if cluster is None:
        return [line]
    added = added_by_offload(e, cluster)
    if added is None:
        return [f"{line}; the time of the copies is not known: host.link_bandwidth of {cluster.name} is null"]
    return [f"{line}; what nothing hides of the copies, predicted: {1e3 * added:+,.1f} ms a step"]


def _of_optimizer(e: Experiment, cluster: ClusterSpec | None) -> list[str]:
    if not e.optimizer_offload:
        return []
    also = " (with activations there)" if e.activation_offload != "none" else ""
    share = f"{100 * e.optimizer_offload:g} % of the optimizer on the host{also}"
    rank = f"{share}: {format_bytes(rank_host_bytes(e), 2)} of its memory for the fullest rank"
    if cluster is None:
        return [rank]
    has = cluster.host.memory_bytes
    known = f"of {format_bytes(has)}" if has is not None else "(not checked: host.memory_bytes is not known)"
    node = f"{format_bytes(node_host_bytes(e, cluster.devices_per_node))} {known} on a node of {cluster.name}"
    if (update := host_update(e, cluster)) is None:
        lacks = "device.memory_bandwidth" if cluster.host.link_bandwidth is not None else "host.link_bandwidth"
        return [f"{rank}, {node}", f"the time of its update is not known: {lacks} of {cluster.name} is null"]
    return [
        f"{rank}, {node}",
        f"its update, predicted with the rates of {cluster.name}: moments to the device and back "
        f"{1e3 * update.link_s:,.1f} ms, kernels {1e3 * update.update_s:,.1f} ms; overlapped "
        f"{1e3 * update.streamed_s:,.1f} ms, beside {1e3 * update.device_s:,.1f} ms of the rest: "
        f"{1e3 * update.added_s:+,.1f} ms a step",
    ]


def host_fields(e: Experiment, cluster: ClusterSpec | None) -> dict[str, Any] | None:
    """The same for ``explain --json``; None without either. None inside: not known, or ``update`` without
    ``optimizer_offload``."""
    if not e.optimizer_offload and e.activation_offload == "none":
        return None
    update = host_update(e, cluster) if cluster is not None and e.optimizer_offload else None
    return {
        "cluster": cluster.name if cluster is not None else None,
        "rank_bytes": rank_host_bytes(e),
        "node_bytes": node_host_bytes(e, cluster.devices_per_node) if cluster is not None else None,
        "node_memory_bytes": cluster.host.memory_bytes if cluster is not None else None,
        "activation_bytes": max(activation_bytes(e)),
        "link_bytes": link_bytes(e),
        "copies_exposed_s": added_by_offload(e, cluster) if cluster is not None else None,
        "update": update._asdict() if update is not None else None,
    }
