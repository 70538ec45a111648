"""Time of a collective: start-up plus bytes over bandwidth (alpha-beta model), by the placement of its ranks.

A group of ``n`` ranks that are ``stride`` apart has ``l`` members in each node and spans ``k = n / l`` nodes. One ring
through all of them (NCCL's) crosses a node's boundary with as many links as it has members there, so

    bus bandwidth      B = min(intra, l * inter)                     (intra alone when k = 1)
    start-up of a ring a = (n - k) * intra latency + k * inter latency   (n - 1 hops when k = 1)

    all-gather, reduce-scatter   a + (n-1)/n * S / B
    all-reduce                   min(2 a + 2 (n-1)/n * S / B  [ring],  2 t + 2 S / B  [double tree, t by depth])
    all-to-all                   a + max(S * (l-1)/n / intra, S * (n-l)/n / inter)
    point to point               latency + S / bandwidth of the slowest hop of the group

Sources: ring all-gather, Thakur, Rabenseifner and Gropp 2005; ring all-reduce, Patarasuk and Yuan 2009; double tree,
Sanders, Speck and Träff 2009.

For a group of two inside a node, bandwidth and latency are its ``pair_bandwidth`` and ``pair_latency_s`` if known,
except for point to point.

S is the size in bytes of the whole (gathered, or not yet scattered) buffer of one rank, and bus bandwidth is defined as
in nccl-tests (its doc/PERFORMANCE.md derives the factors (n-1)/n and 2 (n-1)/n). Bandwidths are per device
(`LinkSpec`), so groups that run at the same time on one node's devices do not slow each other.

On a `ProbedCluster` a group between nodes that was timed takes the measured seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, log2
from typing import Any, Literal, NamedTuple, get_args

from workloads.costs.traffic.measured_network import ProbedCluster
from workloads.spec.cluster import ClusterSpec, LinkSpec
from workloads.spec.errors import InfeasibleLayout

COMPUTE_BESIDE, TRAFFIC_BESIDE = 1.27, 2.75
"""Slowdown factors of compute and of communication while both run, because NCCL's kernels need multiprocessors and
memory, too. Probes of two H200 and of two H100 gave 1.26 to 1.33 and 2.65 to 2.88 for all-gathers and reduce-scatters.
All-reduces, for which the same factors are assumed, gave 1.27 and 1.40, and 1.86 and 1.90."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


