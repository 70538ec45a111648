"""The groups of ranks of a layout in ``explain``: at which tier of the cluster's network each one runs."""

from __future__ import annotations

from math import lcm
from typing import Any, NamedTuple

from results.text.numbers import plural
from workloads.costs.traffic.collectives import group_of, tier_of_group
from workloads.rules.layout_rules import layout_violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InfeasibleLayout
from workloads.spec.experiment import Experiment
from workloads.spec.hardware.network import TierSpec
from workloads.spec.mesh import data_degrees, expert_degrees, stride


class PlacedGroup(NamedTuple):
    """Groups of one axis, by rank order."""

    name: str
    ranks: int
    apart: int
    """Distance of neighbours in global ranks."""
    tier: TierSpec
    bandwidth: float
    """Bytes per second of a ring through one of them."""

    @property
    def span(self) -> int:
        """Number of consecutive ranks that the groups of the axis share out."""
        return self.ranks * self.apart


def placed_groups(e: Experiment, cluster: ClusterSpec | None) -> list[PlacedGroup]:
    """The groups of more than one rank; none if the cluster is not known, or the layout does not exist there."""
    if cluster is None or layout_violations(e):
        return []
    (copies, shards), (expert_copies, expert_shards) = data_degrees(e), expert_degrees(e)
    inner = e.ep * e.etp
    groups = [("tp", e.tp, 1), ("cp", e.cp, stride(e, "cp"))]
    if e.model.moe is not None:
        groups += [("etp", e.etp, 1), ("ep", e.ep, e.etp)]
    groups += [("dp shards", shards, e.tp), ("dp replicas", copies, e.tp * shards)]
    if e.model.moe is not None:
        groups += [("expert shards", expert_shards, inner)]
        groups += [("expert replicas", expert_copies, inner * expert_shards)]
    groups.append(("pp", e.pp, stride(e, "pp")))
    try:
        return [
            PlacedGroup(name, ranks, apart, tier_of_group(ranks, apart, cluster), _rate(name, ranks, apart, cluster))
            for name, ranks, apart in groups
            if ranks > 1
        ]
    except InfeasibleLayout:
        return []


def _rate(name: str, ranks: int, apart: int, cluster: ClusterSpec) -> float:
    """B/s of a ring; of stages, which send to the next one alone, that of the slowest link."""
    if name == "pp":
        return tier_of_group(ranks, apart, cluster).bandwidth
    return float(group_of(ranks, apart, cluster).bandwidth)


def group_lines(e: Experiment, cluster: ClusterSpec | None) -> list[str]:
    """Lines on the groups; none for a layout without any, or on an unknown cluster."""
    groups = placed_groups(e, cluster)
    if not groups or cluster is None:
        return []
    texts = (f"{one.name} {one.ranks} in {one.tier.name} ({one.bandwidth / 1e9:,.4g} GB/s)" for one in groups)
    return [f"network    on {cluster.name}, by rank order: {', '.join(texts)}", *_segments(e, groups, cluster)]


def _segments(e: Experiment, groups: list[PlacedGroup], cluster: ClusterSpec) -> list[str]:
    """How a scheduler must place the ranks where groups that one unit of a tier can hold would otherwise lie across
    two: 64 ranks do not divide the 72 devices of a rack."""
    lines = []
    for tier in cluster.tiers_by_size:
        held = [one.span for one in groups if one.tier == tier]
        if tier.devices is None or not held or e.world_size <= tier.devices:
            continue
        together = lcm(*held)
        used = tier.devices - tier.devices % together
        if used not in (0, tier.devices) and used % cluster.devices_per_node == 0:
            nodes = used // cluster.devices_per_node
            lines.append(
                f"           predicted for ranks on {used} of the {tier.devices} devices of each {tier.name}: "
                f"segments of {plural(nodes, 'node')} (Slurm's topology/block: +launcher.sbatch.segment={nodes})"
            )
    return lines


def group_fields(e: Experiment, cluster: ClusterSpec | None) -> list[dict[str, Any]] | None:
    """The groups for ``explain --json``; None on an unknown cluster."""
    if cluster is None:
        return None
    return [
        {
            "group": one.name,
            "ranks": one.ranks,
            "apart": one.apart,
            "tier": one.tier.name,
            "tier_devices": one.tier.devices,
            "bandwidth": one.bandwidth,
            "latency_s": one.tier.latency_s,
        }
        for one in placed_groups(e, cluster)
    ]
