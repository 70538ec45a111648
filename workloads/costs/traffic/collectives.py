"""Time of a collective: start-up plus bytes over bandwidth, by where its ranks stand.

A group of ``n`` ranks that are ``stride`` apart has ``l`` members in each node and spans ``k = n / l`` nodes. One ring
through all of them (NCCL's) crosses a node's boundary with as many links as it has members there, so

    bus bandwidth      B = min(intra, l * inter)                     (intra alone when k = 1)
    start-up of a ring a = (n - k) * intra latency + k * inter latency   (n - 1 hops when k = 1)

    all-gather, reduce-scatter   a + (n-1)/n * S / B
    all-reduce                   min(2 a + 2 (n-1)/n * S / B  [ring],  2 t + 2 S / B  [double tree, t by depth])
    all-to-all                   a + max(S * (l-1)/n / intra, S * (n-l)/n / inter)
    point to point               latency + S / bandwidth of the slowest hop of the group

Of a group of two inside a node they are its ``pair_bandwidth`` and ``pair_latency_s`` where these are known, but for
point to point.

S is the size in bytes of the whole (gathered, or not yet scattered) buffer of one rank, and bus bandwidth is meant as
in nccl-tests (its doc/PERFORMANCE.md derives the factors (n-1)/n and 2 (n-1)/n). Bandwidths are per device
(`LinkSpec`), so groups that run side by side on one node's devices do not slow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, log2
from typing import Any, Literal, NamedTuple, get_args

from workloads.spec.cluster import ClusterSpec, LinkSpec
from workloads.spec.errors import InfeasibleLayout

COMPUTE_BESIDE, TRAFFIC_BESIDE = 1.27, 2.75
"""How many times as long compute and traffic take while both run: NCCL's kernels need multiprocessors and memory, too.
From probes of two H200 and of two H100: 1.26 to 1.33 and 2.65 to 2.88 beside gathers and scatters; beside all-reduces,
which are taken to be alike, 1.27 and 1.40, and 1.86 and 1.90."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


def members_per_node(group_size: int, stride: int, devices_per_node: int) -> int:
    """The most members of a group that one node holds: ranks fill one node after the other."""
    return min(group_size, max(1, devices_per_node // stride))


def collective_time_s(op: Collective, bytes: float, group_size: int, stride: int, cluster: ClusterSpec) -> float:
    """Seconds of one collective over ``group_size`` ranks that are ``stride`` apart; 0 for a group of one.

    Raises `InfeasibleLayout` where the group leaves a node of a cluster that has no link between nodes, ValueError for
    an unknown ``op``.
    """
    if op in ("all_gather", "reduce_scatter"):
        scattered: float = group_of(group_size, stride, cluster).scattered_s(bytes)
        return scattered
    if op == "all_reduce":
        reduced: float = group_of(group_size, stride, cluster).reduced_s(bytes)
        return reduced
    if op not in get_args(Collective):
        raise ValueError(f"op={op!r}; it may be one of {', '.join(get_args(Collective))}")
    if group_size == 1:
        return 0.0
    n, intra = group_size, _inside(cluster, group_size)
    local = members_per_node(n, stride, cluster.devices_per_node)
    inter = slowest_link(n, stride, cluster)
    if op == "p2p":
        return inter.latency_s + bytes / inter.bandwidth
    inside = bytes * (local - 1) / n / intra.bandwidth
    outside = bytes * (n - local) / n / inter.bandwidth
    exchanged: float = group_of(n, stride, cluster).startup_s + max(inside, outside)
    return exchanged


class Group(NamedTuple):
    """What the ring and the tree through a group of ranks take; arrays where there is one entry for each of many."""

    startup_s: Any
    """Of a ring: a in the formulas above."""
    share: Any
    """(n - 1) / n."""
    bandwidth: Any
    """B."""
    depth_s: Any
    """t."""

    def scattered_s(self, bytes: Any) -> Any:
        """Seconds of an all-gather or a reduce-scatter."""
        return self.startup_s + self.share * bytes / self.bandwidth

    def reduced_s(self, bytes: Any, least: Callable[[Any, Any], Any] = min) -> Any:
        """Seconds of an all-reduce. ``least``: of two numbers, or of two arrays (`numpy.minimum`)."""
        ring = 2 * self.startup_s + 2 * self.share * bytes / self.bandwidth
        return least(ring, 2 * self.depth_s + 2 * bytes / self.bandwidth)


def together_s(compute_s: Any, traffic_s: Any, most: Callable[[Any, Any], Any] = max) -> Any:
    """Seconds of compute and traffic that begin together, each of which takes so long alone. The shorter one ends while
    both are slow; what is left of the other goes on alone. The larger of two lines says so as long as the
    reciprocals of both factors add up to more than one, so that doing both at a time is worth it. ``most``: of two
    numbers, or of two arrays (`numpy.maximum`)."""
    compute_lasts = compute_s + TRAFFIC_BESIDE * (1 - 1 / COMPUTE_BESIDE) * traffic_s
    traffic_lasts = traffic_s + COMPUTE_BESIDE * (1 - 1 / TRAFFIC_BESIDE) * compute_s
    return most(compute_lasts, traffic_lasts)


def group_of(group_size: int, stride: int, cluster: ClusterSpec) -> Group:
    """Of ``group_size`` ranks that are ``stride`` apart; one rank alone takes no time. Errors as of
    `collective_time_s`."""
    n = group_size
    if n == 1:
        return Group(0.0, 0.0, inf, 0.0)
    local = members_per_node(n, stride, cluster.devices_per_node)
    nodes = ceil(n / local)
    intra, share = _inside(cluster, n), (n - 1) / n
    depth = ceil(log2(local)) * intra.latency_s
    if nodes == 1:
        return Group((n - 1) * intra.latency_s, share, intra.bandwidth, depth)
    inter = _between_nodes(cluster, n, stride)
    startup = (n - nodes) * intra.latency_s + nodes * inter.latency_s
    # Where a node holds one member, the ring never uses the link inside a node.
    bandwidth = min(intra.bandwidth, local * inter.bandwidth) if local > 1 else inter.bandwidth
    return Group(startup, share, bandwidth, depth + ceil(log2(nodes)) * inter.latency_s)


def _inside(cluster: ClusterSpec, group_size: int) -> LinkSpec:
    """The link between devices of a node, as a group of so many uses it."""
    link = cluster.intra_node
    if group_size != 2 or (link.pair_bandwidth is None and link.pair_latency_s is None):
        return link
    # Two never reach more than many do, whatever a user makes of the link's own rates.
    bandwidth = min(link.bandwidth, link.bandwidth if link.pair_bandwidth is None else link.pair_bandwidth)
    latency_s = max(link.latency_s, link.latency_s if link.pair_latency_s is None else link.pair_latency_s)
    return LinkSpec(bandwidth=bandwidth, latency_s=latency_s)


def slowest_link(group_size: int, stride: int, cluster: ClusterSpec) -> LinkSpec:
    """Of those between ranks of the group. Errors as of `collective_time_s`."""
    local = members_per_node(group_size, stride, cluster.devices_per_node)
    return cluster.intra_node if local >= group_size else _between_nodes(cluster, group_size, stride)


def _between_nodes(cluster: ClusterSpec, group_size: int, stride: int) -> LinkSpec:
    if cluster.inter_node is None:
        raise InfeasibleLayout(
            f"a group of {group_size} ranks, {stride} apart, does not fit on one node of {cluster.devices_per_node} "
            f"devices, and cluster {cluster.name} has no link between nodes"
        )
    return cluster.inter_node
