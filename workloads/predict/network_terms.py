"""How fast the ranks of a group reach each other, for the closed form of many rows: bandwidth, and start-up of a hop.

The form has two links for every row: that of a domain (`ClusterSpec.inside`) and that of the first tier of the network
between domains. A cluster with more tiers also has those inside of the first, and outside of the second, by the rule of
`workloads.costs.traffic.collectives`: a ring leaves a unit with as many links as it has members there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from workloads.predict.points import Floats, Points, tier_table
from workloads.spec.cluster import ClusterSpec


def network_columns(cluster: ClusterSpec) -> dict[str, Any]:
    """The fields of `Points` that describe the network of a row's cluster."""
    inside, outside = cluster.inside, cluster.outside
    nearest = cluster.tiers_by_size[0]
    inner = [tier for tier in cluster.tiers_by_size if not tier.network][:-1]
    return {
        "node": float(cluster.domain),
        "intra": inside.bandwidth,
        "inter": outside[0].bandwidth if outside else math.nan,
        "pair": math.nan if nearest.pair_bandwidth is None else nearest.pair_bandwidth,
        "hop_pair": math.nan if nearest.pair_latency_s is None else nearest.pair_latency_s,
        "hop_inside": inside.latency_s,
        "hop_between": (outside[0] if outside else inside).latency_s,
        "inner": [(float(tier.devices or 0), tier.bandwidth, tier.latency_s) for tier in inner],
        "outer": [(float(unit.devices or 0), tier.bandwidth, tier.latency_s) for unit, tier in pairwise(outside)],
    }


def network_rows(cluster: ClusterSpec, count: int) -> dict[str, Floats]:
    """`network_columns` of so many rows."""
    return {
        name: tier_table([value] * count) if isinstance(value, list) else np.full(count, value)
        for name, value in network_columns(cluster).items()
    }


def without_outer_tiers(points: Points, rows: Sequence[bool] | None = None) -> Points:
    """The points, or those of a mask, with the first tier of the network alone."""
    outer = np.array(points.outer)
    outer[np.ones(len(points), dtype=bool) if rows is None else np.array(rows, dtype=bool)] = np.nan
    return dataclasses.replace(points, outer=outer)


def bandwidth(points: Points, size: Floats, stride: Floats, p: Mapping[str, float]) -> Floats:
    """B/s of each member of groups of ``size`` ranks that are ``stride`` apart; NaN if the link is unknown.

    A measured all-reduce over all N nodes is slower than the links, the more nodes it spans. For a group that spans n
    nodes, the rate is interpolated between the two by log n / log N.
    """
    local = _members(size, stride, points.node)
    inside = np.fmin(points.intra, points.intra_measured) * p["nvlink"]
    if points.inner.shape[1]:
        inside = _inside(points, size, stride, inside, p)
    # An all-reduce over the world moves at the rate of all links of a node together.
    nodes = np.maximum(1.0, points.gpus / points.node)
    measured = np.where(nodes > 1, points.world_measured, np.nan) / points.node
    nominal = np.where(np.isfinite(points.inter), points.inter, measured)
    spanned = np.clip(size * stride / points.node, 1.0, nodes)
    exponent = np.minimum(1.0, p["network_measured"] * np.log(spanned) / np.log(np.maximum(nodes, 2.0)))
    each = nominal * np.where(np.isfinite(measured), (measured / nominal) ** exponent, 1.0) * p["network"]
    rate = np.where(size <= local, inside, np.minimum(inside, local * each))
    for unit, link, _ in _tiers(points.outer):
        members = _members(size, stride, unit)
        rate = np.where(size > members, np.minimum(rate, members * link * p["network"]), rate)
    return rate


def _inside(points: Points, size: Floats, stride: Floats, widest: Floats, p: Mapping[str, float]) -> Floats:
    """B/s inside a domain with tiers of its own; ``widest``: that of the tier that joins the domain."""
    rate, before = np.full(len(size), np.inf), np.ones(len(size))
    for devices, link, _ in [*_tiers(points.inner), (points.node, widest / p["nvlink"], None)]:
        members = np.where(np.isnan(devices), before, _members(size, stride, devices))
        rate = np.where(members > before, np.minimum(rate, before * link * p["nvlink"]), rate)
        before = members
    known: Floats = np.where(np.isfinite(rate), rate, widest)
    return known


def slowest_rate(points: Points, span: Floats) -> Floats:
    """B/s, without a fitted factor, of the tier that joins ``span`` consecutive ranks."""
    rate = np.where(span <= points.node, points.intra, np.where(np.isfinite(points.inter), points.inter, points.intra))
    for unit, link, _ in _tiers(points.outer):
        rate = np.where(span > unit, link, rate)
    for devices, link, _ in reversed(_tiers(points.inner)):
        rate = np.where(span <= devices, link, rate)
    return rate


def hop_s(points: Points, size: Floats, stride: Floats) -> Floats:
    """Mean seconds to start a hop of a ring through groups of ``size`` ranks that are ``stride`` apart."""
    x = points
    local = _members(size, stride, x.node)
    hop: Floats = ((local - 1) * x.hop_inside + np.where(size > local, x.hop_between, x.hop_inside)) / local
    before = x.hop_between
    for unit, _, seconds in _tiers(x.outer):
        members = _members(size, stride, unit)
        hop = np.where(size > members, hop + (seconds - before) / members, hop)
        before = np.where(np.isnan(unit), before, seconds)
    wider = x.hop_inside
    for devices, _, seconds in reversed(_tiers(x.inner)):
        hop = np.where(np.isnan(devices), hop, hop + (seconds - wider) * (1 - 1 / _members(size, stride, devices)))
        wider = np.where(np.isnan(devices), wider, seconds)
    return hop


def _members(size: Floats, stride: Floats, devices: Floats) -> Floats:
    """Number of members of a group in a unit of so many devices."""
    members: Floats = np.minimum(size, np.maximum(1.0, np.floor(devices / stride)))
    return members


def _tiers(table: Floats) -> list[tuple[Floats, Floats, Floats]]:
    """(devices, B/s, seconds) of each tier by row, from the innermost outwards; NaN for rows without that tier."""
    return [(table[:, at, 0], table[:, at, 1], table[:, at, 2]) for at in range(table.shape[1])]
