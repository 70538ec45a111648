"""``advise``: its numbers are a plan's, and no layout of the space beats its first."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from sweep.advising.answer import Advice, answer, settling_words
from sweep.advising.facts import advice_facts
from sweep.advising.question import read_question
from sweep.advising.ranked import family_of
from sweep.advising.ranking import Ranking
from sweep.advising.report import print_answer
from sweep.advising.space import space_of
from sweep.advising.times import Times
from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from sweep.grids.step_time import ALIKE
from sweep.planning.auto_recompute import tensor_limit
from sweep.planning.plan import make_plan
from sweep.predicting.known import Known
from tests.sampling import sampled
from tests.sweep.helpers import APERTUS
from tests.workloads.costs.published import PUBLISHED
from workloads.costs.memory.estimate import peak_stage
from workloads.rules.layout_rules import violations
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.drawn(one_in=2)

LLAMA = ("model=llama8b", "cluster=h200", "gpus=8", "global_batch_size=64")
MIXTURE = ("model=qwen3_30b_a3b_8_layers", "cluster=h200", "gpus=8", "global_batch_size=64", "seq_len=4096")
LONG = ("model=llama8b", "cluster=h200", "gpus=8", "global_batch_size=16", "seq_len=16384", "cp=[1,2,4]")
DEEP = (
    "model=llama8b",
    "cluster=h100_efa",
    "gpus=32",
    "global_batch_size=64",
    "pp=[4,8]",
    "tp=[1,2]",
    "zero_stage=[0,1]",
)
EAGER = "cuda_graph=none"
SHORT = ("model=llama8b", "cluster=h200", "gpus=8", "global_batch_size=64", "seq_len=128", "pp=[1,2,4,8]", EAGER)
SHORT_PARTS = (*LONG[:3], "global_batch_size=8", "seq_len=1024", "cp=[4,8]", "cp_kind=[ring,allgather,ulysses]", EAGER)
SHORT_MIXTURE = (*MIXTURE[:4], "seq_len=512", EAGER)
"""Of which the host sets the pace."""
LINK = ("cluster.host.link_bandwidth=50e9", "cluster.host.memory_bandwidth=400e9")
HOST = ("model=llama8b", "cluster=h200", "gpus=8", "global_batch_size=64", "seq_len=16384", *LINK, "memory_budget=70")
ON_DEVICES = (LLAMA, MIXTURE, LONG, DEEP, SHORT, SHORT_PARTS, SHORT_MIXTURE)
OFFLOAD = (*HOST, "activation_offload=[none,input,all]")
UPDATES = (*HOST[:3], "global_batch_size=64", *LINK, "memory_budget=24", "optimizer_offload=[0,0.5,1]")
SMALL = ("tp=[1,2,4]", "pp=[1,2]", "micro_batch_size=[1,2,4]", "cp=1", "dp_replicate=[1,2]", "recompute_every=1")


def asked(*words: str, top: int = 3) -> Advice:
    return answer(read_question(words), top, Known())


def printed(found: Advice) -> str:
    file = io.StringIO()
    print_answer(found, Console(file=file, width=200))
    return file.getvalue()


def every_layout(found: Advice) -> list[Experiment]:
    """All layouts of the space that break no rule, one by one."""
    cluster = found.question.cluster
    spaces = [ranking.space for ranking in found.rankings.each]
    spelled = (space.layout(row, group) for space in spaces for row in range(len(space)) for group in space.groups)
    ids = {one.id: one for one in spelled if one is not None and not violations(one, cluster)}
    return list(ids.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [*sampled([(one,) for one in ON_DEVICES], 1, seconds=5), *sampled([(OFFLOAD,), (UPDATES,)], 1, seconds=10)],
)
def test_nothing_in_the_space_is_faster(words: tuple[str, ...]) -> None:
    narrowed = {word.partition("=")[0] for word in words}
    found = asked(*words, *(word for word in SMALL if word.partition("=")[0] not in narrowed))
    layouts = every_layout(found)
    on_host = found.question.activation_offload != "none" or len(found.rankings.each) > 1
    assert len(layouts) == found.rankings.allowed > 100 or (on_host and len(layouts) > 100)
    fitting = [one for one in layouts if peak_stage(one).peak_bytes <= found.limit_bytes]
    times = found.times.of_layouts(fitting)
    fastest: dict[tuple[int, ...], float] = {}
    shortest_s = float("inf")
    for one, time in zip(fitting, times, strict=True):
        assert time is not None
        step = found.times.forecast.near_full(time, peak_stage(one).peak_bytes)
        fastest[family_of(one)] = min(step.cautious_s, fastest.get(family_of(one), float("inf")))
        shortest_s = min(shortest_s, step.step_time_s)
    expected = sorted(fastest.values())[:3]
    for ranked, least_s in zip(found.sizes[0].ranked.best, expected, strict=True):  # a simpler one may be as good
        longest_s = (1 + ALIKE + 1e-9) ** min(2, len(found.rankings.each)) * least_s
        assert (1 - 1e-9) * least_s <= ranked.time.cautious_s <= longest_s
    assert found.rankings.bound_s(found.sizes[0].ranked.size) <= shortest_s, "which other sizes are left out by"


def test_ranks_of_context_divide_recurrent_heads(tmp_path: Path) -> None:
    """Nemotron-H has 8 groups of heads."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["nvidia/Nemotron-H-56B-Base-8K"]["config"]))
    words = [f"model={tmp_path}/config.json", "cluster=h200", "gpus=64", "global_batch_size=64", "seq_len=8192", EAGER]
    narrow = ["cp=[2,4,8]", "tp=[1,2,4]", "pp=1", "micro_batch_size=1", "zero_stage=3", "recompute=full"]
    found = asked(*words, *narrow, "dp_replicate=1", "recompute_every=1", "cp_kind=ring")
    layouts = every_layout(found)
    assert {(one.tp, one.cp) for one in layouts} == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}
    assert len(layouts) == found.rankings.allowed == found.rankings.families


