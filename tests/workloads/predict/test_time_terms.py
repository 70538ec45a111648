"""What single terms of the closed form say of a step, with everything else switched off."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sweep.predicting.codebases import profiles_with, read_profiles
from tests.workloads.predict.tables import row
from tests.workloads.predict.test_predictor import points
from workloads.costs.time.pipeline import pipeline_time_s
from workloads.predict import time_terms
from workloads.predict.facts import facts_of
from workloads.predict.memory_terms import MEMORY, peaks
from workloads.predict.parameters import TIME
from workloads.predict.time_terms import TimeTerms, step_parts

PROFILES = read_profiles()
NOTHING = 1e-12
"""Of quantities that are switched off, which must be positive."""
BARE = {
    **{name: one.value for name, one in TIME.items()},
    **dict.fromkeys(("micro_fixed", "message", "accumulate", "loss", "gap"), NOTHING),
    **dict.fromkeys((name for name in TIME if name.startswith("host")), NOTHING),
}
DEVICE = {**BARE, "rest": NOTHING}
"""Quantities of products, attention and memory alone; and devices as fast in a pipeline as elsewhere."""
HOST = {**BARE, "host": 1.0, "host_launch": 2.0}
"""A layer takes the host a second, and the device next to nothing."""


def parts(rows: list[dict[str, Any]], values: dict[str, float], **facts: float) -> TimeTerms:
    found = points(rows)
    known = facts_of(found, PROFILES)
    changed = {name: np.full(len(found), value) for name, value in facts.items()}
    return step_parts(found, dataclasses.replace(known, **changed), values)


def test_full_recomputation_that_stops_early_spares_the_down_projection() -> None:
    only_products = {**DEVICE, "memory": 1e12, "attention": 1e12, "tokens": NOTHING, "width": NOTHING}
    rows = [row(recompute=kind, vocab=1) for kind in ("none", "full")]
    none, early = parts(rows, only_products, stops_early=1.0).pipeline
    _, whole = parts(rows, only_products, stops_early=0.0).pipeline
    down = 14336 * 4096 / (2 * 4096**2 * (1 + 8 / 32) + 3 * 4096 * 14336)
    assert whole / none == pytest.approx(4 / 3, rel=1e-3)
    assert early / none == pytest.approx((4 - down) / 3, rel=1e-3)


def test_a_device_that_waits_for_other_stages_works_faster() -> None:
    """Two equal stages, m micro-batches: each works in m / (m + 1) of the time, without what no clock speeds up."""
    values = {**DEVICE, "memory": 1e12}
    rows = [row(gpus=2, dp=1, pp=2, grad_accum=m, vocab=1) for m in (1, 2, 8)]
    ratio = parts(rows, {**values, "rest": 0.1}).pipeline / parts(rows, values).pipeline
    assert ratio == pytest.approx(np.array([1 / 2, 2 / 3, 8 / 9]) ** 0.1, rel=2e-3)
    alone = [row(gpus=1, dp=1)]
    assert parts(alone, {**values, "rest": 0.1}).pipeline == parts(alone, values).pipeline


def test_a_host_that_runs_ahead_of_messages_issues_its_own_layers_and_no_bubble() -> None:
    """Sixteen layers on each of two stages, three micro-batches: 48 s, and 16 s more where a host waits for the other
    stage's first micro-batch."""
    rows = [row(gpus=2, dp=1, pp=2, grad_accum=3, vocab=1)]
    ahead, behind = (parts(rows, HOST, runs_ahead=one).pipeline.item() for one in (1.0, 0.0))
    assert ahead == pytest.approx(48, rel=0.02) and behind == pytest.approx(64, rel=0.02)


def test_devices_that_set_the_pace_have_their_bubble_whatever_the_host_does() -> None:
    rows = [row(gpus=2, dp=1, pp=2, grad_accum=3, vocab=1)]
    ahead, behind = (parts(rows, DEVICE, runs_ahead=one).pipeline.item() for one in (1.0, 0.0))
    assert ahead == pytest.approx(behind, rel=1e-6)


def test_what_the_host_does_once_a_step_is_shared_by_its_micro_batches() -> None:
    rows = [row(grad_accum=m, vocab=1) for m in (1, 4)]
    found = parts(rows, {**HOST, "host_step": 0.5}).pipeline
    assert found == pytest.approx([32 * 1.5, 32 * 4.5], rel=0.02)


def test_passes_that_are_a_graph_take_no_host_time() -> None:
    rows = [row(grad_accum=4, vocab=1)]
    launched, captured = (parts(rows, HOST, captured=one) for one in (0.0, 1.0))
    on_device = parts(rows, BARE)
    assert launched.pipeline.item() == pytest.approx(32 * 4, rel=0.02)
    assert captured.pipeline.item() == pytest.approx(on_device.pipeline.item(), rel=1e-6)
    assert captured.issued.item() < 0.01 * launched.issued.item()


