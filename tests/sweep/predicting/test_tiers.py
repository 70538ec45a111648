"""Predictions on networks of several tiers: those of two links where these say the same, by hand, and monotonic."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.forecast import Forecast
from tests.sampling import SEED
from tests.workloads.costs.shapes import DEEPSEEK_V3, LLAMA_8B, MIXTRAL
from tests.workloads.predict.tables import random_rows, row
from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.collectives import group_of
from workloads.predict import network_terms
from workloads.predict.experts.ratios import routed_rows
from workloads.predict.parameters import TIME
from workloads.predict.points import Points
from workloads.predict.predictor import Predictor
from workloads.predict.table import read_points
from workloads.rules.layout_rules import layout_violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment
from workloads.spec.hardware.network import TierSpec

CLUSTERS, PROFILES = read_clusters(), read_profiles()
NODE = TierSpec(name="node", devices=8, bandwidth=360e9, latency_s=4e-6)
LEAF = TierSpec(name="leaf", devices=32, bandwidth=50e9, latency_s=5e-6)
SPINE = TierSpec(name="spine", devices=2048, bandwidth=5e9, latency_s=10e-6)


def listed(short: ClusterSpec) -> ClusterSpec:
    """The cluster in the form of a list of tiers."""
    tiers = tuple(dataclasses.replace(tier, name="", network=None) for tier in short.tiers_by_size)
    return dataclasses.replace(short, intra_node=None, inter_node=None, linked_devices=None, tiers=tiers)


def on(*tiers: TierSpec) -> ClusterSpec:
    return dataclasses.replace(CLUSTERS["h100_ib400"], intra_node=None, inter_node=None, tiers=tiers)


def drawn(count: int, least: int, most: int) -> list[Experiment]:
    """Layouts of that many devices, by the seed."""
    draw, found = random.Random(f"{SEED}/{count}"), list[Experiment]()
    while len(found) < count:
        model = draw.choice([LLAMA_8B, MIXTRAL, DEEPSEEK_V3])
        dp, micro_batches, pp = draw.choice([1, 4, 16, 64]), draw.choice([1, 4, 16]), draw.choice([1, 2, 4])
        fields: dict[str, Any] = {"ep": draw.choice([1, 8, 64])} if model.moe is not None else {}
        fields |= {"pp_schedule": "1f1b"} if pp > 1 else {}
        try:
            one = Experiment.canonical(
                model=model,
                dp=dp,
                tp=draw.choice([1, 2, 8, 16]),
                cp=draw.choice([1, 1, 2]),
                pp=pp,
                zero_stage=draw.choice([0, 1, 2, 3]),
                global_batch_size=dp * micro_batches,
                seq_len=4096,
                recompute=draw.choice(["none", "full"]),
                **fields,
            )
        except InvalidExperiment:
            continue
        if least <= one.world_size <= most and not layout_violations(one):
            found.append(one)
    return found


def seconds(cluster: ClusterSpec, experiments: list[Experiment]) -> np.ndarray:
    return np.array([time.step_time_s if time else np.nan for time in Forecast.of(cluster).times(experiments)])


@pytest.mark.parametrize("name", ["h100_ib400", "gb200", "cpu"])
def test_two_tiers_predict_exactly_what_two_links_do(name: str) -> None:
    short = CLUSTERS[name]
    tiers, layouts = listed(short), drawn(40, 1, 4096)
    assert Forecast.of(tiers).times(layouts) == Forecast.of(short).times(layouts)
    inside = [one for one in layouts if short.joined_devices is None or one.world_size <= short.joined_devices]
    simulated = [StepTimes(cluster).seconds(inside) for cluster in (tiers, short)]
    assert np.array_equal(*simulated, equal_nan=True)


def test_rows_of_a_table_are_predicted_alike() -> None:
    frame = random_rows(50, 3).assign(gpu="H100")
    predictor, found = Predictor.learn(None, PROFILES), []
    for clusters in (CLUSTERS, {**CLUSTERS, "h100_ib400": listed(CLUSTERS["h100_ib400"])}):
        table = read_points(frame, clusters, PROFILES, PROFILES[GENERAL])
        assert not any(table.reasons)
        found.append((predictor.predict(table.points).step_time_s, table.notes))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def of_tiers(cluster: ClusterSpec, count: int) -> Points:
    """Rows on a cluster, as inputs of the closed form."""
    points = Forecast.of(cluster).points(drawn(count, 16, 2048))
    return dataclasses.replace(points, **network_terms.network_rows(cluster, count))


@pytest.mark.parametrize("inner", [False, True])
def test_the_closed_form_has_the_bandwidth_and_the_hops_of_collectives(inner: bool) -> None:
    """Without the factors of the fit, of which the closed form's bandwidths have two."""
    pairs = [TierSpec(name="pair", devices=2, bandwidth=600e9, latency_s=2e-6)] if inner else []
    cluster = on(*pairs, NODE, LEAF, SPINE)
    points = of_tiers(cluster, 30)
    plain = {name: one.value for name, one in TIME.items()} | {"nvlink": 1.0, "network": 1.0}
    for ranks, apart in ((2, 1), (4, 1), (8, 1), (4, 2), (32, 1), (4, 8), (64, 1), (128, 8), (2, 32), (16, 32)):
        sizes, strides = (np.full(len(points), float(value)) for value in (ranks, apart))
        group = group_of(ranks, apart, cluster)
        rate = network_terms.bandwidth(points, sizes, strides, plain)
        assert rate == pytest.approx(group.bandwidth)
        if ranks * apart > 8:  # inside of a domain the collectives' ring has one hop less
            assert ranks * network_terms.hop_s(points, sizes, strides) == pytest.approx(group.startup_s)
    spans = {1: "pair", 2: "pair", 4: "node", 8: "node", 9: "leaf", 32: "leaf", 64: "spine"}
    for span, name in spans.items():
        tier = next((one for one in cluster.tiers if one.name == name), NODE)
        assert network_terms.slowest_rate(points, np.full(len(points), float(span))) == pytest.approx(tier.bandwidth)


