"""Time of a collective: start-up plus bytes over bandwidth (alpha-beta model), by the placement of its ranks.

The tiers of the network i = 1, 2, ... from the innermost outwards have d_i devices in a unit, of which the last may
join any number, and links of b_i bytes per second and device and t_i seconds a hop. A group of ``n`` ranks that are
``stride`` apart has ``l_i = min(n, max(1, d_i // stride))`` members in a unit of tier i, ``l_0 = 1``, and occupies
``u_i = n / l_i`` units, rounded up. It *runs* at the first tier r with ``l_r = n``, and *uses* tiers up to r in which a
unit has more members than in the next tier inwards. One ring through all members (NCCL's) leaves a unit with as many
links as it has members there, so

    bus bandwidth      B = min over used i of l_(i-1) b_i
    start-up of a ring a = sum over i of (hops that leave a unit of tier i - 1, but none of tier i) t_i
                         = (n - u_1) t_1 + (u_1 - u_2) t_2 + ... + u_(r-1) t_r
                           (inside a domain one hop of t_r less: nothing goes from the last rank to the first)
    depth of a tree    t = sum over i up to r of log2(l_i / l_(i-1)) t_i, each logarithm and quotient rounded up

    all-gather, reduce-scatter   a + (n-1)/n * S / B
    all-reduce                   min(2 a + 2 (n-1)/n * S / B  [ring],  2 t + 2 S / B  [double tree])
    all-to-all                   a + max over i up to r of S * (m_i - l_(i-1))/n / b_i
    point to point               t_r + S / b_r

m_i is n for tiers of the network, whose adapter also carries what goes on outwards, and the members in the domain for
the tiers inside of it, whose links do not. With two tiers, devices of a node and the nodes, l members in each of k
nodes: B = min(b_1, l b_2), a = (n - k) t_1 + k t_2.

Sources: ring all-gather, Thakur, Rabenseifner and Gropp 2005; ring all-reduce, Patarasuk and Yuan 2009; double tree,
Sanders, Speck and Träff 2009; a rate and a latency for each dimension of a network, ASTRA-sim 2.0 (arXiv:2303.14006).
That the tiers do not add up is because they carry the parts of a large buffer at the same time: the slowest one, by
what has to leave one of its inner units over the links of that unit's members, bounds any order of sending.

For a group of two in the innermost tier, bandwidth and latency are its ``pair_bandwidth`` and ``pair_latency_s`` if
known, except for point to point; the bandwidth of all-reduces and all-to-alls its ``pair_reduce_bandwidth`` and
``pair_exchange_bandwidth``.

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
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InfeasibleLayout
from workloads.spec.hardware.network import LinkSpec, TierSpec

COMPUTE_BESIDE, TRAFFIC_BESIDE = 1.27, 2.75
"""Slowdown factors of compute and of communication while both run, because NCCL's kernels need multiprocessors and
memory, too. Probes of two H200 and of two H100 gave 1.26 to 1.33 and 2.65 to 2.88 for all-gathers and reduce-scatters.
All-reduces, for which the first factor is assumed, gave 1.21 to 1.40."""
REDUCE_BESIDE = 1.86
"""`TRAFFIC_BESIDE` of all-reduces: the mean of eight probes of two H200 and of two H100, which gave 1.81 to 1.90."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


