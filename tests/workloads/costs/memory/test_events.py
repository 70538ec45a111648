"""Peaks as running sums of named allocations and frees."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.workloads.costs.shapes import DEEPSEEK_V2_LITE, LLAMA_1B, LLAMA_8B, MIXTRAL
from workloads.costs.memory import chunk_events
from workloads.costs.memory.chunk_events import Chunk
from workloads.costs.memory.estimate import estimate_memory, peak_timeline, timelines_of
from workloads.costs.memory.events import TENSORS, Timeline, by_category, events_of, highest, live_at
from workloads.costs.memory.layer_classes import layer_classes, layer_sizes
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.shape.partition import experiment_stages
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

ENGINE = Path(__file__).resolve().parents[4] / "workloads" / "engine"


def layout(model: ModelSpec = LLAMA_8B, microbatches: int = 1, dp: int = 1, **fields: object) -> Experiment:
    """A layout that adds gradients as the versions of `PEAKS` did."""
    batch = {"micro_batch_size": 2, "global_batch_size": 2 * dp * microbatches}
    usual = {"model": model, "dp": dp, "seq_len": 4096, "gradient_accumulation_fusion": False, "engine_version": "5"}
    return Experiment.canonical(**{**usual, **batch, **fields})


LAYOUTS = {
    "one rank": layout(LLAMA_1B, 3),
    "ZeRO 1": layout(dp=8, zero_stage=1, microbatches=2),
    "ZeRO 3": layout(dp=8, zero_stage=3, microbatches=2, recompute="full"),
    "tied, ZeRO 3": layout(LLAMA_1B, dp=8, zero_stage=3, recompute="selective"),
    "1f1b": layout(pp=4, microbatches=8, dp=2, zero_stage=2),
    "gpipe": layout(pp=2, pp_schedule="gpipe", microbatches=4),
    "experts": layout(MIXTRAL, dp=8, ep=8, zero_stage=2, microbatches=3),
    "latents and experts": layout(DEEPSEEK_V2_LITE, dp=8, ep=4, zero_stage=3, pp=2, microbatches=4),
    "zero bubble": layout(pp=2, pp_schedule="interleaved_zero_bubble", microbatches=4, dp=2, zero_stage=2),
    "chunks": layout(pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, microbatches=4, dp=2, zero_stage=1),
    "V": layout(MIXTRAL, pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, microbatches=4, dp=2, zero_stage=3),
}
PEAKS = {
    "one rank": (7414886400, 4943257600, 9886515200, 12824510464),
    "ZeRO 1": (20075653120, 32121044992, 8030261248, 42582966272),
    "ZeRO 3": (5065803776, 4015130624, 8030261248, 8655241216),
    "tied, ZeRO 3": (1143243776, 0, 1235814400, 9053577216),
    "1f1b": (9953378304, 4976689152, 9953378304, 47157870592),
    "gpipe": (25399443456, 0, 33865924608, 84283228160),
    "experts": (37836957696, 23351396352, 46702792704, 67735257088),
    "latents and experts": (4640919296, 4239296256, 8478592512, 34278670336),
    "zero bubble": (16932962304, 8466481152, 16932962304, 44573458432),
    "chunks": (16932962304, 16932962304, 16932962304, 53704065024),
    "V": (47227084800, 46964940800, 93929881600, 76057395200),
}
"""(parameters, gradients, optimizer, activations) on the fullest stage, as the sums at moments that came before events
had them."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_by_category_are_those_of_earlier_versions(name: str) -> None:
    memory = estimate_memory(LAYOUTS[name])
    peak = memory.stages[memory.peak_stage]
    parts = peak.parameters_bytes, peak.gradients_bytes, peak.optimizer_bytes, peak.activations_bytes
    assert parts == PEAKS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_running_sum_of_events_is_highest_at_the_peak(name: str) -> None:
    e = LAYOUTS[name]
    memory = estimate_memory(e)
    stage, timeline, place = peak_timeline(e)
    events = events_of(timeline)
    assert [event.total for event in events] == list(accumulate(event.bytes for event in events))
    assert max(event.total for event in events if event.step >= 0) == memory.peak_bytes
    first = next(event for event in events if event.total == memory.peak_bytes)
    assert (stage, first.step) == (memory.peak_stage, place)
    assert sum(by_category(live_at(timeline, place))) == memory.peak_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_allocated_before_it_is_freed(name: str) -> None:
    e = LAYOUTS[name]
    for stage, held in enumerate(experiment_stages(e)):
        for timeline in timelines_of(e, Shared.of(e), stage, held):
            live = dict.fromkeys(TENSORS, 0)
            for event in events_of(timeline):
                live[event.tensor] += event.bytes
                assert live[event.tensor] >= 0, (timeline.action, event)


