from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

import pytest

from tests.fixed_task import fixed_tasks
from tests.workloads.costs.shapes import DEEPSEEK_V3, H200, LLAMA_1B, LLAMA_8B, LLAMA_70B, MIXTRAL, ONE_NODE
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.flops import flops_per_token, hardware_flops_per_token
from workloads.costs.shape.weight_sums import added_bytes
from workloads.costs.time.expert_times import ExpertTimes
from workloads.costs.time.rank_times import ChunkTimes, Rates
from workloads.costs.time.step_times import StepTimes
from workloads.costs.time.timeline import TimeEstimate, estimate_idle, estimate_time, simulate_experiment, step_work
from workloads.costs.traffic.collectives import collective_time_s
from workloads.costs.traffic.sent import step_traffic
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PipelineSchedule
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec

GRID = [
    Experiment.canonical(
        model=LLAMA_8B,
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch_size=micro_batch,
        global_batch_size=dp * micro_batch * 2 * pp,
        zero_stage=zero,
        recompute=recompute,
    )
    for dp in (1, 2, 8)
    for tp in (1, 2, 8)
    for pp in (1, 2, 4, 8)
    for micro_batch in (1, 4)
    for zero in (0, 1, 2, 3)
    for recompute in ("none", "selective", "full")
]


def estimate(**fields: object) -> TimeEstimate:
    experiment = Experiment.canonical(**{"model": LLAMA_8B, "seq_len": 4096, **fields})
    result = estimate_time(experiment, H200)
    assert result is not None
    return result


