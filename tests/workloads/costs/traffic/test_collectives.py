from __future__ import annotations

import dataclasses

import pytest

from tests.workloads.costs.shapes import H200, ONE_NODE
from workloads.costs.traffic.collectives import Contention, collective_time_s, members_per_node, together_s
from workloads.spec.errors import InfeasibleLayout

GIB = 2.0**30


def test_placement() -> None:
    assert members_per_node(8, 1, 8) == 8
    assert members_per_node(16, 1, 8) == 8
    assert members_per_node(4, 4, 8) == 2  # ranks 0, 4 | 8, 12
    assert members_per_node(4, 8, 8) == 1
    assert members_per_node(4, 64, 8) == 1


def test_group_of_one_is_free() -> None:
    assert collective_time_s("all_reduce", GIB, 1, 1, H200) == 0


def test_large_messages_inside_a_node() -> None:
    ring = 7 / 8 * GIB / 360e9
    assert collective_time_s("all_gather", GIB, 8, 1, H200) == pytest.approx(ring + 7 * 4e-6)
    assert collective_time_s("reduce_scatter", GIB, 8, 1, H200) == pytest.approx(ring + 7 * 4e-6)
    assert collective_time_s("all_reduce", GIB, 8, 1, H200) == pytest.approx(2 * ring + 14 * 4e-6)


def test_small_messages_match_what_eight_h200_measured() -> None:
    """64 KiB took 20 to 36 us over the eight devices of a node, in every operation."""
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert 20e-6 < collective_time_s(op, 2**16, 8, 1, H200) < 36e-6  # type: ignore[arg-type]


def test_between_nodes_each_member_brings_its_link() -> None:
    # Eight members a node: 8 x 50 GB/s is more than a device's 360 GB/s; with two it is 100 GB/s, with one 50 GB/s.
    whole = collective_time_s("all_gather", GIB, 16, 1, H200)
    assert whole == pytest.approx(15 / 16 * GIB / 360e9 + 14 * 4e-6 + 2 * 5e-6)
    pairs = collective_time_s("all_gather", GIB, 4, 4, H200)
    assert pairs == pytest.approx(3 / 4 * GIB / 100e9, rel=0.01)
    apart = collective_time_s("all_gather", GIB, 4, 8, H200)
    assert apart == pytest.approx(3 / 4 * GIB / 50e9, rel=0.01)


def test_links_that_join_nodes_carry_what_stays_among_these() -> None:
    linked = dataclasses.replace(H200, linked_devices=72)
    inside = collective_time_s("all_gather", GIB, 64, 1, linked)
    assert inside == pytest.approx(63 / 64 * GIB / 360e9 + 63 * 4e-6)
    assert collective_time_s("all_gather", GIB, 64, 1, H200) > inside
    # 128 ranks: two domains, of which the first holds 72; each brings its 72 links
    across = collective_time_s("all_to_all", GIB, 128, 1, linked)
    assert across > GIB * 56 / 128 / 50e9 > collective_time_s("all_to_all", GIB, 64, 1, linked)


def test_all_to_all_between_nodes_is_bound_by_what_leaves_the_node() -> None:
    time = collective_time_s("all_to_all", GIB, 16, 1, H200)
    assert time == pytest.approx(GIB / 2 / 50e9, rel=0.01)  # half of each rank's buffer


def test_all_reduce_over_many_ranks_uses_the_tree_when_small() -> None:
    small = collective_time_s("all_reduce", 8, 512, 1, H200)
    assert small == pytest.approx(2 * (3 * 4e-6 + 6 * 5e-6), rel=0.01)


def test_p2p_takes_the_slowest_hop() -> None:
    assert collective_time_s("p2p", 1e9, 4, 2, H200) == pytest.approx(1e9 / 360e9 + 4e-6)
    assert collective_time_s("p2p", 1e9, 4, 4, H200) == pytest.approx(1e9 / 50e9 + 5e-6)


def test_longer_and_farther_is_never_faster() -> None:
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"):
        times = [collective_time_s(op, GIB, n, 1, H200) for n in (2, 4, 8, 16, 64, 512)]  # type: ignore[arg-type]
        assert times == sorted(times)


def test_no_link_between_nodes() -> None:
    with pytest.raises(InfeasibleLayout, match="16 ranks, 1 apart, does not fit on one node of 8"):
        collective_time_s("all_reduce", GIB, 16, 1, ONE_NODE)


def test_unknown_operation() -> None:
    with pytest.raises(ValueError, match="all_reduce, all_gather"):
        collective_time_s("broadcast", GIB, 8, 1, H200)  # type: ignore[arg-type]


def test_two_devices_of_a_node_have_rates_of_their_own() -> None:
    pair = dataclasses.replace(H200.intra_node, bandwidth=360e9, pair_bandwidth=250e9, pair_latency_s=20e-6)
    cluster = dataclasses.replace(H200, intra_node=pair)
    assert collective_time_s("all_gather", GIB, 2, 1, cluster) == pytest.approx(GIB / 2 / 250e9 + 20e-6)
    assert collective_time_s("all_to_all", GIB, 2, 1, cluster) == pytest.approx(GIB / 2 / 250e9 + 20e-6)
    assert collective_time_s("all_gather", GIB, 4, 1, cluster) == pytest.approx(3 / 4 * GIB / 360e9 + 3 * 4e-6)
    assert collective_time_s("all_gather", GIB, 2, 8, cluster) > GIB / 2 / 50e9  # of two nodes
    sums = dataclasses.replace(pair, pair_reduce_bandwidth=300e9, pair_exchange_bandwidth=280e9)
    known = dataclasses.replace(H200, intra_node=sums)
    assert collective_time_s("all_reduce", GIB, 2, 1, cluster) == pytest.approx(GIB / 250e9 + 2 * 20e-6)
    assert collective_time_s("all_reduce", GIB, 2, 1, known) == pytest.approx(GIB / 300e9 + 2 * 20e-6)
    assert collective_time_s("all_to_all", GIB, 2, 1, known) == pytest.approx(GIB / 2 / 280e9 + 20e-6)
    for op, n, stride in (("all_gather", 2, 1), ("all_reduce", 4, 1), ("all_reduce", 2, 8), ("all_to_all", 4, 1)):
        assert collective_time_s(op, GIB, n, stride, known) == collective_time_s(op, GIB, n, stride, cluster)  # type: ignore[arg-type]
    # A link that a user makes slower than two were measured to be is as slow for two.
    slow = dataclasses.replace(cluster, intra_node=dataclasses.replace(pair, bandwidth=40e9, latency_s=1e-3))
    assert collective_time_s("all_gather", GIB, 2, 1, slow) == pytest.approx(GIB / 2 / 40e9 + 1e-3)


def test_compute_and_traffic_together_take_less_than_one_after_the_other_and_more_than_either() -> None:
    for compute, traffic in ((1.0, 0.1), (1.0, 0.4), (1.0, 1.0), (0.1, 1.0), (1.0, 0.0), (0.0, 1.0)):
        both = together_s(compute, traffic)
        assert max(compute, traffic) <= both <= compute + traffic
        assert (both == pytest.approx(max(compute, traffic))) == (min(compute, traffic) == 0)
        assert together_s(compute, traffic, contention=Contention(0.0, 0.0)) == max(compute, traffic)
    assert together_s(1.0, 0.1) == pytest.approx(1 + 0.1 * 2.75 * (1 - 1 / 1.27))
