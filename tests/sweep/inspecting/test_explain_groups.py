"""The tier of each group of ranks in ``explain``."""

from __future__ import annotations

import dataclasses
from typing import Any

from sweep.inspecting.explain_groups import group_fields, group_lines, placed_groups
from sweep.predicting.codebases import read_clusters
from tests.workloads.costs.shapes import DEEPSEEK_V3, LLAMA_8B
from workloads.spec.experiment import Experiment

GB200, H100 = read_clusters()["gb200_nvl72"], read_clusters()["h100_ib400"]


def of(**fields: Any) -> Experiment:
    return Experiment.canonical(**{"model": LLAMA_8B, "global_batch_size": 1024, "seq_len": 4096, **fields})


def placed(e: Experiment, cluster: Any) -> dict[str, tuple[int, int, str]]:
    return {one.name: (one.ranks, one.apart, one.tier.name) for one in placed_groups(e, cluster)}


def test_groups_of_a_dense_layout() -> None:
    e = of(dp_replicate=4, dp_shard=4, tp=2, cp=2, pp=4, pp_schedule="1f1b", zero_stage=1)
    assert placed(e, H100) == {
        "tp": (2, 1, "node"),
        "cp": (2, 2, "node"),
        "dp shards": (8, 2, "between nodes"),  # with the ranks of cp
        "dp replicas": (4, 16, "between nodes"),
        "pp": (4, 64, "between nodes"),
    }
    assert placed(e, GB200) == {
        "tp": (2, 1, "NVLink rack"),
        "cp": (2, 2, "NVLink rack"),
        "dp shards": (8, 2, "NVLink rack"),
        "dp replicas": (4, 16, "NVLink rack"),
        "pp": (4, 64, "scalable unit"),
    }
    assert group_lines(of(), H100) == [], "one rank has no groups"
    assert group_lines(e, None) == [] and group_fields(e, None) is None


def test_groups_of_experts() -> None:
    e = of(model=DEEPSEEK_V3, dp=1024, ep=64, zero_stage=1)
    found = placed(e, GB200)
    assert found["ep"] == (64, 1, "NVLink rack")
    assert found["expert shards"] == (16, 64, "spine"), "wider than the 576 devices of a unit"
    assert found["dp shards"] == (1024, 1, "spine")


def test_lines_say_the_bandwidth_of_a_ring_and_where_groups_need_segments() -> None:
    """A shard group of 1,024 leaves a rack with 72 links of 50 GB/s, more than NVLink's 640; one expert group of 16 has
    one member a rack. 64 ranks do not divide the 72 devices of a rack; 18 nodes of 4 are one, of which 16 are used."""
    network, segments = group_lines(of(model=DEEPSEEK_V3, dp=1024, ep=64, zero_stage=1), GB200)
    assert network == (
        "network    on gb200_nvl72, by rank order: ep 64 in NVLink rack (640 GB/s), dp shards 1024 in spine (640 GB/s)"
        ", expert shards 16 in spine (50 GB/s)"
    )
    assert segments.strip() == (
        "predicted for ranks on 64 of the 72 devices of each NVLink rack: segments of 16 nodes (Slurm's topology/block"
        ": +launcher.sbatch.segment=16)"
    )
    # Groups that divide a rack, or a layout inside of one, need no segments.
    assert len(group_lines(of(tp=8, dp=128, zero_stage=1), GB200)) == 1
    assert len(group_lines(of(model=DEEPSEEK_V3, dp=64, ep=64), GB200)) == 1


def test_fields_of_the_document() -> None:
    (tp, shards) = group_fields(of(tp=8, dp=4, zero_stage=1), H100) or []
    assert H100.intra_node is not None
    rate, latency = H100.intra_node.bandwidth, H100.intra_node.latency_s
    assert tp == {"group": "tp", "ranks": 8, "apart": 1, "tier": "node", "tier_devices": 8} | {
        "bandwidth": rate,
        "latency_s": latency,
    }
    assert (shards["tier_devices"], shards["bandwidth"]) == (None, 50e9)


def test_a_layout_that_the_network_cannot_join_has_no_groups() -> None:
    narrow = dataclasses.replace(GB200, tiers=GB200.tiers[:1])
    assert group_lines(of(dp=128), narrow) == []
