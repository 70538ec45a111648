"""Step times of experiments: a plain one is a row of a table, any other that row times a factor of its structure."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from sweep.composing.conffiles import ConfFolders
from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from tests.fixed_task import fixed_tasks
from tests.workloads.costs.shapes import DEEPSEEK_V3, LLAMA_8B, MIXTRAL, ONE_NODE
from tests.workloads.predict.tables import random_rows
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.flops import hardware_flops_per_token
from workloads.costs.shape.partition import experiment_layers
from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.sent import step_traffic
from workloads.predict import layouts, time_terms
from workloads.predict.experts.overheads import EXPERTS_ALONE, expert_factor
from workloads.predict.facts import facts_of
from workloads.predict.parameters import time_parameters
from workloads.predict.predictor import Predictor
from workloads.predict.table import read_points
from workloads.spec.experiment import ENGINES, Experiment
from workloads.spec.model_spec import ModelSpec

H200 = read_clusters()["h200"]
PROFILES = read_profiles()
PREDICTOR = Predictor.learn(None, PROFILES)
assert MIXTRAL.moe is not None
NARROW = dataclasses.replace(
    MIXTRAL, name="narrow experts", moe=dataclasses.replace(MIXTRAL.moe, expert_hidden_size=1408)
)
"""With experts as wide as the widest to which the factor of experts was fitted."""


def of(**fields: Any) -> Experiment:
    """A layout with eager steps and rounded gradients, as tables have them."""
    usual = {"model": LLAMA_8B, "seq_len": 4096, "global_batch_size": 64, "cuda_graph": "none"}
    return Experiment.canonical(**{**usual, "gradient_accumulation_fusion": False, **fields})


def step(*experiments: Experiment) -> list[float]:
    factors = layouts.Structures(H200).factors(experiments)
    return factors.step_s(PREDICTOR.seconds(layouts.points_of(experiments, H200))).tolist()


def test_an_experiment_and_the_same_row_of_a_table_are_one_prediction() -> None:
    frame = random_rows(60, 5)
    frame = frame[frame["layers"] == 32].reset_index(drop=True)
    table = read_points(frame, read_clusters(), PROFILES, PROFILES[GENERAL])
    assert not any(table.reasons)
    experiments = [
        of(
            dp=row["dp"],
            tp=row["tp"],
            pp=row["pp"],
            micro_batch_size=row["mbs"],
            global_batch_size=row["dp"] * row["mbs"] * row["grad_accum"],
            zero_stage=int(row["sharding"][-1]),
            recompute=row["recompute"],
            engine_version="4",  # in which tensor-parallel ranks shared no memory
        )
        for row in frame.to_dict("records")
    ]
    assert all(layouts.is_plain(one) for one in experiments)
    assert step(*experiments) == pytest.approx(PREDICTOR.predict(table.points).step_time_s.tolist())


ODD = [
    of(dp=4, pp=2, pp_schedule="zero_bubble_v"),
    of(dp=4, pp=2, pp_split="even"),
    of(dp_replicate=2, dp_shard=4, zero_stage=3),
    of(dp=4, tp=2, sequence_parallel=False),
    of(dp=4, tp=2),
    of(dp=4, cp=2, cp_kind="allgather"),
    of(dp=8, recompute="full", recompute_every=2),
    of(dp=8, recompute="norm+swiglu"),
    of(dp=8, ep=8, model=MIXTRAL, zero_stage=2),
    of(dp=8, tp=8, pp=4, ep=8, model=DEEPSEEK_V3, zero_stage=1),
]


@pytest.mark.parametrize(
    ("model", "unused"), [(MIXTRAL, {"ffn_hidden_size": 999}), (DEEPSEEK_V3, {"head_dim": 57})], ids=["ffn", "head"]
)
@pytest.mark.parametrize(
    "layout", [{"dp": 8, "zero_stage": 1}, {"dp": 4, "tp": 2, "zero_stage": 3, "recompute": "full"}]
)
def test_sizes_without_effect_change_no_prediction(
    model: ModelSpec, unused: dict[str, int], layout: dict[str, Any]
) -> None:
    """Stored experiments keep such sizes."""
    new = of(model=model, ep=8, **layout)
    old = dataclasses.replace(new, model=dataclasses.replace(model, **unused))
    assert step(old) == step(new)
    assert estimate_memory(old) == estimate_memory(new)
    assert hardware_flops_per_token(old) == hardware_flops_per_token(new)
    assert step_traffic(old, 0) == step_traffic(new, 0)


@pytest.mark.parametrize("odd", ODD, ids=lambda one: one.id)
def test_what_no_table_says_is_a_factor(odd: Experiment) -> None:
    assert not layouts.is_plain(odd)
    near = layouts.plain(odd)
    assert layouts.is_plain(near)
    assert (near.world_size, near.tokens_per_step) == (odd.world_size, odd.tokens_per_step)
    factor = layouts.Structures(H200).factors([odd]).work[0]
    assert math.isfinite(factor) and 0.3 < factor < 10
    assert [one.tolist() for one in layouts.Structures(H200).factors([near])] == [[1.0], [1.0], [0.0], [1.0], [0.0]]


def test_schedules_and_recomputed_layers_are_ranked() -> None:
    one, bubbles = step(of(dp=2, pp=4), of(dp=2, pp=4, pp_schedule="zero_bubble_v"))
    assert bubbles < one
    none, second, full = step(
        of(dp=8), of(dp=8, recompute="full", recompute_every=2), of(dp=8, recompute="full", recompute_every=1)
    )
    assert none < second < full


def test_columns_of_a_dense_model_are_those_that_a_token_meets() -> None:
    assert layouts.plain_model(LLAMA_8B) == LLAMA_8B
    dense = layouts.plain_model(MIXTRAL)
    assert MIXTRAL.moe is not None
    assert dense.ffn_hidden_size == MIXTRAL.moe.experts_per_token * MIXTRAL.moe.expert_hidden_size
    assert dense.moe is None and dense.num_layers == MIXTRAL.num_layers
    # 3 dense layers of 18,432 columns, 58 of (8 + 1) experts of 2,048.
    assert layouts.plain_model(DEEPSEEK_V3).ffn_hidden_size == round((3 * 18432 + 58 * 9 * 2048) / 61)


def test_what_is_not_known_is_not_predicted() -> None:
    assert layouts.is_predicted(of(dp=8), H200)
    assert not layouts.is_predicted(of(dp=8), ONE_NODE)  # a device without rates
    assert not layouts.is_predicted(of(dp=8, precision="fp64"), H200)  # its rate is not in the cluster's file
    assert not layouts.is_predicted(of(dp=8), dataclasses.replace(H200, matmul_efficiency=None))
    alone = dataclasses.replace(H200, inter_node=None)
    assert layouts.is_predicted(of(dp=8), alone) and not layouts.is_predicted(of(dp=16), alone)
    assert len(layouts.points_of([], H200)) == 0


def test_a_cluster_that_multiplies_faster_is_predicted_faster() -> None:
    fast = dataclasses.replace(H200, matmul_efficiency=0.9)
    found = PREDICTOR.predict(layouts.points_of([of(dp=8)], fast)).step_time_s[0]
    assert 0.68 / 0.9 < found / step(of(dp=8))[0] < 1


def test_precisions_of_32_bits_take_longer_by_their_rate() -> None:
    device = H200.device
    wide = dataclasses.replace(H200, device=dataclasses.replace(device, peak_flops={**device.peak_flops, "fp32": 6e13}))
    alone = dataclasses.replace(H200, device=dataclasses.replace(device, peak_flops={"fp32": 6e13}))
    slow = of(dp=8, precision="fp32")
    assert layouts.is_predicted(slow, wide) and layouts.is_predicted(slow, alone) and not layouts.is_plain(slow)
    assert 5 < layouts.Structures(wide).factors([slow]).work[0] < 989 / 60
    assert layouts.Structures(alone).factors([slow]).work[0] == pytest.approx(1.0)
    assert layouts.points_of([slow], wide).peak[0] > 10 * layouts.points_of([slow], alone).peak[0]


@pytest.mark.slow
def test_five_thousand_points_a_second() -> None:
    """Plain points, of which an idle core predicts 11,000 and more a second."""
    fields = {"engine_version": "4"}  # whose tensor-parallel ranks shared no memory
    experiments = [
        of(
            dp=dp,
            tp=tp,
            pp=pp,
            micro_batch_size=mbs,
            global_batch_size=dp * mbs * 8,
            zero_stage=zero,
            recompute=again,
            **fields,
        )
        for dp in (1, 2, 8)
        for tp in (1, 2, 8)
        for pp in (1, 2, 4, 8)
        for mbs in (1, 4)
        for zero in (0, 1, 2, 3)
        for again in ("none", "selective", "full")
    ]
    assert all(layouts.is_plain(one) for one in experiments)
    assert fixed_tasks(lambda: step(*experiments)) < 1.5  # 0.5 on idle cores


@pytest.mark.slow
def test_thousands_of_other_points_a_second() -> None:
    """Factors of layouts that no row says, schedules executed (2.5 times as fast once they were written out)."""
    experiments = [
        of(
            dp_replicate=r,
            dp_shard=8 // r,
            zero_stage=zero,
            tp=tp,
            pp=pp,
            micro_batch_size=mbs,
            recompute=again,
            pp_schedule=name,
            virtual_stages=v,
            global_batch_size=512,
        )
        for r in (1, 2)
        for zero in (1, 2, 3)
        for tp in (1, 2, 4)
        for pp in (2, 4, 8)
        for mbs in (1, 2, 4)
        for again in ("none", "selective", "full")
        for name, v in (
            ("interleaved_zero_bubble", 1),
            ("zero_bubble_v", 2),
            ("dualpipe_v", 2),
            ("interleaved_1f1b", 2),
        )
    ]

    def factors() -> None:
        assert all(np.isfinite(one).all() for one in layouts.Structures(H200).factors(experiments))

    assert fixed_tasks(factors) < 3  # 1.0 on idle cores


def test_parts_of_a_step_are_shares_of_it() -> None:
    pipeline, seen, after, busy, issued, _ = PREDICTOR.seconds(layouts.points_of([of(dp=8), of(dp=2, pp=4)], H200))
    assert ((busy > 0) & (after > 0) & (seen > 0) & (busy <= pipeline)).all()
    assert busy[1] / pipeline[1] < busy[0] / pipeline[0]  # a bubble
    assert ((issued > 0) & (issued <= pipeline)).all()


def of_host(**fields: Any) -> float:
    """Seconds of a step of short sequences, whose pace the host sets."""
    e = of(seq_len=128, **{"global_batch_size": 8, **fields})
    structures, predictor = layouts.Structures(H200), Predictor(read_profiles())
    factors = structures.factors([e])
    of_layers = structures.of_layers([e], factors)
    points = layouts.points_of([e], H200, None, of_layers)
    parts = predictor.seconds(points)
    return float(factors.with_hosts(of_layers, parts).step_s(parts)[0])


def test_the_host_recomputes_only_the_layers_that_are_recomputed() -> None:
    every = {n: of_host(recompute="full", recompute_every=n) for n in (1, 2, 4)}
    none = of_host()
    assert none < every[4] < every[2] < every[1]
    assert every[2] - none == pytest.approx((every[1] - none) / 2, rel=0.1)
    assert none < of_host(recompute="norm") < of_host(recompute="norm+swiglu") < of_host(recompute="selective")


def test_captured_steps_wait_for_no_host() -> None:
    short = {"dp_shard": 2, "ep": 2, "model": MIXTRAL, "routing": "learned", "zero_stage": 2}
    for fields in ({}, {"pp": 2}, short | {"capacity_factor": 1.0}):
        eager, captured, usual = (of_host(**fields, cuda_graph=graph) for graph in ("none", "step", "auto"))
        assert captured == usual < 0.7 * eager
        assert host_of_layer(**fields, cuda_graph="auto") == 0 < host_of_layer(**fields)
    waits = [of_host(**short, cuda_graph=graph) for graph in ("none", "auto")]
    assert waits[0] == waits[1], "what cannot be captured runs eagerly"
    versions = [str(layouts.points_of([of(cuda_graph=graph)], H200).version[0]) for graph in ("none", "auto")]
    assert versions[1] == f"{versions[0]} captured"
    cpu = dataclasses.replace(H200, backend="cpu")
    assert layouts.points_of([of(cuda_graph="auto")], cpu).captured.tolist() == [0]


def columns_of(**fields: Any) -> dict[str, float]:
    """What `Points` say of a layout's host beside the columns of a table."""
    points = layouts.points_of([of(**fields)], H200, None, np.ones(1))
    return {name: float(getattr(points, name)[0]) for name in ("ring", "routed", "waits")}


