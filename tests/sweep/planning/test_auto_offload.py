"""What ``activation_offload: auto`` chooses: it fits devices and hosts, and nothing that a grid can name and that fits
is predicted to be faster by more than predictions tell apart."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Hashable
from typing import Any

import pytest

from sweep.__main__ import main
from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from sweep.grids.step_time import ALIKE
from sweep.planning.auto_offload import Choice
from sweep.planning.auto_recompute import Asked, choose, with_choices
from sweep.planning.plan import Plan, make_plan
from sweep.predicting.forecast import Forecast
from tests.sampling import sampled
from tests.sweep.planning.test_auto_recompute import drawn, peak_gib, seconds
from tests.workloads.costs.memory.traced import shortened
from tests.workloads.costs.shapes import LLAMA_8B, QWEN3_30B
from workloads.costs.memory.host_activations import activation_bytes, link_bytes, node_host_bytes
from workloads.costs.shape.partition import with_word
from workloads.costs.time.offload_times import added_by_offload
from workloads.predict.fitting_offload import offloads_of
from workloads.predict.fitting_recompute import words_of
from workloads.rules.layout_rules import violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.recomputation import canonical_recompute

GIB = 2**30
BOTH = ("recompute", "activation_offload")
LONG = ["+grid=one_point", "grid.axes.dp_shard=8", "grid.axes.zero_stage=3"]
LONG += ["grid.axes.seq_len=32768", "grid.axes.global_batch_size=64"]
"""Layers that take longer than their copies."""
CHOOSE = ["grid.axes.recompute=auto", "grid.axes.activation_offload=auto"]


def cluster_of(name: str, host_gib: float | None = None) -> ClusterSpec:
    cluster = compose_sweep(["+grid=llama8b_8gpu", f"cluster={name}"]).cluster
    memory = None if host_gib is None else int(host_gib * GIB)
    return dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, memory_bytes=memory))


def may_offload(draw: random.Random, cluster: ClusterSpec) -> Experiment:
    """A layout that breaks no rule with activations on the host."""
    while True:
        e = drawn(draw).replace(seq_len=draw.choice([4096, 32768]))
        if not violations(e.replace(activation_offload="all"), cluster):
            return e


def host_gib(e: Experiment, cluster: ClusterSpec) -> float:
    return node_host_bytes(e, cluster.devices_per_node) / GIB


@pytest.mark.parametrize(
    ("seed", "name"), sampled([(n, name) for n in range(3) for name in ("h100_efa", "h20")], 2, seconds=6)
)
def test_nothing_that_fits_is_faster(seed: int, name: str) -> None:
    draw = random.Random(f"{seed} {name}")
    for _ in range(4):
        cluster = cluster_of(name)
        e = may_offload(draw, cluster)
        choices = [
            Choice(word, text) for word in words_of(e) for text in offloads_of(with_word(e, word), cluster).texts
        ]
        layouts = [choice.of(e) for choice in draw.sample(choices, min(100, len(choices)))]
        layouts += [Choice(word, text).of(e) for word in words_of(e) for text in ("none", "all")]
        peaks = [peak_gib(one, cluster) for one in layouts]
        held = [host_gib(one, cluster) for one in layouts]
        cluster = cluster_of(name, draw.choice([None, draw.uniform(0, max(held))]))
        limit = (cluster.host.memory_bytes or 10**18) / GIB
        budget = draw.uniform(min(peaks), min(max(peaks), (cluster.device.memory_bytes or 0) / GIB))
        (chosen,) = choose([Asked(e, budget, BOTH)], Forecast.of(cluster))
        assert chosen is not None
        fitting = [
            one for one, peak, host in zip(layouts, peaks, held, strict=True) if peak <= budget and host <= limit
        ]
        mine = chosen.choice.of(e)
        assert not violations(mine, cluster)
        assert mine == Experiment.canonical(
            **{field.name: getattr(mine, field.name) for field in dataclasses.fields(e)}
        )
        if not chosen.fits:
            assert not fitting
            continue
        assert peak_gib(mine, cluster) <= budget
        assert host_gib(mine, cluster) <= limit
        if fitting:
            own, *others = seconds([mine, *fitting], cluster)
            assert own <= min(others) * (1 + ALIKE)


@pytest.mark.parametrize("seed", range(2))
def test_sets_of_words_have_the_bytes_and_waits_of_the_closed_forms(seed: int) -> None:
    draw, cluster = random.Random(seed), cluster_of("h200")
    for _ in range(6):
        e = may_offload(draw, cluster)
        by_stage = "/".join(draw.choice(["full", "none", "norm", "selective"]) for _ in range(e.num_stages))
        sizes: dict[Hashable, Any] = {}
        for text in ("none", "full", draw.choice(words_of(e)), by_stage):
            layout = e.replace(recompute=canonical_recompute(text, e.num_stages))
            offloads = offloads_of(layout, cluster, sizes)
            assert len(set(offloads.texts)) == len(offloads.texts)
            for at in draw.sample(range(len(offloads.texts)), min(3, len(offloads.texts))):
                one = layout.replace(activation_offload=offloads.texts[at])
                assert not violations(one, cluster)
                assert offloads.link_bytes[at] == link_bytes(one)
                assert offloads.waits_s[at] == pytest.approx(added_by_offload(one, cluster), abs=1e-9)
                for held, bound in zip(activation_bytes(one), offloads.held[at], strict=True):
                    assert held == bound if e.virtual_stages == 1 else held <= bound


def planned(*overrides: str, model: str = "llama8b") -> Plan:
    config = compose_sweep([*LONG, f"model={model}", "name=auto", *overrides])
    expansion = with_choices(expand_all(config.grids, config.models.__getitem__), config.cluster)
    return make_plan(config, expansion, "measured")


def test_a_plan_has_what_was_chosen_and_says_why() -> None:
    fields = ("cluster=h200", "+grid.axes.memory_budget=60", "grid.axes.recompute=[none,full,auto]")
    plan = planned(*fields, "grid.axes.activation_offload=[none,auto]")
    assert all("auto" not in (one.experiment.recompute, one.experiment.activation_offload) for one in plan.points)
    (both,) = [one for one in plan.points if (one.detail or "").startswith("recompute=auto is selective and")]
    assert both.experiment.activation_offload == "attention+gate_up"
    assert both.verdict == "run" and both.detail is not None and both.host_memory_bytes is not None
    assert both.detail.startswith(
        "recompute=auto is selective and activation_offload=auto is attention+gate_up: stages"
    )
    host = f"the host of a node needs {both.host_memory_bytes / GIB:.1f} GiB and its memory is not known"
    assert both.detail.endswith(host)
    assert both.time is not None
    others = [one for one in plan.points if one.verdict == "run" and one is not both]
    assert any(one.experiment.activation_offload != "none" for one in others)
    assert all(one.time is None or one.time.step_time_s >= both.time.step_time_s for one in others)


def test_a_host_without_room_gets_nothing() -> None:
    fields = ("cluster=h200", "+grid.axes.memory_budget=60", *CHOOSE)
    (point,) = planned(*fields, "cluster.host.memory_bytes='100 GiB'").points
    assert (point.experiment.recompute, point.experiment.activation_offload) == ("full:27", "none")
    fields = ("cluster=h200", "+grid.axes.memory_budget=60", "grid.axes.activation_offload=auto")
    (point,) = planned(*fields, "cluster.host.memory_bytes='100 GiB'").points
    assert point.verdict == "predicted_oom" and point.detail is not None
    assert (
        "devices have room with recompute=none, activation_offload=norm+qkv+attention+gate_up+swiglu," in point.detail
    )
    needed = re.search(r"but the host of a node needs ([0-9.]+) GiB of 100\.0 GiB$", point.detail)
    assert needed is not None and 100 < float(needed[1]) < 1131
    no_host = (
        "activation_offload=auto does not fit memory_budget=60 GiB, since no host holds what devices have no room for"
    )
    assert point.fallbacks == (no_host,)


def test_recomputation_that_is_given_stays() -> None:
    fields = ("cluster=h200", "+grid.axes.memory_budget=100", "grid.axes.activation_offload=auto")
    (point,) = planned(*fields, "grid.axes.recompute=selective").points
    assert (point.experiment.recompute, point.experiment.activation_offload) == ("selective", "input+attention")
    assert point.detail is not None and point.detail.startswith("activation_offload=auto is input+attention: stages")
    (point,) = planned(*fields, "grid.axes.recompute=full").points
    assert (point.experiment.recompute, point.experiment.activation_offload) == ("full", "none")
    slower = (
        "activation_offload=auto is none: recompute=full fits memory_budget=100 GiB and is predicted to be no slower"
    )
    assert point.fallbacks == (slower,)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("grid.axes.compile=block", "with compile=block: what a compiled block saves has no names"),
        ("grid.axes.precision=fp8_tensorwise", "products save copies in fewer bits"),
        ("deepseek_v2_lite", "the words name tensors of grouped-query attention"),
    ],
)
def test_a_layout_that_may_not_offload_gets_none_and_why(field: str, told: str) -> None:
    overrides, model = ["cluster=h200", "+grid.axes.memory_budget=60"], "llama8b"
    if "=" in field:
        overrides.append(field)
    else:
        model = field
    (point,) = planned(*overrides, *CHOOSE, model=model).points
    (alone,) = planned(*overrides, CHOOSE[0], model=model).points
    assert point.experiment == alone.experiment and point.experiment.activation_offload == "none"
    assert point.detail is not None and alone.detail is not None
    assert told in point.detail and told not in alone.detail
    assert any(told in reason and reason.startswith("activation_offload=auto is none: ") for reason in point.fallbacks)


def test_what_cannot_be_chosen_is_refused_in_one_line() -> None:
    alone = ("cluster=h200", "grid.axes.activation_offload=auto")
    with pytest.raises(
        InvalidSweep, match=r"lacks host\.link_bandwidth; give cluster\.host\.link_bandwidth=\.\.\., or"
    ):
        planned(*alone, "cluster.host.link_bandwidth=null")
    with pytest.raises(InvalidSweep, match=r"engine=megatron: .* by stage; give activation_offload=none$"):
        planned(*alone, "grid.axes.engine=megatron")
    with pytest.raises(InvalidSweep, match=r"activation_offload='some' must be auto, none, all, or some of input"):
        planned("cluster=h200", "grid.axes.activation_offload=some")


def test_words_of_a_grid_may_have_any_order() -> None:
    (point,) = planned("cluster=h200", "grid.axes.activation_offload=[attention+input,input+attention]").points
    assert point.experiment.activation_offload == "input+attention"


def test_a_given_offload_leaves_other_recomputation() -> None:
    """What is offloaded by name is not recomputed, and the choice is written as an experiment has it."""
    cluster = cluster_of("h200")
    e: dict[str, Any] = {
        "model": shortened(LLAMA_8B, 8),
        "seq_len": 8192,
        "global_batch_size": 4,
        "micro_batch_size": 4,
    }
    for text in ("norm", "input"):
        layout = Experiment.canonical(**e, activation_offload=text)
        least = min(peak_gib(with_word(layout, word), cluster) for word in words_of(layout))
        (chosen,) = choose([Asked(layout, least + 0.01)], Forecast.of(cluster))
        assert chosen is not None and chosen.fits
        mine = chosen.choice.of(layout)
        assert not violations(mine, cluster)
        assert mine == Experiment.canonical(**e, recompute=chosen.recompute, activation_offload=text)


def test_experts_without_dense_layers_offload_what_they_have() -> None:
    cluster = cluster_of("h200")
    e = Experiment.canonical(model=shortened(QWEN3_30B, 6), seq_len=4096, micro_batch_size=4, global_batch_size=4)
    texts = offloads_of(e, cluster).texts
    assert texts and not any("gate_up" in text or "swiglu" in text for text in texts)


def test_the_command_line_plans_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LONG, "model=llama8b", "cluster=h200", "+grid.axes.memory_budget=100", *CHOOSE]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "recompute=auto is selective and activation_offload=auto is input+attention: stages need 96.2 GiB" in printed
    assert "186.0 GiB of the host's memory on a node" in printed