def test_what_is_freed_in_a_step_goes_before_what_is_allocated() -> None:
    steps = [("unit", {"working": 7, "saved": 1}), ("unit", {"flat": 3})]
    timeline = Timeline("backward", {"saved": 5, "weights": 2}, steps)
    assert [(event.step, event.tensor, event.bytes, event.total) for event in events_of(timeline)] == [
        (-1, "saved", 5, 5),
        (-1, "weights", 2, 7),
        (0, "saved", -4, 3),
        (0, "working", 7, 10),
        (1, "flat", 3, 13),
    ]
    assert highest([timeline, Timeline("later", {"saved": 13}, [("unit", {})])]) == (0, 1, 13), (
        "the first of equal peaks"
    )
    assert by_category(live_at(timeline, 0)) == [2, 0, 0, 8]


def test_every_tensor_says_where_the_engine_makes_it() -> None:
    for tensor in TENSORS.values():
        place, *names = tensor.made_in.split()
        code = (ENGINE / place).read_text(encoding="utf-8")
        assert all(part in code for name in names for part in name.split(".")), tensor


def test_equal_chunks_of_all_ranks_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    e = layout(pp=8, pp_schedule="interleaved_1f1b", virtual_stages=4, microbatches=16, dp=2, zero_stage=2)
    evaluated: Counter[tuple[Part, Any]] = Counter()
    backward = chunk_events._backward

    def counted(chunk: Chunk, *key: Any) -> Any:
        evaluated[chunk.part, key] += 1
        return backward(chunk, *key)

    monkeypatch.setattr(chunk_events, "_backward", counted)
    estimate_memory(e)
    assert len({part for part, _ in evaluated}) == 3, "the first, the last and those between, of 32"
    assert max(evaluated.values()) == 1


def test_sizes_of_layers_are_kept_for_layouts_that_differ_elsewhere() -> None:
    e = layout(tp=2, dp=8, zero_stage=2, microbatches=4)
    sizes = layer_sizes(e)
    assert layer_sizes(dataclasses.replace(e, dp_shard=4, zero_stage=3, global_batch_size=64, seed=1)) is sizes
    for field, value in {"compile": "block", "recompute": "full", "precision": "fp32", "seq_len": 2048}.items():
        assert layer_sizes(dataclasses.replace(e, **{field: value})) != sizes, field
    again = [dataclasses.replace(e, recompute="swiglu", precision="fp8_tensorwise", recompute_every=n) for n in (1, 2)]
    again = [dataclasses.replace(one, pp=2, pp_schedule="interleaved_zero_bubble") for one in again]
    assert layer_sizes(again[0]) != layer_sizes(again[1])


def test_layers_come_by_class_in_the_order_of_the_model() -> None:
    e = LAYOUTS["latents and experts"]
    first, last = (layer_classes(e, held) for held in experiment_stages(e))
    assert [bool(one.size.experts) for one in first] == [False, True]
    assert [bool(one.size.experts) for one in last] == [True]
    assert sum(one.layers for one in (*first, *last)) == DEEPSEEK_V2_LITE.num_layers
    assert first[0].layers == 1 and first[0].saved == first[0].size.kept
