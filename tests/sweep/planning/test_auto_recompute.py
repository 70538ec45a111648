"""What ``recompute: auto`` chooses: it fits the budget, and no word that fits is predicted to be faster by more than
predictions tell apart."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
from typing import Any

import pytest
from rich.console import Console

from results.text.numbers import format_bytes
from sweep.composing.config import SweepConfig, compose_sweep
from sweep.grids.expand import expand_all
from sweep.grids.step_time import ALIKE
from sweep.planning.auto_recompute import Asked, choose, tensor_limit, with_choices
from sweep.planning.best_layouts import print_best
from sweep.planning.facts import plan_facts
from sweep.planning.plan import Plan, make_plan, refuse_if_nothing_can_run
from sweep.planning.summary import fallbacks, print_plan
from sweep.predicting.forecast import Forecast
from tests.sampling import sampled
from tests.workloads.costs.memory.traced import shortened
from tests.workloads.costs.shapes import DEEPSEEK_V2_LITE, LLAMA_8B, QWEN3_30B
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.partition import experiment_layers, with_word
from workloads.costs.time.step_times import StepTimes
from workloads.predict.fitting_recompute import FittingRecompute, words_of
from workloads.rules.layout_rules import violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment

GIB = 2**30
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble_v", 2))


def config(*overrides: str) -> SweepConfig:
    return compose_sweep(["+grid=llama8b_8gpu", "cluster=h100_efa", "name=auto", "grid.axes.compile=none", *overrides])


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    return config().cluster


def drawn(draw: random.Random) -> Experiment:
    model, layers = draw.choice([(LLAMA_8B, 12), (QWEN3_30B, 10), (DEEPSEEK_V2_LITE, 9)])
    pp = draw.choice([1, 2, 2, 4])
    schedule, chunks = draw.choice(SCHEDULES) if pp > 1 else ("none", 1)
    if pp * chunks > layers:
        schedule, chunks = "1f1b", 1
    zero, size = draw.randint(0, 3), draw.choice([1, 2, 4])
    dp = 1 if zero == 0 else 8
    return Experiment.canonical(
        model=shortened(model, layers),
        dp=dp,
        zero_stage=zero,
        tp=draw.choice([1, 2]),
        pp=pp,
        pp_schedule=schedule,
        virtual_stages=chunks,
        micro_batch_size=size,
        seq_len=4096,
        global_batch_size=size * dp * pp * draw.choice([1, 2, 4]),
    )


def peak_gib(e: Experiment, cluster: ClusterSpec) -> float:
    """What a device must have: tensors, the workspace of products, and what is reserved."""
    beside = cluster.reserved_bytes + cluster.device.workspace_bytes
    return (estimate_memory(e).peak_bytes + beside) / GIB


def seconds(layouts: list[Experiment], cluster: ClusterSpec) -> list[float]:
    forecast = Forecast.of(cluster)
    times = forecast.times(layouts)
    peaks = [estimate_memory(e).peak_bytes for e in layouts]
    return [
        forecast.near_full(one, peak).step_time_s for one, peak in zip(times, peaks, strict=True) if one is not None
    ]


@pytest.mark.parametrize("seed", sampled(range(4), 1, seconds=1.5))
def test_no_word_that_fits_the_budget_is_faster(cluster: ClusterSpec, seed: int) -> None:
    draw = random.Random(seed)
    found = 0
    while found < 6:
        e = drawn(draw)
        if violations(e, cluster):
            continue
        words = [with_word(e, word) for word in words_of(e)]
        peaks = [peak_gib(one, cluster) for one in words]
        memory = (cluster.device.memory_bytes or 0) / GIB
        if min(peaks) >= memory:
            continue
        budget = draw.uniform(min(peaks), min(max(peaks) + 0.5, memory))
        (chosen,) = choose([Asked(e, budget)], Forecast.of(cluster))
        assert chosen is not None
        mine = Experiment.canonical(**vars_of(e), recompute=chosen.recompute)
        assert mine.recompute == chosen.recompute, "the words are written as an experiment has them"
        assert not violations(mine, cluster)
        assert chosen.fits
        assert peak_gib(mine, cluster) <= budget
        fitting = [one for one, peak in zip(words, peaks, strict=True) if peak <= budget]
        (own, *others) = seconds([mine, *fitting], cluster)
        assert own <= min(others) * (1 + ALIKE)
        found += 1


def vars_of(e: Experiment) -> dict[str, Any]:
    fields = {field.name: getattr(e, field.name) for field in dataclasses.fields(e)}
    fields.pop("recompute")
    return fields


def test_nothing_is_repeated_where_memory_is_free(cluster: ClusterSpec) -> None:
    """By the forecast this model is faster with repeated norms than without, by less than it errs."""
    e = Experiment.canonical(
        model=QWEN3_30B, dp=64, ep=16, pp=2, zero_stage=1, precision="fp8_tensorwise", seq_len=4096,
        global_batch_size=1024,
    )  # fmt: skip
    none, norm = seconds([e, with_word(e, "norm")], cluster)
    assert norm < none
    (chosen,) = choose([Asked(e)], Forecast.of(cluster))
    assert chosen is not None and chosen.fits
    assert chosen.recompute == "none"


@pytest.mark.parametrize("seed", range(3))
def test_with_one_stage_a_rank_it_is_the_least_of_all_choices(cluster: ClusterSpec, seed: int) -> None:
    """Every combination of what two stages may recompute is looked at."""
    draw = random.Random(seed)
    e = Experiment.canonical(
        model=shortened(LLAMA_8B, 6), pp=2, dp=8, zero_stage=draw.choice([1, 2, 3]), micro_batch_size=2, seq_len=4096,
        global_batch_size=16 * draw.choice([2, 4, 8]),
    )  # fmt: skip
    times = StepTimes(cluster)
    choices = [[*words_of(e), *(f"full:{count}" for count in range(1, len(layers)))] for layers in experiment_layers(e)]
    layouts = [Experiment.canonical(**vars_of(e), recompute=f"{one}/{two}") for one, two in itertools.product(*choices)]
    peaks = [estimate_memory(one).peak_bytes for one in layouts]
    limit = draw.randint(min(peaks), max(peaks))
    fit = FittingRecompute(times).fit(e, limit)
    fitting = [one for one, peak in zip(layouts, peaks, strict=True) if peak <= limit]
    assert 0 < len(fitting) < len(layouts)
    own = with_word(e, fit.recompute)
    assert fit.too_big is None
    assert [stage.peak_bytes for stage in estimate_memory(own).stages] == list(fit.peaks)
    assert max(fit.peaks) <= limit
    (least, *others) = times.seconds([own, *fitting]).tolist()
    assert least <= min(others) * (1 + 1e-12)


def test_a_budget_counts_what_is_reserved(cluster: ClusterSpec) -> None:
    """A peak of tensors alone that is exactly the budget does not fit: nothing would be left for the rest."""
    e = Experiment.canonical(model=LLAMA_8B, dp=8, zero_stage=3, micro_batch_size=2, seq_len=4096, global_batch_size=16)
    assert cluster.reserved_bytes > 0
    tensors = estimate_memory(e).peak_bytes / GIB
    search = FittingRecompute(StepTimes(cluster))
    assert search.fit(e, tensor_limit(cluster, tensors)).recompute != "none"
    assert search.fit(e, tensor_limit(cluster, peak_gib(e, cluster) + 1e-6)).recompute == "none"
    (chosen,) = choose([Asked(e, tensors)], Forecast.of(cluster))
    assert chosen is not None
    assert peak_gib(with_word(e, chosen.recompute), cluster) <= tensors


ONE_POINT = ("+grid=one_point", "grid.axes.model=llama8b")


def test_a_layout_that_fits_with_no_choice_says_so_in_numbers(cluster: ClusterSpec) -> None:
    e = Experiment.canonical(model=LLAMA_8B, pp=2, micro_batch_size=4, seq_len=4096, global_batch_size=16)
    (chosen,) = choose([Asked(e, 40.0)], Forecast.of(cluster))
    assert chosen is not None
    assert not chosen.fits
    assert "does not fit, whatever is recomputed" in chosen.why
    assert "GiB of memory_budget=40 GiB, of which" in chosen.why
    assert chosen.fallbacks == ("recompute=auto does not fit memory_budget=40 GiB, whatever is recomputed",)
    assert "\n" not in chosen.why


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("axis", ["recompute", "activation_offload"])
def test_a_budget_that_nothing_fits_names_what_gives_room_on_a_device(axis: str) -> None:
    plan = planned(*ONE_POINT, f"grid.axes.{axis}=auto", "+grid.axes.memory_budget=9")
    with pytest.raises(
        InvalidSweep, match=r"of memory_budget=9 GiB, of which .*use a larger memory_budget, more devices"
    ):
        refuse_if_nothing_can_run(plan)


def planned(*overrides: str) -> Plan:
    one = config(*overrides)
    expansion = with_choices(expand_all(one.grids, one.models.__getitem__), one.cluster)
    return make_plan(one, expansion, "measured")


def test_the_summary_counts_points_where_nothing_is_recomputed_by_reason_and_budget() -> None:
    fixed = [f"grid.axes.{one}" for one in ("tp=[1,2]", "pp=1", "zero_stage=3", "recompute=auto")]
    plan = planned(*fixed, "grid.axes.micro_batch_size=1", "+grid.axes.memory_budget=[12,70,500]")
    device = format_bytes(plan.config.cluster.device.memory_bytes)
    assert sorted(fallbacks(plan)) == [
        "2 points: recompute=auto does not fit memory_budget=12 GiB, whatever is recomputed",
        f"2 points: recompute=auto is none: what a step keeps fits the {device} of a device (memory_budget=500 GiB is "
        "more)",
    ]
    assert set(fallbacks(plan)) <= set(plan_facts(plan)["notes"])
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=200))
    assert all(line in file.getvalue() for line in fallbacks(plan))


def test_a_plan_has_the_words_and_says_why() -> None:
    fields = ("grid.axes.recompute=[none,full,auto]", "+grid.axes.memory_budget=60")
    plan = planned(*fields)
    assert all(point.experiment.recompute != "auto" for point in plan.points)
    chosen = [point for point in plan.points if (point.detail or "").startswith("recompute=auto is ")]
    assert any("/" in one.experiment.recompute or ":" in one.experiment.recompute for one in chosen)
    for point in chosen:
        assert point.verdict == "run"
        assert point.detail is not None
        assert point.detail.startswith(f"recompute=auto is {point.experiment.recompute}: stages need ")
        assert point.peak_bytes is not None
        assert point.peak_bytes + plan.config.cluster.reserved_bytes <= 60 * GIB
    late = [point for point in plan.points if point.verdict == "predicted_oom"]
    assert late
    assert any("memory_budget=60 GiB" in (point.detail or "") for point in late)
    file = io.StringIO()
    print_best(plan, Console(file=file, width=400))
    assert file.getvalue().count(" recompute=auto is ") == 3
    # No point of the same layout with a word of the grid is faster within the budget.
    by_layout: dict[Experiment, list[Any]] = {}
    for point in plan.points:
        by_layout.setdefault(with_word(point.experiment, "none"), []).append(point)
    for point in chosen:
        rivals = [one for one in by_layout[with_word(point.experiment, "none")] if one.verdict == "run"]
        assert point.time is not None
        assert all(point.time.step_time_s <= one.time.step_time_s * (1 + 1e-12) for one in rivals)


def test_what_cannot_be_chosen_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidSweep, match="engine=megatron: its memory is not predicted by stage"):
        planned("grid.axes.recompute=auto", "+grid.axes.engine=megatron")
    with pytest.raises(InvalidSweep, match="memory_budget=1 GiB leaves nothing for training"):
        planned("grid.axes.recompute=auto", "+grid.axes.memory_budget=1")
    with pytest.raises(
        InvalidSweep, match=r"lacks matmul_efficiency; give cluster\.matmul_efficiency=\.\.\., or choose"
    ):
        planned("grid.axes.recompute=auto", "cluster.matmul_efficiency=null")
    without_link = ("cluster.host.link_bandwidth=null", "+grid.axes.activation_offload=input")
    with pytest.raises(InvalidSweep, match=r"lacks host\.link_bandwidth"):
        planned("grid.axes.recompute=auto", *without_link)
    with pytest.raises(InvalidSweep, match=r"memory_budget=-3 must be a number of GiB"):
        planned("grid.axes.recompute=auto", "+grid.axes.memory_budget=-3")