def test_rows_of_clusters_with_and_without_more_tiers_are_predicted_together() -> None:
    """As one table, and as rows that a calibration joins: the tiers of one are no tiers of the other."""
    clusters = {"short": CLUSTERS["h100_ib400"], "long": on(NODE, LEAF, SPINE), "flat": on(NODE, LEAF)}
    parts = [of_tiers(cluster, 12) for cluster in clusters.values()]
    alone = [Predictor.learn(None, PROFILES).predict(part).step_time_s for part in parts]
    together = Predictor.learn(None, PROFILES).predict(Points.joined(parts)).step_time_s
    assert np.array_equal(together, np.concatenate(alone))
    named = {name: dataclasses.replace(cluster, name=name) for name, cluster in clusters.items()}
    frame = random_rows(3, 1).assign(gpu="", gpus=32, dp=32, tp=1, pp=1, cluster=[*clusters])
    table = read_points(frame, named, PROFILES, PROFILES[GENERAL])
    assert table.points.outer.shape == (3, 1, 3)
    assert np.isnan(table.points.outer[:, 0, 1]).tolist() == [True, False, True]


def test_a_faster_outer_tier_is_never_slower_in_the_plan() -> None:
    layouts = drawn(60, 64, 2048)
    before = np.full(len(layouts), np.inf)
    some = False
    for rate in (1e9, 5e9, 25e9, 50e9):
        now = seconds(on(NODE, LEAF, dataclasses.replace(SPINE, bandwidth=rate)), layouts)
        assert np.isfinite(now).all()
        assert (now <= before * (1 + 1e-12)).all(), f"faster with less than {rate:g} B/s"
        some |= bool((now < 0.99 * before).any()) and np.isfinite(before).all()
        before = now
    assert some, "no layout felt the outer tier"
    unlimited = seconds(on(NODE, dataclasses.replace(LEAF, devices=None)), layouts)
    assert unlimited == pytest.approx(seconds(on(NODE, LEAF, dataclasses.replace(LEAF, devices=2048)), layouts))