@pytest.mark.slow
@pytest.mark.parametrize("words", [LLAMA, MIXTURE])
def test_numbers_are_those_of_the_plan_that_would_settle_it(words: tuple[str, ...], tmp_path: object) -> None:
    found = asked(*words, *SMALL)
    best = found.sizes[0].ranked.best
    command = settling_words(found.question, best)
    place = command.index("--where")
    config = compose_sweep([*command[:place], f"results_dir={tmp_path}"], extra_where=[command[place + 1]])
    plan = make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured")
    points = {point.experiment.id: point for point in plan.points}
    workspace = found.question.cluster.device.workspace_bytes
    for one in best:
        point = points[one.experiment.id]
        assert point.verdict == "run"
        assert point.time is not None
        assert point.time == dataclasses.replace(one.time)
        assert point.peak_bytes == one.memory.peak_bytes + workspace
    assert shlex.join(command).replace("'", "") in printed(found).replace("'", "")


@pytest.mark.slow
def test_mfu_in_fp8_is_relative_to_the_peak_of_fp8() -> None:
    text = printed(asked(*LLAMA, "precision=fp8_rowwise", "tp=1", "pp=1", "cp=1", "micro_batch_size=[1,2]", top=1))
    assert "MFU is relative to the peak in each precision, in TFLOP/s: 1,979 of fp8_rowwise" in text
    (row,) = re.findall(r"^ *[\d,]+  [\d,]+ to [\d,]+  [\d.]+ s +([\d.]+) ", text, re.MULTILINE)
    assert 10 < float(row) < 60


def test_the_time_of_whole_matrices_is_the_optimizers() -> None:
    """Muon's step is longer than AdamW's, and all that it is longer by is the optimizer's."""
    words = [
        "model=llama8b",
        "cluster=h200",
        "gpus=4",
        "tp=1",
        "pp=1",
        "zero_stage=1",
        "micro_batch_size=1",
        "recompute=full",
        "global_batch_size=8",
    ]
    seconds = []
    for name in ("adamw", "muon"):
        found = asked(*words, f"optimizer={name}", top=1)
        (ranked,) = found.best
        parts = found.times.shares(ranked.experiment)
        assert sum((parts.work, parts.fill, parts.traffic, parts.after)) == pytest.approx(1)
        step = ranked.time.step_time_s
        seconds.append((step, parts.after * step))
    (usual, of_usual), (step, of_muon) = seconds
    assert of_muon - of_usual == pytest.approx(step - usual, rel=0.02)
    assert of_muon > 2 * of_usual


def test_a_bound_of_memory_leaves_nothing_out_that_fits() -> None:
    question = read_question((*LLAMA, *SMALL))
    space = space_of(question)
    ranking = Ranking(space, Times.of(question, Known()), 60 * 2**30)
    kept = set(ranking.rows.tolist())
    for row in range(0, len(space), 3):
        for group in space.groups[::2]:
            one = space.layout(row, group)
            if one is not None and not violations(one, question.cluster):
                assert row in kept or peak_stage(one).peak_bytes > 60 * 2**30