def test_a_compiler_spares_launches_of_kernels_but_not_of_collectives() -> None:
    rows, values = [row(cp=2, dp=4, vocab=1)], {**HOST, "compiled_host": 0.5, "fp8_sharded": NOTHING, "host_cp": 1.0}
    eager, compiled = (parts(rows, values, compiled=one).issued.item() for one in (0.0, 1.0))
    assert eager / compiled == pytest.approx(2 / 1.5, rel=1e-3)


def test_a_profile_says_which_steps_are_graphs() -> None:
    known = profiles_with([("torchtitan", "0.2.2+2"), ("torchtitan", "0.3.0+1"), ("megatron", "0.16.1+2 with TE")])
    rows = points([row(), row(gpus=16, pp=2)])
    columns = {"compiled": np.ones(2)}
    for name, compiled, captured in (
        ("torchtitan 0.2.2+2", [1, 1], [0, 0]),
        ("torchtitan 0.3.0+1", [1, 1], [1, 0]),
        ("megatron 0.16.1+2 with TE", [0, 0], [1, 1]),
    ):
        facts = facts_of(dataclasses.replace(rows, codebase=np.array([name] * 2), **columns), known)
        assert (facts.compiled.tolist(), facts.captured.tolist()) == (compiled, captured)


def test_profiles_say_which_code_bases_wait_for_messages_and_recompute_everything() -> None:
    rows = [row(codebase=name) for name in ("ultrasweep", "torchtitan", "megatron", "nanotron")]
    facts = facts_of(points(rows), PROFILES)
    assert facts.runs_ahead.tolist() == facts.stops_early.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_the_fill_of_an_interleaved_pipeline_is_the_simulated_one(pp: int, vpp: int) -> None:
    counts = [m for m in (1, 2, 3, 4, 8, 16) if m <= pp or m % pp == 0]
    rows = [row(gpus=pp, dp=1, pp=pp, vpp=vpp, grad_accum=m, vocab=1) for m in counts]
    whole = parts([row(gpus=1, dp=1, grad_accum=1, vocab=1)], DEVICE).pipeline.item() / pp
    simulated = [
        pipeline_time_s("interleaved_1f1b", [whole / 3] * pp, [whole * 2 / 3] * pp, m, virtual_stages=vpp)
        for m in counts
    ]
    assert parts(rows, {**DEVICE, "p2p": 1e12}).pipeline == pytest.approx(simulated, rel=1e-3)


