"""Which ranks stand for all, which stages are equal, and how rehearsed stages add up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import RankResult, StepRecord, Task, read_task, write_task
from workloads.contract.stages import HOSTS_TOGETHER, RANKS_TOGETHER, assemble, rehearsed_ranks, shortened, stage_key
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.schedule import INTERLEAVED
from workloads.costs.time.step_simulation import simulate_step
from workloads.costs.time.timeline import estimate_time, step_work
from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import coordinates
from workloads.spec.model_spec import ModelSpec, MoESpec, model_from_dict

MODEL = ModelSpec(
    name="stages",
    num_layers=8,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=256,
)
CLUSTER = ClusterSpec(
    name="lab",
    backend="cuda",
    device=DeviceSpec(name="gpu", memory_bytes=80 * 2**30, peak_flops={"bf16": 1e15}, memory_bandwidth=3e12),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=3e11, latency_s=1e-5),
    inter_node=LinkSpec(bandwidth=4e10, latency_s=2e-5),
    matmul_efficiency=0.7,
)


def experiment(**layout: Any) -> Experiment:
    return Experiment.canonical(**{"model": MODEL, "seq_len": 64, "global_batch_size": 64, **layout})


def task(case: Experiment) -> Task:
    return Task(attempt_id="a", experiment=case, measure=MeasureSpec(), cluster=CLUSTER, method="rehearsed")


def result(rank: int, forward_s: float | None, backward_s: float | None, optimizer_s: float = 0.5) -> RankResult:
    steps = [StepRecord(step=i, is_warmup=i == 0, step_time_s=9.0, optimizer_s=optimizer_s) for i in range(3)]
    return RankResult(
        rank=rank, coordinates={}, steps=steps, phase_started_at={}, forward_s=forward_s, backward_s=backward_s
    )


def layered(*spans: dict[str, Any]) -> ModelSpec:
    """Layers that differ only in which keys their queries see."""
    attention = {"kind": "attention", "heads": 4, "kv_heads": 4, "head_dim": 16, "value_dim": 16}
    mlp = {"kind": "dense", "width": 128, "activation": "silu"}
    kinds = [{"mixer": {**attention, "span": span}, "mlp": mlp} for span in spans]
    layers = {"kinds": kinds, "order": [*range(len(kinds))]}
    return model_from_dict({"name": "layered", "hidden_size": 64, "vocab_size": 256, "layers": layers})


WINDOW, CHUNK, FULL = {"kind": "window", "size": 16}, {"kind": "chunk", "size": 16}, {"kind": "full"}


@pytest.mark.parametrize("model", [MODEL, layered(WINDOW, CHUNK)], ids=lambda model: model.name)
def test_ranks_read_the_task_that_was_written(model: ModelSpec, tmp_path: Path) -> None:
    written = task(experiment(model=model, dp=2))
    write_task(tmp_path, written)
    assert read_task(tmp_path) == written


def test_stages_of_other_kinds_of_layers_differ() -> None:
    """Also where the kinds have equal sizes."""
    of_window, of_chunk = (task(experiment(model=layered(span, FULL), pp=2)) for span in (WINDOW, CHUNK))
    assert stage_key(of_window, 0) != stage_key(of_chunk, 0)
    assert stage_key(of_window, 1) == stage_key(of_chunk, 1)
    one, other = (task(experiment(model=layered(*spans, FULL), pp=3)) for spans in ([FULL, FULL], [FULL, WINDOW]))
    assert stage_key(one, 1) != stage_key(other, 1)


def test_first_and_last_stage_stand_for_all() -> None:
    case = experiment(dp=2, tp=2, pp=4)
    first, last = rehearsed_ranks(case)
    assert (first, coordinates(case, last)["pp"]) == (0, 3)
    assert rehearsed_ranks(experiment(dp=4)) == (0,)


def test_replicas_and_batch_do_not_change_a_stage() -> None:
    few, many = task(experiment(dp=2, tp=2, pp=2)), task(experiment(dp=8, tp=2, pp=2))
    assert stage_key(few, 0) == stage_key(many, 0)
    assert stage_key(few, 0) != stage_key(few, rehearsed_ranks(few.experiment)[1]), "only one of them has the embedding"


def test_a_profile_after_the_timed_steps_does_not_change_a_stage() -> None:
    timed = task(experiment())
    for measure, same in (({"profile": True}, True), ({"warmup_steps": 4}, False), ({"memory_probe": False}, False)):
        other = dataclasses.replace(timed, measure=dataclasses.replace(timed.measure, **measure))
        assert (stage_key(other, 0) == stage_key(timed, 0)) is same, measure


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 2},
        {"tp": 4},
        {"recompute": "full"},
        {"recompute": "norm+rope"},
        {"recompute": "full", "recompute_every": 2},
        {"seq_len": 128},
        {"zero_stage": 1},
        {"pp": 4},
        {"compile": "block"},
    ],
    ids=str,
)
def test_what_changes_memory_or_compute_changes_the_key(change: dict[str, Any]) -> None:
    base = {"dp": 2, "tp": 2, "pp": 2}
    assert stage_key(task(experiment(**base)), 0) != stage_key(task(experiment(**{**base, **change})), 0)


def test_recomputation_counts_as_it_is_on_the_stages_own_layers() -> None:
    """Eight layers on two stages of four, of which 0 and 4, or 0 alone, are recomputed."""
    base = {"dp": 2, "tp": 2, "pp": 2, "pp_split": "even"}

    def keys(**fields: Any) -> list[str]:
        case = experiment(**base, **fields)
        return [stage_key(task(case), rank) for rank in rehearsed_ranks(case)]

    none, full = keys(), keys(recompute="full")
    some, first = (keys(recompute="full", recompute_every=every) for every in (4, 8))
    assert first == [some[0], none[1]]
    assert len({*none, *full, *some}) == 6
    assert keys(recompute="full", recompute_every=2)[0] != keys(recompute="full", recompute_every=3)[0], "another order"


def test_the_stage_that_holds_most_is_rehearsed_too() -> None:
    """Layers 0 and 4 of eight are recomputed: the second of four stages holds three micro-batches whole."""
    case = experiment(pp=4, pp_split="even", recompute="full", recompute_every=4, micro_batch_size=4)
    peak = estimate_memory(case).peak_stage
    assert peak == 1
    assert [coordinates(case, rank)["pp"] for rank in rehearsed_ranks(case)] == [0, 1, 3]
    assert len(rehearsed_ranks(case.replace(recompute_every=1))) == 2
    results = {rank: result(rank, 1.0, 2.0) for rank in rehearsed_ranks(case)}
    slower = assemble(case, CLUSTER, results | {rehearsed_ranks(case)[1]: result(1, 2.0, 4.0)})
    times = assemble(case, CLUSTER, results)
    assert times.compute_time_s is not None and slower.compute_time_s is not None
    assert slower.compute_time_s > times.compute_time_s


def test_stages_with_other_numbers_of_routed_layers_are_not_the_same() -> None:
    """The last ranks of both hold four layers and the head; of the shorter model one of these is dense."""
    moe = MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=512, num_dense_layers=5)
    layouts = [(8, 2), (12, 3)]
    cases = [
        experiment(model=dataclasses.replace(MODEL, moe=moe, num_layers=layers), pp=pp, pp_split="even")
        for layers, pp in layouts
    ]
    keys = {stage_key(task(case), case.world_size - 1) for case in cases}
    assert len(keys) == 2
    # Of the first layers few have experts, so that a middle stage holds most and is rehearsed, too.
    one = dataclasses.replace(MODEL, moe=dataclasses.replace(moe, num_experts=64, num_dense_layers=2))
    case = experiment(model=one, pp=4, pp_split="even")
    assert estimate_memory(case).peak_stage in {coordinates(case, rank)["pp"] for rank in rehearsed_ranks(case)}


def test_a_middle_stage_computes_again_what_is_recomputed_of_it() -> None:
    """Eight layers on three stages of 3, 3 and 2 in 1F1B, of which 0, 2, 4 and 6 are recomputed. A backward of 2 for a
    layer, 3 where its forward is run again: 8 forwards on the first stage, 7 on the middle one."""
    case = experiment(pp=3, pp_split="even", recompute="full", recompute_every=2, global_batch_size=1)
    first, last = rehearsed_ranks(case)
    results = {first: result(first, 3.0, 8.0, 0.0), last: result(last, 2.0, 5.0, 0.0)}
    assert assemble(case, CLUSTER, results).compute_time_s == pytest.approx((3 + 3 + 2) + (8 + 7 + 5))


def test_stages_without_layers_take_no_time_of_others() -> None:
    """Of ``E|t|6 t|tL`` the first, the longest and the last rank are rehearsed, and the second takes a sixth of the
    longest."""
    case = experiment(pp=4, pp_stages="E|t|t*6|tL", global_batch_size=1)
    ranks = rehearsed_ranks(case)
    assert [coordinates(case, rank)["pp"] for rank in ranks] == [0, 2, 3]
    times = [(1.0, 1.0), (6.0, 12.0), (2.0, 4.0)]
    results = {rank: result(rank, *both, 0.0) for rank, both in zip(ranks, times, strict=True)}
    assert assemble(case, CLUSTER, results).compute_time_s == pytest.approx((1 + 1 + 6 + 2) + (1 + 2 + 12 + 4))


def test_shortening_keeps_what_is_in_flight() -> None:
    case = experiment(dp=2, pp=4)
    assert case.num_microbatches == 32
    assert shortened(case).num_microbatches == 5
    assert shortened(experiment(dp=2, pp=4, pp_schedule="gpipe")).num_microbatches == 32
    assert shortened(experiment(dp=64)).num_microbatches == 1


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_shortening_keeps_the_size_of_the_last_group(schedule: str) -> None:
    """With another last group another chunk is held while gradients are reduced: 0.6 GiB of 97 on two H200."""
    for sequences in range(2, 41):
        case = experiment(pp=2, pp_schedule=schedule, virtual_stages=2).replace(global_batch_size=sequences)
        short = shortened(case)
        assert short.num_microbatches <= 7
        assert (case.num_microbatches - short.num_microbatches) % case.pp == 0


def test_a_stage_whose_last_group_differs_is_not_the_same() -> None:
    layout: dict[str, Any] = {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2}
    cases = [experiment(**layout).replace(global_batch_size=sequences) for sequences in (16, 17, 18)]
    sixteen, seventeen, eighteen = (stage_key(task(case), 0) for case in cases)
    assert sixteen == eighteen != seventeen


def test_a_step_is_the_schedule_of_its_stages() -> None:
    """1F1B over two stages, m = 32, F = 1 and B = 2 on both: (m + p - 1) * (F + B) = 99, and 0.5 for the optimizer."""
    case = experiment(dp=2, pp=2)
    first, last = rehearsed_ranks(case)
    times = assemble(case, CLUSTER, {first: result(first, 1.0, 2.0), last: result(last, 1.0, 2.0)})
    assert times.compute_time_s == pytest.approx(99.5)
    assert times.time_source == "compute_measured"
    # 32 messages each way: rank 1 waits for each forward's, rank 0 for each backward's, one after the other.
    work = step_work(case, CLUSTER, [(1.0, 2.0, 0.5)] * 2)
    assert work is not None and times.step_time_s == simulate_step(work).step_s
    message = work.latency_s + work.message_s
    assert times.communication_time_s is not None
    assert 33 * message < times.communication_time_s < 99.5 * 0.02
    assert times.step_time_s == pytest.approx(99.5 + times.communication_time_s)


def test_ranks_whose_devices_wait_for_their_hosts_wait_for_each_other() -> None:
    """m = 32, F + B = 3, and 0.5 for the optimizer; a lead of 0.05 is less than a hundredth of the step of 9 s."""
    waited, tp, dp = step_with_lead(0.05, tp=2), step_with_lead(None, tp=2), step_with_lead(None, dp=2)
    assert waited == pytest.approx(HOSTS_TOGETHER * 96 + 0.5)
    assert 96.5 < tp < 98 and 96.5 < dp < 98
    assert step_with_lead(0.05, dp=2) == dp, "data-parallel ranks scatter too widely"


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}])
def test_ranks_that_meet_in_every_layer_take_longer_together(layout: dict[str, int]) -> None:
    assert step_with_lead(0.2, **layout) == pytest.approx(RANKS_TOGETHER * step_with_lead(None, **layout))


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "zero_stage": 3}])
def test_ranks_that_meet_beside_the_layers_do_not(layout: dict[str, int]) -> None:
    assert step_with_lead(0.2, **layout) == step_with_lead(None, **layout)


def test_a_pipeline_is_ahead_of_its_hosts_where_all_that_was_rehearsed_is() -> None:
    case = experiment(tp=2, pp=2)
    leads: list[tuple[float | None, float | None]] = [(None, None), (1.0, 1.0), (1.0, None), (None, 1.0), (0.0, None)]
    steps = []
    for lead in leads:
        ranks = zip(rehearsed_ranks(case), lead, strict=True)
        ends = {rank: dataclasses.replace(result(rank, 1.0, 2.0), host_lead_s=own) for rank, own in ranks}
        steps.append(assemble(case, CLUSTER, ends).step_time_s)
    unknown, ahead, *half_known, waited = steps
    assert unknown is not None and ahead == pytest.approx(RANKS_TOGETHER * unknown)
    assert half_known == [unknown, unknown]
    assert waited == pytest.approx(HOSTS_TOGETHER * 195 + 0.5)


def step_with_lead(host_lead_s: float | None, **layout: int) -> float:
    case = experiment(**layout, global_batch_size=32 * layout.get("dp", 1))
    alone = dataclasses.replace(result(0, 1.0, 2.0), host_lead_s=host_lead_s)
    step = assemble(case, CLUSTER, {0: alone}).step_time_s
    assert step is not None
    return step


def test_a_pipeline_waits_for_hosts_where_one_of_its_ends_did() -> None:
    case = experiment(tp=2, pp=2)
    first, last = rehearsed_ranks(case)
    ends = {first: result(first, 1.0, 2.0), last: dataclasses.replace(result(last, 1.0, 2.0), host_lead_s=0.0)}
    assert assemble(case, CLUSTER, ends).step_time_s == pytest.approx(HOSTS_TOGETHER * 195 + 0.5)


def test_an_allocator_that_stops_is_no_slow_host() -> None:
    case = experiment(tp=2, global_batch_size=32)
    alone = dataclasses.replace(result(0, 1.0, 2.0), host_lead_s=0.0)
    stopped = [dataclasses.replace(step, allocator_retries=2) for step in alone.steps]
    times = assemble(case, CLUSTER, {0: dataclasses.replace(alone, steps=stopped)})
    assert times.step_time_s is not None and times.step_time_s < 98


def test_the_wait_after_the_last_backward_counts_once() -> None:
    """A last backward's span ends before it; its rank's share of a step, an F, a B and what follows, is the whole."""
    case = experiment(dp=2, global_batch_size=2)
    steps = [
        StepRecord(step=i, is_warmup=i == 0, step_time_s=4.2, reduce_exposed_s=0.2, optimizer_s=1.0) for i in (0, 1)
    ]
    alone = dataclasses.replace(result(0, 1.0, 2.0), steps=steps)
    assert assemble(case, CLUSTER, {0: alone}).compute_time_s == pytest.approx(4.2)


def test_without_a_device_the_time_is_the_estimate_and_says_so() -> None:
    case = experiment(dp=2)
    times = assemble(case, CLUSTER, {0: result(0, None, None)})
    estimate = estimate_time(case, CLUSTER)
    assert estimate is not None
    assert (times.step_time_s, times.compute_time_s, times.time_source) == (estimate.step_time_s, None, "estimated")
    nowhere = dataclasses.replace(CLUSTER, matmul_efficiency=None)
    assert estimate_time(case, nowhere) is None
    unknown = assemble(case, nowhere, {0: result(0, None, None)})
    assert (unknown.step_time_s, unknown.time_source) == (None, None)