@pytest.mark.slow
def test_the_fewest_devices_and_the_least_money() -> None:
    words = ("model=llama8b", "cluster=h200", "gpus=[8,16,32]", "tokens=1e11", "days=16", "price=2", *SMALL)
    found = asked(*words)
    goal = found.goal
    assert goal is not None and goal.fewest is not None and goal.cheapest is not None
    fewest = goal.fewest.ranked_layout.experiment.world_size
    assert goal.fewest.days <= 16
    by_size = {one.ranked.size: one.ranked.best[0] for one in asked(*words[:2], words[2], *SMALL).sizes}
    steps = 1e11 / found.question.tokens_per_step
    days = {size: steps * best.time.step_time_s / 86400 for size, best in by_size.items()}
    assert fewest == min(size for size, took in days.items() if took <= 16)
    hours = {size: 24 * size * took for size, took in days.items() if took <= 16}
    assert goal.cheapest.device_hours == pytest.approx(min(hours.values()))
    if goal.surely is not None:
        assert goal.surely.slow_days <= 16
    text = printed(found)
    assert f"{2 * goal.cheapest.device_hours:,.0f}" in text and "price=" in text
    impossible = asked(*words[:3], "tokens=1e15", "days=1", *SMALL)
    assert impossible.goal is not None and impossible.goal.fewest is None
    assert "not reached" in printed(impossible)


@pytest.mark.slow
def test_a_price_counts_what_settling_it_takes() -> None:
    text = printed(asked(*LLAMA, *SMALL, "price=2.5", top=1))
    [hours, money] = re.findall(r"this layout takes ([\d.]+) GPU-hours \(([\d.]+) at 2.5 a GPU-hour\)", text)[0]
    assert float(money) == pytest.approx(2.5 * float(hours), abs=0.02)
    assert "a GPU-hour" not in printed(asked(*LLAMA, *SMALL, top=1))


def test_sizes_without_a_layout_are_said_in_one_line() -> None:
    found = asked("model=llama1b", "cluster=h200", "gpus=[7,8,24]", "global_batch_size=64", *SMALL, top=1)
    assert [one.ranked.size for one in found.sizes] == [8]
    assert "no layout obeys the rules on 7, 24 GPUs: dp * micro_batch_size must divide global_batch_size=64" in printed(
        found
    )


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_needs_least() -> None:
    found = asked("model=llama70b", "cluster=h200", "gpus=8", "global_batch_size=64", "cluster.reserved_bytes=100e9")
    assert not found.sizes[0].ranked.best
    assert "nothing fits" in printed(found) and "needs least: " in printed(found)


@pytest.mark.slow
def test_another_engine_gets_layouts_that_it_runs_with_its_own_times() -> None:
    words = (*LLAMA, "tp=[1,2]", "pp=1", "cp=1", "micro_batch_size=[1,2]", "zero_stage=[2,3]", "recompute=[none,full]")
    ours, theirs = asked(*words), asked(*words, "engine=torchtitan", "compile=block")
    assert theirs.times.source.endswith("on h200: its structure alone")
    best = theirs.best
    assert best and {(one.experiment.engine, one.experiment.compile) for one in best} == {("torchtitan", "block")}
    cluster = theirs.question.cluster
    assert not any(violations(one.experiment, cluster) for one in best)
    assert best[0].memory.peak_bytes <= theirs.limit_bytes
    times = {one: theirs.times.of_layouts([one])[0] for one in every_layout(theirs)}
    peaks = {one: theirs.times.forecast.memory.peak(one) for one in times}
    fitting = [
        time.cautious_s
        for one, time in times.items()
        if time is not None and (peak := peaks[one]) is not None and peak.peak_bytes <= theirs.limit_bytes
    ]
    assert min(fitting) <= best[0].time.cautious_s <= (1 + ALIKE) * min(fitting)
    assert "torchtitan" in printed(theirs) and "torchtitan" not in printed(ours)
    assert "+grid.axes.engine=torchtitan" in settling_words(theirs.question, best)
    with pytest.raises(InvalidSweep, match="dense models"):
        asked(*MIXTURE, "engine=torchtitan")


def test_a_model_that_no_engine_runs_has_no_search(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(APERTUS))
    words = (f"model={tmp_path}", *LLAMA[1:], "seq_len=2048", *SMALL, "zero_stage=1", "recompute=none")
    text = printed(asked(*words, top=1))
    assert "cannot be run yet: the engine lacks ungated (xielu) MLPs" in text
    assert "python -m sweep search" not in text and "to settle it" not in text


