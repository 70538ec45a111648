"""Times of collectives on networks of several tiers: by hand, and as the two-link form says where both can."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import get_args

import pytest

from tests.sampling import SEED
from tests.workloads.costs.shapes import H200
from workloads.costs.traffic.collectives import (
    Collective,
    Group,
    collective_time_s,
    contention_of,
    group_of,
    tier_of_group,
)
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InfeasibleLayout
from workloads.spec.hardware.network import TierSpec

NODE = TierSpec(name="node", devices=8, bandwidth=400e9, latency_s=4e-6)
LEAF = TierSpec(name="leaf", devices=32, bandwidth=50e9, latency_s=5e-6)
SPINE = TierSpec(name="spine", devices=128, bandwidth=10e9, latency_s=10e-6)
OPS: tuple[Collective, ...] = get_args(Collective)
DRAW = random.Random(f"{SEED}/tiers")
GROUPS = [(DRAW.choice([2, 3, 4, 6, 8, 16, 32, 64, 72, 96]), DRAW.choice([1, 2, 3, 4, 8, 16, 64])) for _ in range(60)]


def of(*tiers: TierSpec) -> ClusterSpec:
    return dataclasses.replace(H200, intra_node=None, inter_node=None, tiers=tiers)


THREE = of(NODE, LEAF, SPINE)


def test_the_tier_of_a_group_is_the_one_that_its_members_span() -> None:
    spanned = [tier_of_group(*group, THREE).name for group in ((8, 1), (4, 2), (2, 8), (32, 1), (33, 1), (2, 32))]
    assert spanned == ["node", "node", "leaf", "leaf", "spine", "spine"]
    short = [tier_of_group(*group, H200).name for group in ((8, 1), (2, 8))]
    assert short == ["node", "between nodes"]


def test_three_tiers_by_hand() -> None:
    """128 consecutive ranks: 8 in each of 16 nodes, 32 in each of 4 leaves.

    Bandwidth of a ring: min(1 x 400, 8 x 50, 32 x 10) = 320 GB/s. It has 128 hops: 128 - 16 stay in a node, 16 - 4 in a
    leaf, 4 cross the spine: 112 x 4 + 12 x 5 + 4 x 10 = 548 us. A tree is log2(8) x 4 + log2(4) x 5 + log2(4) x 10 = 42
    us deep. Of 1.28 GB that a rank exchanges with all, 7/128 stay in the node: 70 MB at 400 GB/s are 0.175 ms; 120/128
    leave it: 1.2 GB at 50 GB/s are 24 ms; 96/128 leave the leaf: 960 MB at 10 GB/s are 96 ms.
    """
    size, startup = 1.28e9, 548e-6
    ring = 127 / 128 * size / 320e9
    assert collective_time_s("all_gather", size, 128, 1, THREE) == pytest.approx(startup + ring)
    assert collective_time_s("reduce_scatter", size, 128, 1, THREE) == pytest.approx(startup + ring)
    assert collective_time_s("all_reduce", size, 128, 1, THREE) == pytest.approx(2 * 42e-6 + 2 * size / 320e9)
    assert collective_time_s("all_reduce", 8, 128, 1, THREE) == pytest.approx(84e-6, rel=1e-3)
    assert collective_time_s("all_to_all", size, 128, 1, THREE) == pytest.approx(startup + 96e-3)
    assert collective_time_s("p2p", size, 128, 1, THREE) == pytest.approx(10e-6 + size / 10e9)


def test_groups_that_leave_out_a_tier_by_hand() -> None:
    """Four ranks, one a node of a leaf: four hops of 5 us at one device's 50 GB/s. Four, one a leaf: four hops of 10 us
    at 10 GB/s. 16 in two nodes of a leaf: 14 hops inside of them, 2 between, min(400, 8 x 50) GB/s."""
    assert group_of(4, 8, THREE) == Group(20e-6, 3 / 4, 50e9, 10e-6, 50e9)
    assert group_of(4, 32, THREE) == Group(40e-6, 3 / 4, 10e9, 20e-6, 10e9)
    assert group_of(16, 1, THREE) == Group(pytest.approx(66e-6), 15 / 16, 400e9, pytest.approx(17e-6), 400e9)
    assert group_of(8, 1, THREE).startup_s == pytest.approx(7 * 4e-6), "inside of a domain the last hop is not taken"


def test_a_network_adapter_carries_what_goes_on_outwards() -> None:
    """With a spine as fast as a leaf, 120/128 of 1.28 GB leave a node, all through adapters of 50 GB/s: 24 ms."""
    cluster = of(NODE, LEAF, dataclasses.replace(SPINE, bandwidth=LEAF.bandwidth))
    assert collective_time_s("all_to_all", 1.28e9, 128, 1, cluster) == pytest.approx(548e-6 + 24e-3)


@pytest.mark.parametrize("linked", [None, 72])
def test_two_tiers_take_exactly_as_long_as_two_links(linked: int | None) -> None:
    assert H200.intra_node is not None and H200.inter_node is not None
    pair = dataclasses.replace(H200.intra_node, pair_bandwidth=250e9, pair_latency_s=20e-6)
    short = dataclasses.replace(H200, intra_node=pair, linked_devices=linked)
    inside, (outside,) = short.inside, short.outside
    tiers = of(dataclasses.replace(inside, network=None), dataclasses.replace(outside, network=None, name=""))
    for (ranks, apart), op in itertools.product(GROUPS, OPS):
        size = 10 ** DRAW.uniform(1, 10)
        assert collective_time_s(op, size, ranks, apart, tiers) == collective_time_s(op, size, ranks, apart, short)
        assert group_of(ranks, apart, tiers) == group_of(ranks, apart, short)
        assert contention_of(ranks, apart, tiers) == contention_of(ranks, apart, short)


def test_a_tier_in_two_of_the_same_rates_changes_nothing() -> None:
    """Nodes of a rack on one NVLink, and leaves under a spine without oversubscription."""
    rack = dataclasses.replace(NODE, name="rack", devices=64)
    whole = of(rack, dataclasses.replace(LEAF, devices=None))
    parts = of(NODE, dataclasses.replace(rack, network=False), dataclasses.replace(LEAF, devices=512), LEAF_OUTWARDS)
    for (ranks, apart), op in itertools.product(GROUPS, OPS):
        for size in (1e3, 1e9):
            one, other = (collective_time_s(op, size, ranks, apart, cluster) for cluster in (whole, parts))
            tree = op == "all_reduce"  # its depth is rounded up in each tier
            assert other == pytest.approx(one, rel=0.25 if tree and size == 1e3 else 2e-3 if tree else 1e-9)


LEAF_OUTWARDS = dataclasses.replace(LEAF, devices=None, name="beyond")


@pytest.mark.parametrize("field", ["bandwidth", "latency_s"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_better_tier_is_never_slower(place: int, field: str) -> None:
    """Of any tier and up to the next one inwards, for every operation; and what crosses it in one message is faster."""
    better = {"bandwidth": 4.0, "latency_s": 0.5}[field]
    tiers = list(THREE.tiers)
    tiers[place] = dataclasses.replace(tiers[place], **{field: getattr(tiers[place], field) * better})
    crossing = {0: (8, 1), 1: (2, 8), 2: (2, 32)}[place]
    for (ranks, apart), op in itertools.product(GROUPS, OPS):
        if (ranks - 1) * apart < 128:
            slow, fast = (collective_time_s(op, 1e8, ranks, apart, cluster) for cluster in (THREE, of(*tiers)))
            assert fast <= slow
    slow, fast = (collective_time_s("p2p", 1e8, *crossing, cluster) for cluster in (THREE, of(*tiers)))
    assert fast < slow


def test_the_outermost_tier_holds_every_group_of_its_devices() -> None:
    """The first and the last of three or more stages: ranks 0 and 96 of 128, whose distance does not divide 128."""
    assert tier_of_group(2, 96, THREE).name == "spine"
    with pytest.raises(InfeasibleLayout):
        tier_of_group(2, 128, THREE)
    assert tier_of_group(2, 6, dataclasses.replace(H200, inter_node=None)).name == "node"


def test_a_group_wider_than_the_outermost_tier_has_no_time() -> None:
    with pytest.raises(
        InfeasibleLayout, match="4 ranks, 64 apart, does not fit into the 128 devices of spine, the out"
    ):
        collective_time_s("all_reduce", 1e6, 4, 64, THREE)
    with pytest.raises(InfeasibleLayout, match="does not fit"):
        collective_time_s("p2p", 1e6, 129, 1, THREE)