def host_of_layer(**fields: Any) -> float:
    """Milliseconds that the host takes for a layer and micro-batch."""
    points = layouts.points_of([of(**fields)], H200, None, np.ones(1))
    quantities = {name: one.value for name, one in time_parameters(PROFILES[layouts.CODEBASE]).items()}
    return 1e3 * float(time_terms._layer(points, facts_of(points, PROFILES), quantities)[2][0])


def test_an_engine_that_launches_experts_one_by_one_takes_its_host_longer() -> None:
    routed = {"model": MIXTRAL, "ep": 2, "dp": 2}
    ours = columns_of(**routed)
    theirs = columns_of(**routed, engine="megatron", engine_version=ENGINES["megatron"], zero_stage=1)
    assert (ours["waits"], theirs["waits"]) == (0, 1)
    assert MIXTRAL.moe is not None
    alone = MIXTRAL.moe.num_experts / 2 / EXPERTS_ALONE
    assert theirs["routed"] == pytest.approx(ours["routed"] + alone)


def test_products_in_fp16_are_slower_on_this_engine() -> None:
    in_bf16, in_fp16 = step(of(), of(precision="fp16"))
    assert 1.01 < in_fp16 / in_bf16 < 1 / 0.97
    read = [read_points(random_rows(1, 5).assign(precision=name), read_clusters(), PROFILES, PROFILES[GENERAL])
            for name in ("bf16", "bfloat16", "fp16", "float16")]  # fmt: skip
    assert [float(one.points.fp16[0]) for one in read] == [0, 0, 1, 1]