@pytest.mark.slow
def test_parts_add_up_and_no_layout_beats_the_device() -> None:
    for experiment in GRID:
        result = estimate_time(experiment, H200)
        assert result is not None
        parts = (result.compute_s, result.communication_s, result.bubble_s, result.optimizer_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(result.step_time_s)
        flops = hardware_flops_per_token(experiment) * experiment.tokens_per_step
        assert result.step_time_s > flops / (0.68 * 989e12 * experiment.world_size)


@pytest.mark.parametrize(
    ("fields", "tokens_per_s_per_gpu"),
    [
        # Measured on 8 H200, torch 2.11, Llama-3.1-8B at 4096: compiled prototype (FSDP2) and torchtitan (FSDP x TP).
        ({"dp": 8, "zero_stage": 2, "micro_batch_size": 4, "global_batch_size": 32}, 11_324),
        ({"dp": 4, "tp": 2, "zero_stage": 2, "micro_batch_size": 4, "global_batch_size": 16}, 9_873),
        ({"dp": 2, "tp": 4, "zero_stage": 2, "micro_batch_size": 4, "global_batch_size": 8}, 8_227),
    ],
)
def test_between_one_and_a_third_times_what_was_measured(fields: dict[str, int], tokens_per_s_per_gpu: float) -> None:
    """The closed form knows no kernel launches and no contention: faster than a real run, but not by much."""
    result = estimate(**fields)
    rate = fields["global_batch_size"] * 4096 / result.step_time_s / 8
    assert 1.0 <= rate / tokens_per_s_per_gpu < 1.34


def test_unknown_rates_give_no_estimate() -> None:
    experiment = Experiment(model=LLAMA_8B, global_batch_size=1)
    assert estimate_time(experiment, ONE_NODE) is None
    assert estimate_time(experiment.replace(precision="fp32"), H200) is None
    assert estimate_time(experiment, dataclasses.replace(H200, matmul_efficiency=None)) is None


def test_recomputation_costs_compute() -> None:
    none, selective, full = (
        estimate(dp=8, zero_stage=2, micro_batch_size=4, global_batch_size=32, recompute=recompute).compute_s
        for recompute in ("none", "selective", "full")
    )
    assert none < selective < full
    # A forward more, but for its last matmul, where the backward is two; an H200 took 1.22 times as long.
    assert 1.2 < full / none < 1.28


def test_each_recomputed_layer_costs_the_same() -> None:
    """32 layers: all of them, 16, 11 and none."""
    layout = {"dp": 8, "zero_stage": 2, "micro_batch_size": 4, "global_batch_size": 32}
    plain = estimate(**layout).compute_s
    for kind in ("full", "selective", "norm+swiglu"):
        every, second, third = (
            estimate(recompute=kind, recompute_every=n, **layout).compute_s - plain for n in (1, 2, 3)
        )
        assert (second, third) == (pytest.approx(every * 16 / 32), pytest.approx(every * 11 / 32))
    one_by_one = sum(estimate(recompute=kind, **layout).compute_s - plain for kind in ("norm", "rope", "swiglu"))
    assert estimate(recompute="selective", **layout).compute_s - plain == pytest.approx(one_by_one)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_recomputation_sends_again_what_the_engine_sends_again(sequence_parallel: bool) -> None:
    """Per layer and micro-batch: two gathers and a scatter of a forward's four calls, or one of its two all-reduces.
    A device that computes without end hides nothing and leaves the calls alone."""
    device = dataclasses.replace(H200.device, peak_flops={"bf16": 1e30}, memory_bandwidth=1e30)
    cluster = dataclasses.replace(H200, device=device)
    layout = {"tp": 8, "micro_batch_size": 4, "global_batch_size": 4, "sequence_parallel": sequence_parallel}
    none, full = (
        Experiment.canonical(model=LLAMA_8B, seq_len=4096, recompute=kind, **layout) for kind in ("none", "full")
    )
    exposed = [estimate_time(case, cluster) for case in (none, full)]
    sent = [{one.op: one for one in step_traffic(case, 0) if one.axis == "tp"} for case in (none, full)]
    calls = {op: sent[1][op].calls - sent[0][op].calls for op in sent[0]}
    again = 0.0
    for op, count in calls.items():
        each = (sent[1][op].bytes - sent[0][op].bytes) / max(1, count)
        again += count * collective_time_s(op, each, 8, 1, cluster)
    assert exposed[0] is not None and exposed[1] is not None
    assert exposed[1].communication_s - exposed[0].communication_s == pytest.approx(again)


def test_bubble_shrinks_with_microbatches() -> None:
    shares = []
    for microbatches in (4, 16, 64):
        result = estimate(pp=4, global_batch_size=microbatches)
        shares.append(result.bubble_s / result.step_time_s)
    assert 0.3 < shares[0] < 3 / 7  # three of seven slots, less where the last stage (with the head) is the busiest
    assert shares == sorted(shares, reverse=True)
    assert shares[2] < 0.08


def test_sharding_over_nodes_exposes_communication() -> None:
    inside = estimate(dp=8, zero_stage=3, global_batch_size=8)
    across = estimate(dp=64, tp=8, zero_stage=3, global_batch_size=64)
    assert inside.communication_s / inside.step_time_s < 0.25  # traffic beside compute slows it
    assert across.communication_s / across.step_time_s > 0.75


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside = estimate(model=LLAMA_70B, tp=8, global_batch_size=1)
    across = estimate(
        model=ModelSpec(**{**dataclasses.asdict(LLAMA_70B), "num_kv_heads": 64}), tp=16, global_batch_size=1
    )
    assert across.communication_s > inside.communication_s


def test_fp8_is_faster_only_in_the_blocks() -> None:
    """In the order of the steps that were measured on two H200: 0.71, 0.81 and 0.84 of bf16's, without sums."""
    kinds = ("fp8_tensorwise", "fp8_blockwise", "fp8_rowwise", "bf16")
    apart = {"global_batch_size": 1, "gradient_accumulation_fusion": False}
    times = [estimate(precision=kind, **apart).compute_s for kind in kinds]
    assert times == sorted(times) and 0.5 < times[0] / times[-1] < 0.75 and times[-2] / times[-1] < 0.95


def test_experts_compute_only_what_a_token_visits() -> None:
    result = estimate_time(Experiment(model=MIXTRAL, global_batch_size=1, seq_len=4096), H200)
    assert result is not None
    flops = flops_per_token(MIXTRAL, 4096, "causal") * 4096
    assert flops / (0.68 * 989e12) < result.compute_s < 2 * flops / (0.68 * 989e12)


def test_every_axis_gives_a_finite_estimate() -> None:
    fields = {"model": DEEPSEEK_V3, "tp": 8, "cp": 2, "pp": 4, "ep": 8, "global_batch_size": 64, "virtual_stages": 2}
    for schedule in ("interleaved_1f1b", "zero_bubble_v", "dualpipe_v"):
        result = estimate(dp=8, zero_stage=1, pp_schedule=schedule, **fields)
        assert 0 < result.step_time_s < 1000
    tied = estimate(model=LLAMA_1B, pp=2, dp=2, zero_stage=1, global_batch_size=4)
    assert tied.communication_s > 0


def test_a_chunk_costs_what_it_holds() -> None:
    # Four stages of 8, 8, 8 and 8 layers in a V: rank 0 has the first, with the embedding, and the last, with the head.
    e = Experiment.canonical(
        model=LLAMA_8B, pp=2, pp_schedule="zero_bubble_v", pp_split="even", global_batch_size=8, seq_len=4096
    )
    times = StepTimes(H200).parts([e]).times
    first, last, second, third = (ChunkTimes(*one) for one in zip(*times, strict=True))
    assert second == third
    rate = 989e12 * (H200.matmul_efficiency or 0)
    head = 3 * 2.0 * 4096 * 128256 * 4096 / rate  # the logits and both gradients, all in its forward
    assert last.forward_s - second.forward_s == pytest.approx(head)
    assert first.forward_s == pytest.approx(second.forward_s)
    # Per layer 6 h h (queries, keys, values and the output: 1 + 1/4 + 1/4 + 1) and 3 x 3.5 h h, a third of all FLOPs.
    weights = 8 * 2.0 * 4096 * (2.5 + 10.5) * 4096**2 / rate
    # Products add to the sums: they read and write 4 bytes in place of writing 2. Gradients of norms are added later.
    added, _ = added_bytes(2, 4)
    accumulating = 8 * (6 * 13 * 4096**2 + added * 2 * 4096) / (H200.device.memory_bandwidth or 0)
    assert second.weight_s == pytest.approx(weights + accumulating)
    assert second.backward_s - second.weight_s > second.weight_s  # attention, norms and what they read are I's
    ends = 128256 * 4096 * added / (H200.device.memory_bandwidth or 0)
    assert first.weight_s == pytest.approx(second.weight_s + ends)


@pytest.mark.parametrize("name", [name for name in get_args(PipelineSchedule) if name != "none"])
def test_ranks_idle_as_their_chunks_times_say(name: str) -> None:
    for pp, split, m, zero in ((2, "even", 8, 0), (4, "balanced", 7, 3), (3, "even", 24, 2)):
        v = 2 if name.startswith("interleaved") else 1
        e = Experiment.canonical(
            model=LLAMA_8B,
            dp=2,
            tp=2,
            pp=pp,
            pp_schedule=name,
            pp_split=split,
            virtual_stages=v,
            zero_stage=zero,
            global_batch_size=2 * m,
        )
        work, result, idle = step_work(e, H200), estimate_time(e, H200), estimate_idle(e, H200)
        done = simulate_experiment(e, H200)
        assert work is not None and done is not None and result is not None and idle is not None
        assert idle == pytest.approx([waited / done.step_s for waited in done.idle_s], abs=1e-12)
        # A plan's closed form is a bound, and near: what happens once a step is little beside its micro-batches.
        assert done.step_s <= result.step_time_s * (1 + 1e-12) < 1.04 * done.step_s
        assert [len(own) for own in work.chunks] == [e.virtual_stages] * pp
        assert all(0 < chunk.weight_s < chunk.backward_s for own in work.chunks for chunk in own)


def test_no_rates_no_idle_share() -> None:
    assert estimate_idle(Experiment(model=LLAMA_8B, global_batch_size=1), ONE_NODE) is None
    assert estimate_idle(Experiment(model=LLAMA_8B, global_batch_size=1), H200) == pytest.approx((0.0,), abs=1e-12)


@pytest.mark.slow(seconds=2)
def test_fast_enough_for_grids() -> None:
    """Rules, memory and time of a point."""

    def of_grid() -> None:
        for experiment in GRID:
            violations(experiment, H200)
            estimate_memory(experiment)
        StepTimes(H200).seconds(GRID)

    assert fixed_tasks(of_grid) < 8  # 2.4 on idle cores


def test_norms_of_queries_and_keys_take_memory_time() -> None:
    # Forward one read and one write of (N + K) H numbers a token and layer, backward twice that; two bytes each.
    plain = dataclasses.replace(LLAMA_8B, qk_norm=False)
    case = Experiment.canonical(model=plain, global_batch_size=1, seq_len=4096)
    without = estimate_time(case, H200)
    with_norm = estimate_time(case.replace(model=dataclasses.replace(plain, qk_norm=True)), H200)
    assert without is not None and with_norm is not None
    passes = 3 * 2 * 2 * 4096 * (32 + 8) * 128 * 32
    assert with_norm.compute_s - without.compute_s == pytest.approx(passes / H200.device.memory_bandwidth, rel=0.01)


def routed(**fields: object) -> TimeEstimate:
    layout = {"model": MIXTRAL, "dp": 8, "ep": 8, "zero_stage": 2, "micro_batch_size": 2, "global_batch_size": 32}
    return estimate(**{**layout, **fields})


def test_uneven_routing_costs_the_rank_with_most_tokens() -> None:
    """Half of the copies in place of an eighth: nearly four times the experts' products, most of Mixtral's work."""
    even = routed()
    uneven = routed(routing="skewed", routing_imbalance=4.0)
    assert 2.5 * even.compute_s < uneven.compute_s < 4 * even.compute_s
    assert uneven.communication_s > even.communication_s
    assert routed(routing="learned", routing_imbalance=4.0).compute_s == uneven.compute_s
    # On one rank all experts are there, whichever they are.
    alone = {"ep": 1, "zero_stage": 3}
    assert routed(routing="skewed", routing_imbalance=4.0, **alone).compute_s == routed(**alone).compute_s


def test_experts_made_again_cost_two_of_three_products_and_nothing_on_the_network() -> None:
    none, experts, both, full = (routed(recompute=kind) for kind in ("none", "experts", "swiglu+experts", "full"))
    assert experts.communication_s == none.communication_s < full.communication_s
    with_tiles = 1 + 128 / (2 * 4096 * 2)  # rows of the only expert of a rank: two sequences, two experts a token
    products = 4 * 4096 * 2 * 2 * 3 * 4096 * 14336 * 32 / (0.68 * 989e12) * with_tiles
    swiglu = 4 * 4096 * 2 * 3 * 2 * 14336 * 32 / H200.device.memory_bandwidth
    assert experts.compute_s - none.compute_s == pytest.approx(products * 2 / 3 + swiglu)
    assert experts.compute_s == both.compute_s < full.compute_s


def of_experts(e: Experiment, rates: Rates) -> ExpertTimes:
    mlp = layers_of(e.model).kinds[-1].mlp
    assert isinstance(mlp, RoutedMLP)
    return ExpertTimes.of(e, H200, rates, mlp)


def test_exchanges_are_exposed_but_for_shared_experts_beside_them() -> None:
    assert MIXTRAL.moe is not None
    copies = 2 * 4096 * 2
    rows = collective_time_s("all_to_all", 2.0 * copies * 4096, 8, 1, H200)
    weights = collective_time_s("all_to_all", 4.0 * copies, 8, 1, H200)
    layer = of_experts(
        Experiment.canonical(model=MIXTRAL, dp=8, ep=8, seq_len=4096, micro_batch_size=2, global_batch_size=16),
        Rates(matmul=1e15, head=1e15, attention=1e15, memory=1e12),
    )
    assert (layer.dispatch_s, layer.combine_s) == (pytest.approx(rows + weights), pytest.approx(rows))
    shared = dataclasses.replace(MIXTRAL, moe=dataclasses.replace(MIXTRAL.moe, num_shared_experts=1))
    beside = of_experts(
        Experiment.canonical(model=shared, dp=8, ep=8, seq_len=4096, micro_batch_size=2, global_batch_size=16),
        Rates(matmul=1e9, head=1e15, attention=1e15, memory=1e12),
    )
    assert beside.dispatch_s == pytest.approx(weights)


def test_products_of_few_rows_take_as_long_as_reading_their_weights() -> None:
    rates = Rates(matmul=1e18, head=1e18, attention=1e18, memory=1e12)
    one = Experiment.canonical(model=MIXTRAL, dp=2, seq_len=128, global_batch_size=2)
    assert of_experts(one, rates).forward_s == pytest.approx(2 * 3 * 8 * 4096 * 14336 / 1e12)


@pytest.mark.parametrize(
    ("recompute", "kind", "same"),
    [*itertools.product(("selective", "full"), ("ring", "allgather"), (True,)), ("selective", "ulysses", False)],
)
def test_layers_that_recompute_and_break_the_graph_cost_what_eager_ones_do(
    recompute: str, kind: str, same: bool
) -> None:
    """They are not compiled: same memory, same time."""
    shape = {"model": LLAMA_8B, "tp": 2, "cp": 2, "cp_kind": kind, "global_batch_size": 2, "recompute": recompute}
    shape["gradient_accumulation_fusion"] = False  # compiled blocks cannot have it
    eager, compiled = (Experiment.canonical(**shape, compile=how) for how in ("none", "block"))
    assert (estimate_memory(eager) == estimate_memory(compiled)) is same
    assert (estimate_time(eager, H200) == estimate_time(compiled, H200)) is same