def test_recomputation_by_stage_is_never_slower_and_fits() -> None:
    words = ("model=llama70b", "cluster=h100_efa", "gpus=64", "global_batch_size=128", "cp=1", "micro_batch_size=4")
    words += (
        "pp=[1,2,4]",
        "tp=4",
        "dp_replicate=1",
        "pp_schedule=1f1b",
        "virtual_stages=1",
        "recompute_every=[1,2]",
    )
    by_word, by_stage = asked(*words), asked(*words, "recompute=auto")
    assert by_word.sizes[0].ranked.best
    assert any("/" in one.experiment.recompute or ":" in one.experiment.recompute for one in by_stage.best)
    for one, other in zip(by_stage.sizes[0].ranked.best, by_word.sizes[0].ranked.best, strict=True):
        assert one.time.cautious_s <= other.time.cautious_s
        assert one.memory.peak_bytes <= by_stage.limit_bytes
        assert not violations(one.experiment, by_stage.question.cluster)
    with pytest.raises(InvalidSweep, match="auto"):
        asked(*words, "recompute=rope")
    with pytest.raises(InvalidSweep, match="recompute=auto with engine=megatron"):
        asked(*words, "recompute=auto", "engine=megatron")


def test_a_budget_limits_what_layouts_may_take_and_goes_into_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    small = asked(*LLAMA, *SMALL, "memory_budget=60", top=2)
    q = small.question
    assert small.limit_bytes + q.cluster.device.workspace_bytes + q.cluster.reserved_bytes == 60 * 2**30
    assert all(one.memory.peak_bytes <= small.limit_bytes for one in small.best)
    assert max(one.memory.peak_bytes for one in asked(*LLAMA, *SMALL, top=2).best) > small.limit_bytes
    assert "(memory_budget=60 GiB)" in printed(small)
    assert "+grid.axes.memory_budget=60" in settling_words(q, small.best)
    assert asked(*LLAMA, *SMALL, "memory_budget=900", top=1).limit_bytes == q.cluster.usable_bytes - 64 * 2**20
    assert advice_facts(small)["memory_budget_gib"] == 60
    (auto,) = asked(*LLAMA, "memory_budget=40", "tp=1", "pp=1", "zero_stage=3", "recompute=auto", top=1).best
    assert auto.memory.peak_bytes <= tensor_limit(q.cluster, 40.0)


def test_what_waits_on_the_host_is_chosen_where_it_wins() -> None:
    """Of a family whose choices no prediction tells apart, the one with least on the host."""
    narrow = ("tp=1", "pp=1", "cp=1", "zero_stage=3", "micro_batch_size=1", "dp_replicate=1", "recompute_every=1")
    narrow += ("seq_len=32768", "memory_budget=106")
    found = asked(*LLAMA, *LINK, *narrow, "activation_offload=[none,input]", top=1)
    without = asked(*LLAMA, *narrow, top=1)
    (best,), (other,) = found.best, without.best
    assert best.experiment.activation_offload != "none" == other.experiment.activation_offload
    assert best.time.cautious_s < (1 - ALIKE) * other.time.cautious_s
    roomy = asked(*LLAMA, *LINK, *SMALL, "activation_offload=[all,none]", "optimizer_offload=[1,0]", top=2)
    assert {one.experiment.activation_offload for one in roomy.best} == {"none"}
    assert {one.experiment.optimizer_offload for one in roomy.best} == {0}
    assert [*advice_facts(roomy)["offloads"][0].values()] == [1.0, "all"] and len(advice_facts(roomy)["offloads"]) == 4


def test_recurrent_layers_run_on_kernels_where_a_rule_allows_it() -> None:
    asked_of = ("model=nemotron_3_nano_14_layers", "gpus=2", "seq_len=4096", "global_batch_size=8")
    chosen = {
        words: read_question((*asked_of, *words)).recurrence
        for words in (
            ("cluster=h200",),
            ("cluster=h200", "precision=fp8_tensorwise"),
            ("cluster=h200", "recurrence=torch"),
            ("cluster=h200", "precision=fp32", "cluster.device.peak_flops.fp32=67e12"),
        )
    }
    assert list(chosen.values()) == ["fla", "fla", "torch", "torch"]
    assert read_question((*LLAMA, *SMALL)).recurrence == "torch"
    found = asked(*asked_of, "cluster=h200", top=1)
    assert found.best[0].experiment.recurrence == "fla" and "grid.axes.recurrence=fla" in settling_words(
        found.question, found.best
    )