def test_a_ring_takes_the_host_a_turn_for_each_other_rank() -> None:
    ring, gather, ulysses = (
        [host_of_layer(cp=cp, cp_kind=kind) for cp in (1, 2, 4)] for kind in ("ring", "allgather", "ulysses")
    )
    turn = ring[1] - ring[0]
    assert turn > 0 and ring[2] - ring[0] == pytest.approx(3 * turn)
    assert gather == ulysses == pytest.approx([ring[0], ring[1], ring[1]])


def test_the_host_waits_once_a_forward_for_learned_messages_to_other_ranks() -> None:
    """As the engine counts it: tests/workloads/engine/test_balance.py."""
    learned = {"model": MIXTRAL, "routing": "learned", "dp_shard": 2, "zero_stage": 2, "global_batch_size": 8}
    assert columns_of(**learned)["waits"] == columns_of(**learned, ep=2, capacity_factor=1.0)["waits"] == 0
    assert columns_of(**{**learned, "routing": "balanced"}, ep=2)["waits"] == 0
    assert columns_of(**learned, ep=2)["waits"] == 1
    assert columns_of(**learned, ep=2, recompute="full")["waits"] == 2
    assert columns_of(**learned, ep=2, recompute="full", recompute_every=2)["waits"] == 1.5
    assert columns_of(**learned, ep=2)["routed"] > columns_of(**learned)["routed"] == 1