def test_slow_messages_are_those_between_nodes() -> None:
    """Two stages, four micro-batches, messages of a second: half a second at either stage for each of two, and of the
    fill's two only what one stage waits. None of them inside one node."""
    rows = [row(gpus=gpus, dp=gpus // 2, pp=2, grad_accum=4) for gpus in (8, 16)]
    values = {**DEVICE, "slow_message": 1.0}
    longer = parts(rows, values, slow_messages=1.0).pipeline - parts(rows, values, slow_messages=0.0).pipeline
    assert longer == pytest.approx([0.0, 4 + 0.5], abs=1e-9)


@pytest.mark.parametrize(
    ("pp", "vpp", "seconds"),
    [
        (2, 1, 4 * 1 + 0.5),
        (4, 1, 4 * 2 + 0.5 + 0.5 + 1),  # a middle stage paces; the fill passes both ends and the other middle one
        (8, 1, 8 * 2 + 0.5 + 0.5 + 5 * 1),
        (2, 2, 4 * 3 + 1.5 / 2),  # one of four chunks each has the ends; the fill is divided by the chunks
        (4, 2, 4 * 4 + (1.5 + 1.5 + 2) / 2),
    ],
)
def test_stages_at_the_ends_have_fewer_messages(pp: int, vpp: int, seconds: float) -> None:
    rows = [row(gpus=8 * pp, dp=8, pp=pp, vpp=vpp, grad_accum=max(4, pp), vocab=1)]
    values = {**DEVICE, "slow_message": 1.0}
    longer = parts(rows, values, slow_messages=1.0).pipeline - parts(rows, values, slow_messages=0.0).pipeline
    assert longer.item() == pytest.approx(seconds, rel=1e-3)


def test_full_recomputation_repeats_a_forwards_part_of_what_the_host_launches() -> None:
    """Its casts, three or four of ten collectives, and a third of a ring's turns; half of it every second layer."""
    values = {**HOST, "host": NOTHING, "host_launch": 1.0}
    cases: list[tuple[dict[str, Any], str, float]] = [
        ({"gpus": 2, "dp": 1, "tp": 2}, "host_tp", 1.3),
        ({"gpus": 2, "dp": 1, "cp": 2}, "host_cp", 4 / 3),
    ]
    for layout, name, factor in cases:
        rows = [row(**layout, grad_accum=1, recompute=word) for word in ("none", "full", "full.every2")]
        none, full, half = parts(rows, {**values, name: 1.0}).pipeline
        assert full / none == pytest.approx(factor, rel=1e-3) and half / none == pytest.approx(
            (1 + factor) / 2, rel=1e-3
        )
    rows = [row(gpus=1, dp=1, grad_accum=1, recompute="full", precision=word) for word in ("bf16", "fp8")]
    in_16_bits, in_fp8 = parts(rows, {**values, "host_full": 1.0, "host_fp8": 0.5}).pipeline
    assert in_fp8 / in_16_bits == pytest.approx(1.5, rel=1e-3)


def test_inputs_that_stay_gathered_take_memory() -> None:
    """Of each layer and micro-batch in flight, two values of 2 bytes a token and hidden unit, but for their shards."""
    found = points([row(gpus=8, dp=1, tp=8, grad_accum=1)])
    form, facts = {name: one.value for name, one in MEMORY.items()}, facts_of(found, PROFILES)
    more = dataclasses.replace(facts, keeps_gathers=np.ones(1))
    added = peaks(found, more, form)[1] - peaks(found, facts, form)[1]
    assert added == pytest.approx(32 * 2 * 2 * (1 - 1 / 8) * 2 * 4096 * 4096)


def test_tensor_parallelism_starts_later_between_nodes() -> None:
    """Eight collectives a layer and pass without sequence parallelism, a second for each node after the first."""
    rows = [row(gpus=32, dp=32 // tp, tp=tp, grad_accum=1) for tp in (4, 8, 16, 32)]
    values = {**DEVICE, "tp_exposed": 1.0}
    spans = {**values, "tp_between": 1.0}
    longer = (
        parts(rows, spans, sequence_parallel=0.0).pipeline
        - parts(rows, {**values, "tp_between": NOTHING}, sequence_parallel=0.0).pipeline
    )
    assert longer == pytest.approx(np.array([0, 0, 1, 3]) * 8 * 32, rel=1e-3, abs=1e-6)


def test_a_slow_host_takes_longer_for_each_doubling_in_a_node_and_for_each_node() -> None:
    rows = [row(gpus=32, dp=32 // tp, tp=tp, grad_accum=1) for tp in (2, 4, 8, 16, 32)]
    values = {**DEVICE, "slow_host": 1e3, "slow_growth": 1.0, "slow_between": 1.0}
    assert parts(rows, values, slow_host=1.0).pipeline / 32e3 == pytest.approx([1, 2, 3, 6, 12], rel=1e-3)


def test_kernels_of_a_graph_follow_one_another_without_gaps() -> None:
    """32 layers and two micro-batches: 32 x 2 gaps, two fixed times and that of the step add up, and all of them vanish
    where whole steps are graphs, but not in fp8."""
    values = {**BARE, "gap": 1.0, "micro_fixed": 100.0, "step_fixed": 10000.0}
    kinds = (("engine 5", "bf16"), ("engine 5 captured", "bf16"), ("engine 5 captured", "fp8"))
    found = parts([row(code_version=version, precision=precision) for version, precision in kinds], values)
    eager, graph, in_fp8 = found.pipeline + found.after
    assert in_fp8 - graph > 10000
    assert eager - graph == pytest.approx(32 * 2 + 2 * 100 + 10000, rel=1e-6)
    assert graph < 10


def test_two_devices_exchange_at_the_rate_and_with_the_start_of_a_pair() -> None:
    found = points([row(gpus=8, dp=8 // tp, tp=tp) for tp in (1, 2, 4)])
    facts, exposed = facts_of(found, PROFILES), {}
    for name, bandwidth, start_s in (("unknown", np.nan, np.nan), ("pair", 50e9, 40e-6)):
        pair = {"pair": np.full(3, bandwidth), "hop_pair": np.full(3, start_s)}
        exposed[name] = time_terms._tensor_parallel(dataclasses.replace(found, **pair), facts, BARE)
    assert exposed["unknown"][[0, 2]].tolist() == exposed["pair"][[0, 2]].tolist()
    each = found.tokens[1] * found.hidden[1] / 50e9 + 40e-6  # half of the tokens, two bytes each
    assert exposed["pair"][1] > exposed["unknown"][1] > 0
    assert exposed["pair"][1] == pytest.approx(10 * each * BARE["tp_exposed"])