def members_per_node(group_size: int, stride: int, devices_per_node: int) -> int:
    """Maximum number of members of a group in one node, or in one domain of linked nodes (`ClusterSpec.domain`): ranks
    fill one after the other."""
    return min(group_size, max(1, devices_per_node // stride))


def collective_time_s(op: Collective, bytes: float, group_size: int, stride: int, cluster: ClusterSpec) -> float:
    """Seconds of one collective over ``group_size`` ranks that are ``stride`` apart; 0 for a group of one. ``bytes``: S
    of the formulas above.

    Raises `InfeasibleLayout` if the group leaves a node of a cluster without a link between nodes, ValueError for an
    unknown ``op``.
    """
    if isinstance(cluster, ProbedCluster):
        local = members_per_node(group_size, stride, cluster.domain)
        if local < group_size and (timed := cluster.network.seconds(op, bytes, group_size, local)) is not None:
            return timed
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
    local = members_per_node(n, stride, cluster.domain)
    inter = slowest_link(n, stride, cluster)
    if op == "p2p":
        return inter.latency_s + bytes / inter.bandwidth
    inside = bytes * (local - 1) / n / intra.bandwidth
    outside = bytes * (n - local) / n / inter.bandwidth
    exchanged: float = group_of(n, stride, cluster).startup_s + max(inside, outside)
    return exchanged


class Group(NamedTuple):
    """Parameters of the ring and of the tree through a group of ranks; or arrays of them."""

    startup_s: Any
    """Start-up seconds of a ring: a in the formulas above."""
    share: Any
    """(n - 1) / n, the ring's share of the buffer."""
    bandwidth: Any
    """B, bytes per second."""
    depth_s: Any
    """t, seconds."""
    reduce_bandwidth: Any
    """B of an all-reduce, which differs where it was measured."""

    def scattered_s(self, bytes: Any) -> Any:
        """Seconds of an all-gather or a reduce-scatter of ``bytes``."""
        return self.startup_s + self.share * bytes / self.bandwidth

    def reduced_s(self, bytes: Any, least: Callable[[Any, Any], Any] = min) -> Any:
        """Seconds of an all-reduce of ``bytes``. ``least``: minimum of two numbers, or of two arrays
        (`numpy.minimum`)."""
        ring = 2 * self.startup_s + 2 * self.share * bytes / self.reduce_bandwidth
        return least(ring, 2 * self.depth_s + 2 * bytes / self.reduce_bandwidth)


class Contention(NamedTuple):
    """How much compute and traffic of one group slow each other; or arrays of it."""

    compute: Any = 1.0
    """Part of the slowdown `COMPUTE_BESIDE` that applies: 1 inside a node, 0 for none."""
    traffic: Any = 1.0
    """The same of `TRAFFIC_BESIDE`."""


INSIDE_NODE = Contention()


def together_s(
    compute_s: Any,
    traffic_s: Any,
    most: Callable[[Any, Any], Any] = max,
    contention: Contention = INSIDE_NODE,
) -> Any:
    """Seconds of compute and communication that start together; the arguments are their times alone. Both are slowed
    until the shorter one ends; the rest of the other runs at full speed. The total is the larger of two linear terms,
    provided that the reciprocals of both factors add up to more than one, so that overlapping pays. ``most``: maximum
    of two numbers, or of two arrays (`numpy.maximum`)."""
    compute = 1 + (COMPUTE_BESIDE - 1) * contention.compute
    traffic = 1 + (TRAFFIC_BESIDE - 1) * contention.traffic
    compute_lasts = compute_s + traffic * (1 - 1 / compute) * traffic_s
    traffic_lasts = traffic_s + compute * (1 - 1 / traffic) * compute_s
    return most(compute_lasts, traffic_lasts)


def contention_of(group_size: int, stride: int, cluster: ClusterSpec) -> Contention:
    """`Contention` of a group's traffic.

    A network that a probe has timed moves fewer bytes a second than a node's links, and NCCL's kernels mostly wait for
    it. Compute is slowed in proportion to the bytes; traffic only if its kernels, slowed as inside a node, would be
    slower than the network. Slowdowns that the probe has measured beside products replace both.
    """
    local = members_per_node(group_size, stride, cluster.domain)
    if not isinstance(cluster, ProbedCluster) or local >= group_size:
        return INSIDE_NODE
    measured = cluster.network.beside.get((group_size, local))
    if measured is not None:
        compute, traffic = measured
        return Contention((compute - 1) / (COMPUTE_BESIDE - 1), (traffic - 1) / (TRAFFIC_BESIDE - 1))
    rate = cluster.network.rate("all_gather", group_size, local)
    if rate is None:
        return INSIDE_NODE
    moved = min(1.0, (group_size - 1) / group_size * rate[1] / _inside(cluster, group_size).bandwidth)
    return Contention(moved, max(0.0, (TRAFFIC_BESIDE * moved - 1) / (TRAFFIC_BESIDE - 1)))


def group_of(group_size: int, stride: int, cluster: ClusterSpec) -> Group:
    """`Group` of ``group_size`` ranks that are ``stride`` apart; a single rank takes no time. Raises the errors of
    `collective_time_s`."""
    n = group_size
    if n == 1:
        return Group(0.0, 0.0, inf, 0.0, inf)
    local = members_per_node(n, stride, cluster.domain)
    nodes = ceil(n / local)
    intra, share = _inside(cluster, n), (n - 1) / n
    depth = ceil(log2(local)) * intra.latency_s
    if nodes == 1:
        return Group((n - 1) * intra.latency_s, share, intra.bandwidth, depth, intra.bandwidth)
    if isinstance(cluster, ProbedCluster) and (timed := _timed(n, local, cluster)) is not None:
        return timed
    inter = _between_nodes(cluster, n, stride)
    startup = (n - nodes) * intra.latency_s + nodes * inter.latency_s
    # If a node holds one member, the ring never uses the link inside a node.
    bandwidth = min(intra.bandwidth, local * inter.bandwidth) if local > 1 else inter.bandwidth
    return Group(startup, share, bandwidth, depth + ceil(log2(nodes)) * inter.latency_s, bandwidth)


def _timed(n: int, local: int, cluster: ProbedCluster) -> Group | None:
    """`Group` of ``n`` ranks, ``local`` of them in a node, from the probe's times; None if they were not timed."""
    gather, scatter, reduce = (
        cluster.network.rate(op, n, local) for op in ("all_gather", "reduce_scatter", "all_reduce")
    )
    if gather is None or scatter is None or reduce is None:
        return None
    share = (n - 1) / n
    startup = (gather[0] + scatter[0]) / 2
    bandwidth = share / ((1 / gather[1] + 1 / scatter[1]) / 2)
    return Group(startup, share, bandwidth, inf, 2 * share * reduce[1])


def _inside(cluster: ClusterSpec, group_size: int) -> LinkSpec:
    """Link between devices of a node, as a group of ``group_size`` uses it."""
    link = cluster.intra_node
    if group_size != 2 or (link.pair_bandwidth is None and link.pair_latency_s is None):
        return link
    # A pair is never faster than a larger group, even if a user changed the link's own rates.
    bandwidth = min(link.bandwidth, link.bandwidth if link.pair_bandwidth is None else link.pair_bandwidth)
    latency_s = max(link.latency_s, link.latency_s if link.pair_latency_s is None else link.pair_latency_s)
    return LinkSpec(bandwidth=bandwidth, latency_s=latency_s)


def slowest_link(group_size: int, stride: int, cluster: ClusterSpec) -> LinkSpec:
    """Slowest link between ranks of the group. Raises the errors of `collective_time_s`."""
    local = members_per_node(group_size, stride, cluster.domain)
    return cluster.intra_node if local >= group_size else _between_nodes(cluster, group_size, stride)


def _between_nodes(cluster: ClusterSpec, group_size: int, stride: int) -> LinkSpec:
    if cluster.inter_node is None:
        raise InfeasibleLayout(
            f"a group of {group_size} ranks, {stride} apart, does not fit on one node of {cluster.domain} "
            f"devices, and cluster {cluster.name} has no link between nodes"
        )
    return cluster.inter_node