def test_casts_and_experts_do_not_make_the_hosts_other_work_dearer() -> None:
    """What tensor parallelism and ZeRO 3 add is as much in fp8, or beside experts, as it is alone."""
    alone = host_of_layer(tp=2, dp=2, zero_stage=3) - host_of_layer(dp=2)
    assert alone > 0.5
    for more in ({"precision": "fp8_rowwise"}, {"model": MIXTRAL}):
        both = host_of_layer(tp=2, dp=2, zero_stage=3, **more) - host_of_layer(dp=2, **more)
        assert both == pytest.approx(alone) and host_of_layer(dp=2, **more) > host_of_layer(dp=2) + 1


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v", "interleaved_zero_bubble"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_no_schedule_is_done_before_its_hosts_are(pp: int, schedule: str) -> None:
    """Where the host sets the pace, 1F1B has hardly any idle time that another schedule could save."""
    layout = {"pp": pp, "global_batch_size": 8}
    assert 0.88 < of_host(pp_schedule=schedule, **layout) / of_host(pp_schedule="1f1b", **layout) < 1.1


def test_experts_with_few_rows_are_not_slower_without_end() -> None:
    """A factor was seen down to 160 rows an expert; tensor-parallel experts get the rows of all their ranks."""
    short, least = (expert_factor(of(model=NARROW, seq_len=seq)) for seq in (128, 640))
    assert short == least == pytest.approx(1.16 * 1.25)
    split, whole = (
        expert_factor(of(model=NARROW, seq_len=8192, tp=8, etp=8, sequence_parallel=sequence))
        for sequence in (True, False)
    )
    assert split == whole < least