@pytest.mark.parametrize("codebase", ["ultrasweep", "Megatron-LM"])
def test_rows_with_and_without_experts_are_never_slower_on_a_faster_spine(codebase: str) -> None:
    experts = {"num_experts": 128, "experts_per_token": 8, "expert_ffn": 768, "ep": 64, "dp": 128, "tp": 1, "pp": 1}
    rows = [row(8, gpus=128, dp=64, tp=2), row(8, gpus=128, dp=32, pp=4), row(8, gpus=128, dp=128, sharding="zero3")]
    frame = pd.DataFrame([*rows, row(1, gpus=128, **experts)]).assign(gpu="", cluster="ours", codebase=codebase)
    before = np.full(len(frame), np.inf)
    for rate in (1e9, 5e9, 25e9, 50e9):
        cluster = dataclasses.replace(on(NODE, LEAF, dataclasses.replace(SPINE, bandwidth=rate)), name="ours")
        table = read_points(frame, {"ours": cluster}, PROFILES, PROFILES[GENERAL])
        assert not any(table.reasons)
        routed = routed_rows(table, PROFILES)
        assert not routed.refused
        now = routed.predict(Predictor.learn(None, PROFILES)).step_time_s
        assert (now <= before * (1 + 1e-12)).all()
        before = now
    alone = {"ours": dataclasses.replace(on(NODE, dataclasses.replace(LEAF, devices=None)), name="ours")}
    of_two = routed_rows(read_points(frame, alone, PROFILES, PROFILES[GENERAL]), PROFILES).predict(
        Predictor.learn(None, PROFILES)
    )
    assert (before >= of_two.step_time_s * (1 - 1e-12)).all(), "hops across the spine take longer"
    assert before == pytest.approx(of_two.step_time_s, rel=0.1)


def test_what_crosses_a_slow_spine_takes_its_time_in_every_kind_of_layout() -> None:
    """256 devices in eight leaves of 32. Experts of one leaf exchange nothing across the spine, those of 256 do; copies
    of shards of a leaf send gradients across it once a step, shards over all devices for each micro-batch."""
    dense = {"model": LLAMA_8B, "global_batch_size": 2048, "seq_len": 4096, "zero_stage": 3}
    routed = {"model": DEEPSEEK_V3, "global_batch_size": 1024, "seq_len": 4096, "zero_stage": 1, "dp": 256}
    pairs = (
        (Experiment.canonical(**dense, dp_replicate=8, dp_shard=32), Experiment.canonical(**dense, dp_shard=256)),
        (Experiment.canonical(**routed, ep=32), Experiment.canonical(**routed, ep=256)),
    )
    fast, slow = on(NODE, LEAF, dataclasses.replace(SPINE, bandwidth=50e9)), on(NODE, LEAF, SPINE)
    for few, many in pairs:
        longer = seconds(slow, [few, many]) / seconds(fast, [few, many])
        assert 1.0 <= longer[0] < longer[1] and longer[1] > 1.3, longer


def test_layouts_inside_of_a_leaf_do_not_feel_the_spine() -> None:
    layouts = drawn(20, 16, 32)
    slow = dataclasses.replace(SPINE, bandwidth=1e8)
    assert np.array_equal(seconds(on(NODE, LEAF, SPINE), layouts), seconds(on(NODE, LEAF, slow), layouts))
    wider = Experiment.canonical(model=LLAMA_8B, dp=64, zero_stage=1, global_batch_size=64, seq_len=4096)
    assert Forecast.of(on(NODE, LEAF)).times([wider]) == [None], "wider than the outermost tier"