def members_per_node(group_size: int, stride: int, devices_per_node: int) -> int:
    """Maximum number of members of a group in one node, or in one unit of any tier: ranks fill one after the other."""
    return min(group_size, max(1, devices_per_node // stride))


def tier_of_group(group_size: int, stride: int, cluster: ClusterSpec) -> TierSpec:
    """The tier at which a group runs: the first one with a unit that holds all of its members.

    Raises `InfeasibleLayout` if no tier does.
    """
    return _spanned(group_size, stride, cluster)[-1].tier


def collective_time_s(op: Collective, bytes: float, group_size: int, stride: int, cluster: ClusterSpec) -> float:
    """Seconds of one collective over ``group_size`` ranks that are ``stride`` apart; 0 for a group of one. ``bytes``: S
    of the formulas above.

    Raises `InfeasibleLayout` if the group is wider than the outermost tier of the cluster, ValueError for an unknown
    ``op``.
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
    if op == "p2p":
        slowest = tier_of_group(group_size, stride, cluster)
        return slowest.latency_s + bytes / slowest.bandwidth
    n, domain = group_size, members_per_node(group_size, stride, cluster.domain)
    through = [
        bytes * ((n if one.tier.network else domain) - one.inner) / n / _rates(one.tier, at, n, "exchange").bandwidth
        for at, one in enumerate(_spanned(n, stride, cluster))
    ]
    exchanged: float = group_of(n, stride, cluster).startup_s + max(through)
    return exchanged


class _Spanned(NamedTuple):
    """A tier up to that at which a group runs, with numbers of members of the group."""

    tier: TierSpec
    inner: int
    """In a unit of the next tier inwards: l_(i-1)."""
    members: int
    """In a unit: l_i."""


def _spanned(group_size: int, stride: int, cluster: ClusterSpec) -> list[_Spanned]:
    """The tiers from the innermost to that at which the group runs. Raises the errors of `tier_of_group`."""
    spanned: list[_Spanned] = []
    members, tiers = 1, cluster.tiers_by_size
    for tier in tiers:
        inner = members
        members = group_size if tier.devices is None else members_per_node(group_size, stride, tier.devices)
        if tier is tiers[-1] and tier.devices is not None and (group_size - 1) * stride < tier.devices:
            members = group_size  # the whole layout is one unit, wherever its last rank lies
        spanned.append(_Spanned(tier, inner, members))
        if members >= group_size:
            return spanned
    tier = tiers[-1]
    if not cluster.tiers:
        raise InfeasibleLayout(
            f"a group of {group_size} ranks, {stride} apart, does not fit on one node of {cluster.domain} "
            f"devices, and cluster {cluster.name} has no link between nodes"
        )
    raise InfeasibleLayout(
        f"a group of {group_size} ranks, {stride} apart, does not fit into the {tier.devices} devices of {tier.name}, "
        f"the outermost tier of cluster {cluster.name}"
    )


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
OF_REDUCES = Contention(traffic=(REDUCE_BESIDE - 1) / (TRAFFIC_BESIDE - 1))


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
    traffic_lasts = traffic_s + compute * (1 - 1 / traffic) * compute_s
    return most(slowed_s(compute_s, traffic_s, contention), traffic_lasts)


def slowed_s(compute_s: Any, traffic_s: Any, contention: Contention = INSIDE_NODE) -> Any:
    """Seconds of compute beside communication that ends before it: the first of the two terms of `together_s`."""
    compute = 1 + (COMPUTE_BESIDE - 1) * contention.compute
    traffic = 1 + (TRAFFIC_BESIDE - 1) * contention.traffic
    return compute_s + traffic * (1 - 1 / compute) * traffic_s


def contention_of(group_size: int, stride: int, cluster: ClusterSpec, *, reduces: bool = False) -> Contention:
    """`Contention` of a group's traffic. ``reduces``: it is all-reduces.

    A network that a probe has timed moves fewer bytes a second than a node's links, and NCCL's kernels mostly wait for
    it. Compute is slowed in proportion to the bytes; traffic only if its kernels, slowed as inside a node, would be
    slower than the network. Slowdowns that the probe has measured beside products replace both.
    """
    local = members_per_node(group_size, stride, cluster.domain)
    if not isinstance(cluster, ProbedCluster) or local >= group_size:
        return OF_REDUCES if reduces else INSIDE_NODE
    measured = cluster.network.beside.get((group_size, local))
    if measured is not None:
        compute, traffic = measured
        return Contention((compute - 1) / (COMPUTE_BESIDE - 1), (traffic - 1) / (TRAFFIC_BESIDE - 1))
    rate = cluster.network.rate("all_gather", group_size, local)
    if rate is None:
        return INSIDE_NODE
    moved = min(1.0, (group_size - 1) / group_size * rate[1] / _rates(cluster.inside, 0, group_size).bandwidth)
    return Contention(moved, max(0.0, (TRAFFIC_BESIDE * moved - 1) / (TRAFFIC_BESIDE - 1)))


def group_of(group_size: int, stride: int, cluster: ClusterSpec) -> Group:
    """`Group` of ``group_size`` ranks that are ``stride`` apart; a single rank takes no time. Raises the errors of
    `collective_time_s`."""
    n = group_size
    if n == 1:
        return Group(0.0, 0.0, inf, 0.0, inf)
    local, spanned = members_per_node(n, stride, cluster.domain), _spanned(n, stride, cluster)
    if local < n and isinstance(cluster, ProbedCluster) and (timed := _timed(n, local, cluster)) is not None:
        return timed
    startup = bandwidth = depth = 0.0
    leaving = n  # hops of the ring that leave a unit of the next tier inwards
    for at, one in enumerate(spanned):
        link = _rates(one.tier, at, n)
        farther = ceil(n / one.members) if one.members < n else int(not one.tier.network)
        startup += (leaving - farther) * link.latency_s
        depth += ceil(log2(ceil(one.members / one.inner))) * link.latency_s
        leaving = farther
        if one.members > one.inner:
            through = one.inner * link.bandwidth
            bandwidth = min(bandwidth, through) if bandwidth else through
    reduced = bandwidth if len(spanned) > 1 else _rates(spanned[0].tier, 0, n, "reduce").bandwidth
    return Group(startup, (n - 1) / n, bandwidth, depth, reduced)


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


def _rates(tier: TierSpec, at: int, group_size: int, of: Literal["", "reduce", "exchange"] = "") -> LinkSpec:
    """Link of the tier with this index, as a group of ``group_size`` uses it. ``of``: for all-reduces, or for
    all-to-alls, which may have their own rate."""
    if at or group_size != 2 or not tier.has_pair_rates:
        return tier
    own = {"reduce": tier.pair_reduce_bandwidth, "exchange": tier.pair_exchange_bandwidth}.get(of)
    known = [one for one in (own, tier.pair_bandwidth, tier.bandwidth) if one is not None]
    # A pair is never faster than a larger group, even if a user changed the link's own rates.
    bandwidth = min(tier.bandwidth, known[0])
    latency_s = max(tier.latency_s, tier.latency_s if tier.pair_latency_s is None else tier.pair_latency_s)
    return LinkSpec(bandwidth=bandwidth, latency_s=latency_s)
