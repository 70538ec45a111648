"""Time of a collective: start-up plus bytes over bandwidth, by where its ranks stand.

A group of ``n`` ranks that are ``stride`` apart has ``l`` members in each node and spans ``k = n / l`` nodes. One ring
through all of them (NCCL's) crosses a node's boundary with as many links as it has members there, so

    bus bandwidth      B = min(intra, l * inter)                     (intra alone when k = 1)
    start-up of a ring a = (n - k) * intra latency + k * inter latency   (n - 1 hops when k = 1)

    all-gather, reduce-scatter   a + (n-1)/n * S / B
    all-reduce                   min(2 a + 2 (n-1)/n * S / B  [ring],  2 t + 2 S / B  [double tree, t by depth])
    all-to-all                   a + max(S * (l-1)/n / intra, S * (n-l)/n / inter)
    point to point               latency + S / bandwidth of the slowest hop of the group

S is the size in bytes of the whole (gathered, or not yet scattered) buffer of one rank, and bus bandwidth is meant as
in nccl-tests (its doc/PERFORMANCE.md derives the factors (n-1)/n and 2 (n-1)/n). Bandwidths are per device
(`LinkSpec`), so groups that run side by side on one node's devices do not slow one another.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Literal, get_args

from workloads.cluster import ClusterSpec, LinkSpec
from workloads.errors import InfeasibleLayout

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


def members_per_node(group_size: int, stride: int, devices_per_node: int) -> int:
    """The most members of a group that one node holds: ranks fill one node after the other."""
    return min(group_size, max(1, devices_per_node // stride))


def collective_time_s(op: Collective, bytes: float, group_size: int, stride: int, cluster: ClusterSpec) -> float:
    """Seconds of one collective over ``group_size`` ranks that are ``stride`` apart; 0 for a group of one.

    Raises `InfeasibleLayout` where the group leaves a node of a cluster that has no link between nodes, ValueError for
    an unknown ``op``.
    """
    if group_size == 1:
        return 0.0
    n = group_size
    local = members_per_node(n, stride, cluster.devices_per_node)
    nodes = ceil(n / local)
    intra = cluster.intra_node
    inter = intra if nodes == 1 else _between_nodes(cluster, n, stride)
    if op == "p2p":
        return inter.latency_s + bytes / inter.bandwidth
    if nodes == 1:
        startup, bandwidth = (n - 1) * intra.latency_s, intra.bandwidth
    else:
        startup = (n - nodes) * intra.latency_s + nodes * inter.latency_s
        # Where a node holds one member, the ring never uses the link inside a node.
        bandwidth = min(intra.bandwidth, local * inter.bandwidth) if local > 1 else inter.bandwidth
    share = (n - 1) / n
    if op in ("all_gather", "reduce_scatter"):
        return startup + share * bytes / bandwidth
    if op == "all_reduce":
        depth = ceil(log2(local)) * intra.latency_s + (ceil(log2(nodes)) * inter.latency_s if nodes > 1 else 0.0)
        ring = 2 * startup + 2 * share * bytes / bandwidth
        return min(ring, 2 * depth + 2 * bytes / bandwidth)
    if op == "all_to_all":
        inside = bytes * (local - 1) / n / intra.bandwidth
        outside = bytes * (n - local) / n / inter.bandwidth
        return startup + max(inside, outside)
    raise ValueError(f"op={op!r}; it may be one of {', '.join(get_args(Collective))}")


def _between_nodes(cluster: ClusterSpec, group_size: int, stride: int) -> LinkSpec:
    if cluster.inter_node is None:
        raise InfeasibleLayout(
            f"a group of {group_size} ranks, {stride} apart, does not fit on one node of {cluster.devices_per_node} "
            f"devices, and cluster {cluster.name} has no link between nodes"
        )
    return cluster.inter_node
