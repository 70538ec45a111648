"""Experts to which a code base sends a token once for each rank: ranks reached, seconds added, and published runs."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.predict_table import predict_frame
from workloads.predict.experts.columns import Experts
from workloads.predict.experts.dispatched import ranks_reached
from workloads.predict.experts.ratios import routed_rows
from workloads.predict.predictor import Predictor
from workloads.predict.table import read_points

PUBLISHED = Path(__file__).parent / "published_experts.csv"
"""Runs that were read only after the terms had been written: no term was set or changed by them."""
ROW = {
    "gpu": "GB200", "gpus": 64, "layers": 16, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 128000,
    "tie_embeddings": False, "num_experts": 128, "experts_per_token": 8, "expert_ffn": 1536, "shared_experts": 0,
    "dense_layers": 0, "seq": 4096, "gbs_seqs": 512, "mbs": 2, "dp": 64, "tp": 1, "pp": 1, "cp": 1, "ep": 32,
    "sharding": "zero1", "recompute": "none", "precision": "bf16", "codebase": "Megatron-Bridge",
}  # fmt: skip


def experts(number: int, chosen: int, groups: tuple[int, int] = (1, 1)) -> Experts:
    return Experts(number, chosen, 1024, 0, 0, 4096, groups=groups)


@pytest.mark.parametrize(("number", "chosen", "ranks"), [(8, 2, 4), (8, 3, 8), (12, 4, 3), (6, 6, 3), (8, 2, 1)])
def test_ranks_reached_are_counted_over_every_choice(number: int, chosen: int, ranks: int) -> None:
    each = number // ranks
    counts = [len({one // each for one in choice}) for choice in combinations(range(number), chosen)]
    assert ranks_reached(experts(number, chosen), ranks) == pytest.approx(np.mean(counts), rel=1e-12)


def test_a_token_of_few_groups_reaches_the_ranks_of_these_alone() -> None:
    """Four groups of two experts on eight ranks, two groups chosen: three experts of the four on four ranks."""
    assert ranks_reached(experts(8, 3, (4, 2)), 8) == 3
    assert ranks_reached(experts(256, 8, (8, 4)), 8) < 4 < ranks_reached(experts(256, 8), 8)
    assert ranks_reached(experts(256, 8, (8, 4)), 1) == 1


def step_s(**changed: object) -> float:
    frame = pd.DataFrame([ROW | changed])
    return float(predict_frame(frame, None).predictions["step_time_s"].iloc[0])


def test_a_wider_exchange_and_more_choices_cost_more() -> None:
    base = step_s()
    assert step_s(ep=8) < base, "fewer ranks reached"
    assert step_s(experts_per_token=4, expert_ffn=3072) < base, "as many columns in half as many copies"
    assert step_s(gpu="H100", ep=8) / step_s(gpu="H100", ep=64) < step_s(ep=8) / step_s(ep=64), "the network between"


def test_one_kernel_and_a_hidden_exchange_pay_in_the_format_of_the_recipes_alone() -> None:
    """The ratio to the dense model falls by more than the hidden exchange; fp8 with one scale has no such recipe."""
    frame = pd.DataFrame([ROW, ROW | {"precision": "fp8"}, ROW | {"precision": "mxfp8"}])
    profiles = read_profiles()
    table = read_points(frame.astype(object), read_clusters(), profiles, profiles[GENERAL])
    of_16, of_fp8, of_mxfp8 = routed_rows(table, profiles).factors.work
    assert 1.2 < of_16 < of_fp8, "casts of every copy, beside shorter products"
    assert of_mxfp8 < 1.12 and table.points.captured.tolist() == [0, 0, 1]


def test_a_router_that_chooses_fills_one_rank_more_and_no_recipe_of_known_sizes_applies() -> None:
    assert 1.1 < step_s(routing="learned") / step_s(routing="balanced") < 1.7
    assert step_s() == step_s(routing="") == step_s(routing="forced balance")
    assert step_s(precision="mxfp8", routing="natural") > 1.7 * step_s(precision="mxfp8")
    for codebase in ("Megatron-LM", "ultrasweep"):
        assert step_s(codebase=codebase, routing="learned") > 1.1 * step_s(codebase=codebase)


def test_a_copy_for_each_expert_takes_longer_than_one_for_each_rank() -> None:
    assert step_s(dispatcher="alltoall") > 1.1 * step_s(dispatcher="DeepEP") == 1.1 * step_s()
    megatron = {"codebase": "Megatron-LM", "gpu": "H100"}
    assert step_s(**megatron, dispatcher="hybridep") < step_s(**megatron) == step_s(**megatron, dispatcher="all-to-all")


def test_weights_gathered_once_a_step_are_not_gathered_in_every_micro_batch() -> None:
    row = ROW | {"gpu": "H100", "ep": 8, "sharding": "fsdp", "mbs": 1, "codebase": "AutoModel"}
    profiles = read_profiles()
    seen = []
    for profile in (profiles["nemo_automodel"], profiles["fsdp"]):
        named = pd.DataFrame([row | {"codebase": profile.name}]).astype(object)
        table = read_points(named, read_clusters(), profiles, profiles[GENERAL])
        seen.append(Predictor.learn(None, profiles).seconds(routed_rows(table, profiles).points).seen[0])
    assert seen[0] < 0.3 * seen[1]


def test_published_runs_are_near_their_predictions() -> None:
    rows = pd.read_csv(PUBLISHED)
    found = predict_frame(rows.drop(columns="step_time_s"), None).predictions
    off = found["step_time_s"].astype(float) / rows["step_time_s"] - 1
    inside = rows["step_time_s"].between(found["step_time_low_s"], found["step_time_high_s"])
    assert len(rows) == 9 and off.abs().mean() < 0.15 and off.abs().max() < 0.3
    assert inside.mean() > 0.85
    assert found["fits"].sum() >= 8, "all of them ran; of one the recomputation is not published"


def test_states_in_16_bits_are_half_of_those_with_copies_in_32() -> None:
    """AutoModel trains Qwen3-30B-A3B on eight H100 of 80 GB: 30.5 billion parameters of 8 bytes, of 16 elsewhere."""
    row = ROW | {
        "gpu": "H100", "gpus": 8, "dp": 8, "ep": 8, "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4,
        "expert_ffn": 768, "vocab": 151936, "mbs": 4, "recompute": "full", "sharding": "fsdp",
    }  # fmt: skip
    frame = pd.DataFrame([row | {"codebase": name} for name in ("AutoModel", "fsdp")])
    own, other = predict_frame(frame, None).predictions["predicted_peak_allocated_bytes"].astype(float)
    assert 8 * 30.5e9 / 8 < own < 0.85 * 80e9
    assert other - own > 8 * 30.5e9 / 8