def test_what_experts_add_falls_with_the_root_of_their_width() -> None:
    narrow, wide = (expert_factor(of(model=model, seq_len=8192)) for model in (NARROW, MIXTRAL))
    assert wide - 1 == pytest.approx((narrow - 1) * math.sqrt(1408 / 14336))


def test_factors_that_cancel_are_as_uncertain_as_each_is() -> None:
    factors, of_layers = np.array([1.0, 1.0, 1.25, 1.001]), np.array([1.0, 1.25, 1.0, 1.001])
    both = 2 * math.log(1.25) * layouts.STRUCTURE_SPREAD
    expected = [0.0, both, both / 2, layouts.LEAST_STRUCTURE_SPREAD]
    assert layouts.spread_of(factors, of_layers).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seq_len", [4096, 16384])
def test_the_form_has_the_heads_and_the_stages_of_a_layout(seq_len: int) -> None:
    """Qwen3-30B-A3B has 32 heads of 128 and a hidden size of 2,048; a head of 152k words and scores of long sequences
    decide where its layers are cut."""
    model = dataclasses.replace(ConfFolders().model("qwen3_30b_a3b"), num_layers=8)
    e = of(model=model, pp=2, seq_len=seq_len, global_batch_size=2)
    points = layouts.points_of([e], H200)
    assert points.queries.tolist() == [4096]
    stages = facts_of(points, PROFILES).stages
    assert stages.layers[0].tolist() == [len(held) for held in experiment_layers(layouts.plain(e))]


def test_no_factor_is_left_on_mixtures_of_this_engine() -> None:
    """What experts cost is counted in the costs of a layout, so a structure factor is their ratio alone."""
    e = of(model=NARROW)
    work = StepTimes(H200).parted_s([e, layouts.plain(e)])[0]
    assert layouts.Structures(H200).factors([e]).work[0] == pytest.approx(float(work[0] / work[1]))
