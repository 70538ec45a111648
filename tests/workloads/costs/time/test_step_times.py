"""Steps of many layouts at one time: each as its schedule says when it is executed action by action, whatever layouts
came before it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.workloads.costs.shape.test_schedule import NAMES, chunks_of
from tests.workloads.costs.shapes import DEEPSEEK_V3, H200, LLAMA_1B, LLAMA_8B, MIXTRAL, ONE_NODE
from workloads.costs.shape.schedule import SPLIT_BACKWARD, V_SHAPED, schedule_actions, stage_at
from workloads.costs.time.execution import executed_s, steps_of
from workloads.costs.time.lockstep import executed_together_s
from workloads.costs.time.pipeline import pipeline_time_s, pipeline_times_s, simulate
from workloads.costs.time.step_simulation import ChunkWork, StepWork, simulate_step
from workloads.costs.time.step_times import StepTimes
from workloads.costs.time.timeline import estimate_time, step_work
from workloads.costs.traffic.collectives import COMPUTE_BESIDE, TRAFFIC_BESIDE
from workloads.rules.layout_rules import violations
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import ENGINE_VERSION, Experiment
from workloads.spec.experiment_values import FIELDS
from workloads.spec.model_spec import model_from_dict


def drawn(draw: random.Random) -> Experiment:
    """Any layout that the rules allow on nodes of H200."""
    while True:
        model, name = draw.choice([LLAMA_1B, LLAMA_8B, DEEPSEEK_V3, MIXTRAL]), draw.choice(NAMES)
        pp, dp, mbs = draw.choice([1, 2, 3, 4, 8, 16]), draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        zero = draw.choice([0, 1, 2, 3])
        fields: dict[str, Any] = {
            "dp_replicate": dp if zero == 0 else draw.choice([1, 2]),
            "tp": draw.choice([1, 2, 4]),
            "cp": draw.choice([1, 1, 2]),
            "cp_kind": draw.choice(["ring", "allgather", "ulysses"]),
            "zero_stage": zero,
            "precision": draw.choice(["bf16", "bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"]),
            "recompute": draw.choice(["none", "selective", "full", "norm", "mla_up+swiglu"]),
            "recompute_every": draw.choice([1, 2, 3]),
            "pp_schedule": name,
            "pp_split": draw.choice(["even", "balanced"]),
            "virtual_stages": draw.choice(chunks_of(name)),
            "sequence_parallel": draw.choice([True, True, False]),
            "compile": draw.choice(["none", "block"]),
        }
        if model.moe is not None:
            fields |= {"ep": draw.choice([1, 2, 4]), "etp": draw.choice([1, fields["tp"]])}
            fields |= {"routing": draw.choice(["balanced", "skewed"]), "routing_imbalance": draw.choice([1.5, 3.0])}
        fields["dp_shard"] = dp // fields["dp_replicate"]
        try:
            e = Experiment.canonical(
                model=model,
                pp=pp,
                micro_batch_size=mbs,
                global_batch_size=dp * mbs * draw.randint(1, 24),
                seq_len=draw.choice([2048, 4096]),
                **fields,
            )
        except InvalidExperiment:
            continue
        if not violations(e, H200):
            return e


def slowed(compute_s: float, traffic_s: float, chunk: ChunkWork) -> float:
    """Both from the same moment on, each slower while the other runs."""
    compute = 1 + (COMPUTE_BESIDE - 1) * chunk.compute_beside
    traffic = 1 + (TRAFFIC_BESIDE - 1) * chunk.traffic_beside
    both = min(compute * compute_s, traffic * traffic_s)
    return both + (compute_s - both / compute) + (traffic_s - both / traffic)


def executed_step_s(work: StepWork) -> float:
    """The same bound, spelled out for one layout: every action of the schedule, executed at steady times."""
    p, zero3, last = len(work.chunks), work.zero_stage == 3, len(work.chunks) * len(work.chunks[0]) - 1
    steady: list[list[tuple[float, ...]]] = []
    once = 0.0
    for rank, own in enumerate(work.chunks):
        steady.append([])
        for at, chunk in enumerate(own):
            n, stage = chunk.units, stage_at(work.schedule, rank, at, p)
            gather, scatter = chunk.gather_s * zero3, chunk.scatter_s * (work.zero_stage >= 2)

            def behind(compute: float, gather: float, n: int = n, chunk: ChunkWork = chunk) -> float:
                return (gather + (n - 1) * slowed(compute, gather, chunk) + compute) / n if gather else compute

            def beside(compute: float, gather: float, reduce: float, n: int = n, chunk: ChunkWork = chunk) -> float:
                if gather + reduce == 0:
                    return compute
                return (gather + compute + (n - 1) * slowed(compute, gather + reduce, chunk)) / n

            forward = behind(chunk.forward_s, gather)
            backward = beside(chunk.backward_s, gather, scatter)
            wait = scatter / n if zero3 else 0.0
            weight = max(beside(chunk.weight_s, 0.0, scatter), scatter)
            total = chunk.scatter_s + chunk.replicas_s
            longer = beside(chunk.backward_s, gather, total) + total / n - backward
            if work.schedule in SPLIT_BACKWARD:
                behind_others = total + chunk.scatter_s / n
                longer = max(longer, max(beside(chunk.weight_s, 0.0, total) + total / n, behind_others) - weight)
            once += chunk.copied_s + chunk.unscattered_s
            once += longer + (0.0 if zero3 else behind(chunk.forward_s, chunk.gather_s) - chunk.forward_s)
            turn = work.schedule in V_SHAPED and rank == p - 1
            hop = work.latency_s + work.message_s
            here = hop if stage > 0 and not (turn and stage == p) else 0.0
            there = hop if stage < last and not (turn and stage == p - 1) else 0.0
            inputs = behind(chunk.input_s, gather)
            gpipe = work.schedule == "gpipe" and p > 1  # its backwards follow each other
            forward, backward = (forward, backward + wait) if gpipe else (forward + wait, backward)
            steady[-1].append((forward + here, backward + there, inputs + there, weight))
    m, v = work.num_microbatches, len(work.chunks[0])
    lists = [schedule_actions(work.schedule, rank, p, m, v) for rank in range(p)]
    forward, backward, inputs, weight = ([[one[at] for one in own] for own in steady] for at in range(4))
    found = simulate(lists, forward, backward, name=work.schedule, input_s=inputs, weight_s=weight)
    return found.total_s + once + work.tied_s + max(work.optimizer_s)


@pytest.mark.slow
def test_layouts_together_are_layouts_alone() -> None:
    """In one call, with what is shared computed once; one by one; and executed action by action."""
    draw = random.Random(7)
    experiments = [drawn(draw) for _ in range(150)]
    together = StepTimes(H200).seconds([*experiments, *experiments[::-1]])
    assert (together[:150] == together[150:][::-1]).all()
    for e, found in zip(experiments, together[:150].tolist(), strict=True):
        alone, work = estimate_time(e, H200), step_work(e, H200)
        assert alone is not None and work is not None
        assert found == pytest.approx(alone.step_time_s, rel=1e-13), e.id
        assert found == pytest.approx(executed_step_s(work), rel=1e-12), e.id


@pytest.mark.slow
def test_no_step_takes_longer_than_its_closed_form() -> None:
    draw = random.Random(5)
    for e in (drawn(draw) for _ in range(150)):
        work = step_work(e, H200)
        assert work is not None
        assert simulate_step(work).step_s <= executed_step_s(work) * (1 + 1e-12), e.id


VARIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "micro_batch_size"), (1, 2, 4)),
    "global_batch_size": (64, 128),
    "seq_len": (2048, 4096),
    "zero_stage": (0, 1, 2, 3),
    "recompute": ("none", "norm", "full"),
    "recompute_every": (1, 2),
    "pp_schedule": ("1f1b", "gpipe", "zero_bubble_v", "interleaved_zero_bubble"),
    "virtual_stages": (1, 2),
    "pp_split": ("even", "balanced"),
    "cp_kind": ("ring", "allgather", "ulysses"),
    "sequence_parallel": (True, False),
    "precision": ("bf16", "fp8_rowwise"),
    "compile": ("none", "block"),
    "routing": ("balanced", "skewed", "learned"),
    "routing_imbalance": (1.5, 3.0),
    "capacity_factor": (None, 1.25),
    "recurrence": ("torch", "fla"),
    "attention": ("auto", "flash", "math"),
    "activation_offload": ("none", "all"),
    "pp_stages": (None, "Et*5|t*4|t*4|t*3L"),
    "pad_vocab_to": (None, 1024),
    "gradient_accumulation_fusion": (False, True),
    "grad_reduce": ("fp32", "bf16"),
    "optimizer": ("adamw", "sgd", "adafactor", "muon"),
    "optimizer_states": ("fp32", "bf16"),
    "master_weights": ("fp32", "bf16"),
    "optimizer_offload": (0.0, 0.5),
    "documents": (None, {"kind": "lognormal", "mean": 1500, "sigma": 1.2, "seed": 7}),
    "document_balance": ("none", "greedy"),
    "cuda_graph": ("auto", "none"),
    "engine": ("ultrasweep", "torchtitan"),
    "engine_version": ("1", ENGINE_VERSION),
    "seed": (1, 42),
}
DOCUMENTS = VARIED["documents"][1]
RECURRENT = model_from_dict(
    {"name": "recurrent", "hidden_size": 2048, "vocab_size": 128256, "layers": {"kinds": [
        {"mixer": {"kind": "mamba2", "heads": 64, "head_dim": 64, "groups": 8, "state": 128, "kernel": 4}, "mlp": None},
        {"mixer": {"kind": "attention", "heads": 32, "kv_heads": 8, "head_dim": 64, "value_dim": 64},
         "mlp": {"kind": "dense", "width": 8192, "activation": "silu"}},
    ], "order": [0, 1, 0, 1]}}
)  # fmt: skip


BASES: tuple[dict[str, Any], ...] = (
    {"model": LLAMA_1B, "cp": 2, "pp": 2, "pp_schedule": "interleaved_zero_bubble"},
    {"model": LLAMA_1B, "pp": 2, "virtual_stages": 2, "pp_schedule": "interleaved_1f1b"},
    {"model": DEEPSEEK_V3, "cp": 2, "pp": 2, "pp_schedule": "interleaved_zero_bubble", "ep": 2, "etp": 2}
    | {"routing": "skewed", "routing_imbalance": 2.0},
    {"model": RECURRENT},
    {"model": LLAMA_1B, "zero_stage": 1, "documents": DOCUMENTS, "optimizer": "muon"},
)
NO_EFFECT = {"activation_offload", "capacity_factor", "engine", "optimizer_offload", "seed"}
"""Fields that change no step of `BASES`: what they cost is added elsewhere, or they act where the rules refuse them."""


def test_layouts_that_differ_in_one_field_are_told_apart() -> None:
    """What is kept of one layout is taken for another only where it is the same."""
    left_out = set(FIELDS) - set(VARIED)
    assert not left_out, f"no values to vary: {sorted(left_out)}"
    draw, differ = random.Random(11), set()
    for base_fields in BASES:
        fields: dict[str, Any] = {
            "dp_shard": 2,
            "zero_stage": 2,
            "tp": 2,
            "global_batch_size": 64,
            "recompute": "selective",
            **base_fields,
        }
        base = Experiment.canonical(**fields)
        near = []
        for field, ones in VARIED.items():
            for one in ones:
                try:
                    near.append((field, Experiment.canonical(**fields | {field: one})))
                except InvalidExperiment:
                    continue
        near = [(field, one) for field, one in near if not violations(one, H200)]
        draw.shuffle(near)
        found = StepTimes(H200).seconds([base, *(one for _, one in near)])
        for (field, one), together in zip(near, found[1:].tolist(), strict=True):
            assert together == pytest.approx(StepTimes(H200).seconds([one])[0], rel=1e-13), one.id
            differ |= {field} if together != found[0] else set()
    assert set(VARIED) - differ == NO_EFFECT, "a field that changes nothing tests nothing"


def test_what_is_not_known_is_no_number() -> None:
    known = Experiment.canonical(model=LLAMA_8B, dp=2, global_batch_size=4)
    found = StepTimes(H200).seconds([known.replace(precision="fp32"), known])
    assert np.isnan(found).tolist() == [True, False]
    assert np.isnan(StepTimes(ONE_NODE).seconds([known])).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_at_many_times_is_the_schedule_at_each(name: str) -> None:
    """With and without rounds that repeat, some of whose layouts come to rest before others."""
    rng = np.random.default_rng(3)
    for p, m in ((1, 5), (2, 3), (2, 64), (3, 48), (4, 70), (4, 300), (8, 17)):
        v = chunks_of(name)[-1]
        times = rng.uniform(0.5, 2.0, (4 * p * v, 60))
        times[:, :20] = 1.0 + times[:, :20] * 1e-3
        times[:, 20:25] = 1.0
        found = pipeline_times_s(name, times, p, m, v)
        for column, one in zip(times.T, found, strict=True):
            kinds = column.reshape(4, p, v).tolist()
            alone = pipeline_time_s(name, *kinds[:2], m, virtual_stages=v, input_s=kinds[2], weight_s=kinds[3])
            assert one == pytest.approx(alone, rel=1e-13), (p, m)
        if name not in ("gpipe", "1f1b"):
            steps = steps_of(name, p, m, v)
            same = [executed_s(steps, column.tolist(), p, 0.0) for column in times.T]
            assert executed_together_s(name, p, m, v, times).tolist() == same
