"""Tiers of a cluster's network: how they are read, what they say about the cluster, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.predicting.codebases import read_clusters
from tests.workloads.spec.test_cluster import fields
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.cluster_fields import check_cluster, cluster_from_dict, read_cluster, to_dict

NODE = {"devices": 8, "bandwidth": "450 GB/s", "latency_s": "4 us", "name": "NVLink"}
LEAF = {"devices": 256, "bandwidth": "400 Gb/s", "latency_s": "5 us"}
SPINE = {"devices": 1024, "bandwidth": "25 GB/s", "latency_s": 5e-6}
BEYOND = {"bandwidth": "10 GB/s", "latency_s": 5e-6}


def tiered(*tiers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    without = {key: value for key, value in fields().items() if not key.endswith("_node") or key[0] == "d"}
    return {**without, "tiers": [*tiers], **changes}


def read(*tiers: dict[str, Any], **changes: Any) -> ClusterSpec:
    return check_cluster(cluster_from_dict(tiered(*tiers, **changes)))


def test_tiers_survive_the_trip_through_plain_data_without_the_other_form() -> None:
    cluster = read(NODE, LEAF, SPINE)
    plain = to_dict(cluster)
    assert cluster_from_dict(plain) == cluster
    assert not {"intra_node", "inter_node", "linked_devices"} & plain.keys()
    assert "tiers" not in to_dict(cluster_from_dict(fields())), "what older versions wrote and read stays"
    assert [tier["bandwidth"] for tier in plain["tiers"]] == [450e9, 50e9, 25e9]


def test_tiers_say_how_wide_a_domain_and_the_cluster_are() -> None:
    cluster = read(NODE, LEAF, SPINE)
    assert (cluster.domain, cluster.joined_devices, cluster.inside.name) == (8, 1024, "NVLink")
    assert [tier.name for tier in cluster.outside] == ["tier of 256 devices", "tier of 1024 devices"]
    assert read(NODE, LEAF, BEYOND).joined_devices is None
    # pairs inside of a node, and NVLink that joins the nodes of a rack
    pairs = {**NODE, "devices": 2, "name": "pairs"}
    assert (read(pairs, NODE, LEAF).domain, read(pairs, NODE, LEAF).inside.devices) == (8, 8)
    rack = {**NODE, "devices": 72, "network": False, "name": "rack"}
    assert read(NODE, rack, BEYOND).domain == 72
    assert [tier.network for tier in read(NODE, {**rack, "network": None}, BEYOND).tiers_by_size] == [False, True, True]
    alone = read({**LEAF, "network": True}, devices_per_node=1)
    assert (alone.domain, len(alone.outside)) == (1, 1)


def test_both_forms_say_the_same_about_the_shipped_clusters() -> None:
    for short in read_clusters().values():
        if short.tiers:
            continue
        assert short.intra_node is not None
        listed: list[dict[str, Any]] = [{"devices": short.domain, **to_dict(short)["intra_node"]}]
        if short.inter_node is not None:
            listed.append(to_dict(short)["inter_node"])
        plain = {name: value for name, value in to_dict(short).items() if "_node" not in name or name[0] == "d"}
        tiers = cluster_from_dict({**plain, "linked_devices": None, "tiers": listed})
        assert (tiers.domain, tiers.joined_devices) == (short.domain, short.joined_devices)
        assert tiers.inside.link == short.inside.link
        assert [tier.link for tier in tiers.outside] == [tier.link for tier in short.outside]


def test_one_form_replaces_the_other_in_a_file_on_top() -> None:
    inherited = {**fields(), "linked_devices": 16}
    nulls = {"intra_node": None, "inter_node": None, "linked_devices": None}
    assert read_cluster({**inherited, **nulls, "tiers": [NODE, LEAF]}).joined_devices == 256
    assert read_cluster({**inherited, "tiers": None}).domain == 16


BOTH = (
    "cluster ours: tiers and intra_node and inter_node both describe the network; keep one form, and set what the "
    r"file inherits of the other to null \(intra_node: null, or tiers: null\)"
)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (fields(tiers=[NODE]), BOTH),
        (tiered(NODE, LEAF, linked_devices=72), "tiers and linked_devices both describe the network"),
        (
            {**tiered(), "tiers": NODE},
            r"must be a list of tiers from the innermost outwards, such as \[\{dev",
        ),
        (tiered({**NODE, "name": "a"}, {**LEAF, "name": "a"}), r"tiers\[1\]: name=a is that of another tier"),
        (tiered(), r"cluster ours: tiers=\[\] names no tier"),
        (tiered(NODE, "leaf"), r"cluster ours: tiers\[1\]='leaf' must be a mapping"),  # type: ignore[arg-type]
        (tiered(NODE, {**LEAF, "band": 1}), r"cluster ours: tiers\[1\]: no option 'band'; did you mean 'bandwidth'"),
        (tiered(NODE, {"devices": 16}), r"tiers\[1\]: bandwidth, latency_s must be given"),
        (tiered({**NODE, "bandwidth": 450}), r"tiers\[0\]\.bandwidth=450 means 450 B/s; between"),
        (tiered({**NODE, "bandwidth": "450 GX/s"}), r"tiers\[0\]\.bandwidth='450 GX/s': 'GX/s' is not a unit"),
        (tiered({**NODE, "devices": 0}), r"tiers\[0\]\.devices=0 must be a whole number of at least 1"),
        (tiered({**NODE, "network": "no"}), r"tiers\[0\]\.network='no'; it may be true or false"),
        (tiered({**NODE, "name": 72}), r"tiers\[0\]\.name=72 must be text; put it in quotes"),
        (tiered(BEYOND), r"tiers\[0\]: devices must be given; only the outermost of several tiers may leave it out"),
        (tiered(NODE, {**LEAF, "devices": None}, SPINE), r"tiers\[1\]: devices must be given; only the outermost"),
        (tiered(LEAF, NODE), r"tiers\[1\]: devices=8 is not more than the 256 of .*; tiers are listed from the inner"),
        (
            tiered(NODE, {**NODE, "name": "again"}),
            r"tiers\[1\]: devices=8 is not more than the 8 of cluster ours: tiers\[0\]",
        ),
        (
            tiered(NODE, LEAF, {**SPINE, "devices": 1000}),
            r"tiers\[2\]: devices=1000 is not a multiple of the 256 of .*tiers\[1\]",
        ),
        (tiered(NODE, {**LEAF, "devices": 20}), r"tiers\[1\]: devices=20 is not a multiple of devices_per_node=8"),
        (tiered({**NODE, "devices": 3}, LEAF), r"tiers\[0\]: devices=3 does not divide devices_per_node=8"),
        (
            tiered(NODE, SPINE, {**LEAF, "devices": 2048}),
            r"tiers\[2\]: bandwidth=5e\+10 B/s of a device is more than the 2.5e\+10 of .*tiers\[1\] inside of it",
        ),
        (tiered(NODE, {**LEAF, "pair_bandwidth": 1e10}), r"tiers\[1\] has no pair rates; give them in the innermost"),
        (
            tiered(NODE, {**LEAF, "network": True}, {**SPINE, "network": False}),
            r"tiers\[2\]: network=false, but .*tiers\[1\] inside of it is of the network",
        ),
        (tiered({**LEAF, "network": True}), "the first tier of the network is inside a node of 8 devices; list the"),
        (tiered({**NODE, "devices": 2}, BEYOND), "the first tier of the network is inside a node of 8 devices"),
        (
            tiered(NODE, LEAF, nodes=33),
            "the outermost tier joins 256 devices, fewer than the 264 of nodes=33 x devices_per_node=8",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(written: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSweep, match=told) as error:
        read_cluster(written)
    assert "\n" not in str(error.value)


def test_every_mistake_is_told() -> None:
    with pytest.raises(InvalidSweep) as error:
        read_cluster(tiered(LEAF, {**NODE, "pair_bandwidth": 1e10}, {**BEYOND, "bandwidth": "60 GB/s"}))
    assert [part in str(error.value) for part in ("not more than the 256", "no pair rates")] == [True, True]
    assert len(error.value.messages) == 3
