"""The page's memory model against the planner's, number by number and sentence by sentence."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any, get_args

import pytest

from analysis.explorer.model_data import models_json
from analysis.explorer.rule_data import rules_json
from results.errors import UltrasweepError
from tests.analysis.browser import Browser
from tests.analysis.javascript import evaluate
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.costs.shape.params import num_params
from workloads.rules.layout_rules import LACKING, RULES, violations
from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.experiment import Experiment, Recompute, to_dict
from workloads.spec.experiment_values import OptimizerName
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec, model_from_dict
from workloads.spec.recomputation import OPERATIONS, canonical_recompute, is_by_stage

SCRIPTS = ("memory_model.js", "memory_rules.js")
SHIPPED = [model_from_dict(fields) for fields in models_json()["models"]]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")


def random_model(draw: random.Random) -> ModelSpec:
    """A shipped shape or one that nobody has trained."""
    if draw.random() < 0.5:
        return draw.choice(SHIPPED)
    kv = draw.choice([1, 2, 4, 6, 12])
    heads = kv * draw.choice([1, 2, 3, 4])
    moe = mla = None
    layers = draw.randint(3, 60)
    if draw.random() < 0.5:
        moe = MoESpec(
            num_experts=draw.choice([6, 8, 64]),
            experts_per_token=draw.randint(1, 4),
            expert_hidden_size=draw.choice([96, 768, 1536]),
            num_shared_experts=draw.randint(0, 2),
            num_dense_layers=draw.choice([0, 1, draw.randint(0, layers)]),
            normalize_weights=draw.random() < 0.5,
            balance=draw.choice(["none", "aux_loss", "bias"]),
            balance_coefficient=0.01,
        )
    if draw.random() < 0.3:
        kv = heads
        mla = MLASpec(
            q_lora_rank=draw.choice([0, 96]), kv_lora_rank=40, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24
        )
    return ModelSpec(
        name="drawn",
        num_layers=layers,
        hidden_size=draw.choice([192, 1000, 4096]),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=draw.choice([16, 64, 128]),
        ffn_hidden_size=draw.choice([384, 3000, 13824]),
        vocab_size=draw.choice([3072, 96000, 131072]),
        tie_embeddings=draw.random() < 0.5,
        qk_norm=mla is None and draw.random() < 0.5,
        moe=moe,
        mla=mla,
    )


def written_stages(draw: random.Random, stages: int, num_layers: int) -> str:
    """Stages of any sizes, sometimes one stage or one layer too many, or with what no engine runs."""
    num_layers += draw.random() < 0.1
    borders = sorted(draw.randint(0, num_layers) for _ in range(stages - (draw.random() > 0.1)))
    sizes = [end - start for start, end in zip([0, *borders], [*borders, num_layers], strict=True)]
    return f"E{'|'.join(f't*{size}' if size else '' for size in sizes)}{draw.choice(['', '', 'm'])}L"


def recomputation(draw: random.Random, stages: int) -> str:
    """One word of all layers, or words of stages, sometimes for another number of stages."""
    if draw.random() < 0.6:
        return draw.choice(get_args(Recompute))
    words = [*get_args(Recompute)[:9], "full", "full:1", f"full:{draw.randint(1, 12)}"]
    if draw.random() < 0.2:
        return canonical_recompute(draw.choice(words))
    stages += draw.random() < 0.05
    return canonical_recompute("/".join(draw.choice(words) for _ in range(stages)), stages)


def random_experiment(draw: random.Random) -> Experiment:
    """Anything that `Experiment` accepts; often against the rules."""
    model = random_model(draw)
    pp = draw.choice([1, 1, 2, 3, 4, 7, 8])
    schedule = draw.choice(SCHEDULES) if pp > 1 else "none"
    chunks = draw.choice([2, 3])
    virtual = {"interleaved_1f1b": chunks, "interleaved_zero_bubble": chunks, "zero_bubble_v": 2, "dualpipe_v": 2}.get(
        schedule, 1
    )
    zero = draw.randint(0, 3)
    fields: dict[str, Any] = {
        "dp_replicate": draw.choice([1, 1, 2, 3]),
        "dp_shard": draw.choice([2, 3, 4, 8, 64]) if zero else 1,
        "micro_batch_size": draw.choice([1, 1, 2, 3, 8]),
    }
    rounds = draw.choice([1, 2, 3, 4, 5, 8, 12, 32])
    if schedule == "interleaved_1f1b" and draw.random() < 0.8:
        rounds *= pp
    sequences = fields["dp_replicate"] * fields["dp_shard"] * fields["micro_batch_size"] * rounds
    if draw.random() < 0.05:
        zero, sequences, virtual = draw.randint(0, 3), sequences + 1, draw.randint(1, 3)
    tp = draw.choice([1, 1, 2, 3, 4, 8])
    if model.moe is not None:
        fields["etp"] = draw.choice([1, tp])
        fields["routing"] = draw.choice(["balanced", "skewed", "learned"])
        if fields["routing"] != "balanced":
            fields["routing_imbalance"] = draw.choice([1.0, 1.3, 1.75])
        if fields["routing"] == "learned":
            fields["capacity_factor"] = draw.choice([None, 1.0, 1.25])
    return Experiment(
        model=model,
        tp=tp,
        cp=draw.choice([1, 1, 2, 3, 4]),
        pp=pp,
        ep=draw.choice([1, 2, 4, 8]) if model.moe is not None or draw.random() < 0.05 else 1,
        global_batch_size=sequences,
        seq_len=draw.choice([512, 1536, 2048, 4096, 4100, 7680, 131072]),
        zero_stage=zero,
        recompute=recomputation(draw, pp * virtual),
        recompute_every=draw.choice([1, 1, 1, 2, 3, 8]),
        pp_schedule=schedule,  # type: ignore[arg-type]
        virtual_stages=virtual,
        pp_split=draw.choice(["balanced", "even", "ends_count"]),
        pp_stages=written_stages(draw, pp * virtual, model.num_layers) if pp > 1 and draw.random() < 0.3 else None,
        pad_vocab_to=draw.choice([None, None, 1, 1000]),
        cp_kind=draw.choice(["ring", "allgather", "ulysses"]),
        sequence_parallel=draw.random() < 0.8,
        precision=draw.choice(["bf16", "fp16", "fp32", "fp64", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"]),
        attention=draw.choice(["auto", "auto", "flash", "cudnn", "math"]),
        compile=draw.choice(["none", "none", "block"]),
        cuda_graph=draw.choice(["none", "none", "none", "step", "auto"]),
        documents=draw.choice([None, None, None, "lognormal mean=500 sigma=1 seed=1"]),
        grad_reduce=draw.choice(["fp32", "fp32", "bf16"]),
        optimizer_states=draw.choice(["fp32", "fp32", "bf16"]),
        master_weights=draw.choice(["fp32", "fp32", "bf16"]),
        **fields,
    )


CLUSTER = ClusterSpec(
    name="here",
    backend="cuda",
    device=DeviceSpec(name="card", memory_bytes=80 * 2**30, peak_flops={"bf16": 1e12, "fp32": 1e11}),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=1e11, latency_s=1e-6),
    inter_node=None,
)
CLUSTER_IN_PAGE = {
    "name": "here",
    "backend": "cuda",
    "device": "card",
    "devices_per_node": 8,
    "joined_devices": 8,
    "precisions": ["bf16", "fp32"],
}


def layouts(count: int, seed: int) -> list[Experiment]:
    """Layouts that the planner would predict: no rule broken but those of an engine or of a cluster."""
    draw, found = random.Random(seed), []
    elsewhere = ("engine_support", "single_node", "attention", "precision")
    while len(found) < count:
        experiment = random_experiment(draw)
        if all(violation.rule in elsewhere for violation in violations(experiment, CLUSTER)):
            adds = experiment.zero_stage <= 1 and experiment.compile == "none" and len(found) % 2 == 0
            adds = adds and experiment.num_microbatches > 1
            optimizer = get_args(OptimizerName)[len(found) // 2 % 4]
            share = (0.0, 0.3, 1.0)[len(found) % 3] if optimizer == "adamw" else 0.0
            one = experiment.replace(gradient_accumulation_fusion=adds, optimizer=optimizer, optimizer_offload=share)
            offloads = one.replace(activation_offload=("all", "input", "attention+gate_up")[len(found) % 3])
            is_possible = all(violation.rule in elsewhere for violation in violations(offloads, CLUSTER))
            found.append(offloads if is_possible else one)
    return found


def of_tied_weights() -> list[Experiment]:
    """Layouts of a model that is little more than its embedding, which is also its output projection."""
    model = ModelSpec(
        name="tied",
        num_layers=2,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        ffn_hidden_size=3072,
        vocab_size=131072,
        tie_embeddings=True,
    )
    return [
        Experiment.canonical(model=model, dp=dp, zero_stage=zero, global_batch_size=dp * rounds, seq_len=512)
        for dp, zero in ((1, 0), (2, 0), (2, 1), (4, 1), (2, 2), (4, 2), (2, 3), (4, 3))
        for rounds in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def compared(browser: Browser) -> list[tuple[Experiment, dict[str, Any]]]:
    """Five hundred layouts and some more, and what the page's model says of each."""
    experiments = [*layouts(500, seed=20260521), *of_tied_weights()]
    said = evaluate(browser, SCRIPTS, "input.map(MemoryModel.estimateMemory)", [to_dict(e) for e in experiments])
    return list(zip(experiments, said, strict=True))


@pytest.mark.slow
def test_five_hundred_layouts_have_the_planners_bytes_on_every_stage(
    compared: list[tuple[Experiment, dict[str, Any]]],
) -> None:
    for experiment, page in compared:
        planned = estimate_memory(experiment)
        assert page["peak_stage"] == planned.peak_stage, experiment
        assert page["peak_bytes"] == planned.peak_bytes, experiment
        for stage, expected in zip(page["stages"], planned.stages, strict=True):
            found = {field.name: stage[field.name] for field in dataclasses.fields(expected)}
            assert found == dataclasses.asdict(expected), experiment
            assert stage["peak_bytes"] == expected.peak_bytes


def test_the_layouts_visit_every_branch(compared: list[tuple[Experiment, dict[str, Any]]]) -> None:
    seen: Counter[tuple[str, Any]] = Counter()
    units: set[str] = set()
    for experiment, page in compared:
        for field in (
            "zero_stage",
            "recompute_every",
            "pp_schedule",
            "precision",
            "compile",
            "tp",
            "cp",
            "pp",
            "ep",
            "routing",
        ):
            seen[field, getattr(experiment, field)] += 1
        names = ["by stage"] if is_by_stage(experiment.recompute) else experiment.recompute.split("+")
        seen.update(("recompute", name) for name in names)
        seen["moe", experiment.model.moe is not None] += 1
        seen["mla", experiment.model.mla is not None] += 1
        seen["tied", experiment.model.tie_embeddings] += 1
        units.update(stage["moment"].split(": ")[1] for stage in page["stages"])
    assert min(seen.values()) >= 5, seen
    assert len(units) >= 14, units
    expected = {
        "zero_stage": 4,
        "recompute": len(OPERATIONS) + 4,  # none, selective, full, by stage
        "recompute_every": 4,
        "pp_schedule": 7,
        "precision": 7,
        "compile": 2,
        "tp": 5,
    }
    assert {field: sum(key[0] == field for key in seen) for field in expected} == expected


def test_parts_add_up_to_their_category(compared: list[tuple[Experiment, dict[str, Any]]]) -> None:
    for experiment, page in compared:
        for stage in page["stages"]:
            for category in CATEGORIES:
                parts = stage["parts"][category]
                assert all(part > 0 for part in parts.values()), (experiment, parts)
                assert sum(parts.values()) == stage[f"{category}_bytes"], (experiment, category)


ATTENTION = ("projected", "softmax", "attention output")
SAVED = {
    ("none", "none"): (
        ("mixer: norm", "mixer: norm: statistics", *ATTENTION, "rotated"),
        ("MLP: norm", "MLP: norm: statistics", "gate and up", "product"),
        ("input", "residual"),
    ),
    ("full", "none"): ((), (), ("input",)),
    ("norm+swiglu", "none"): (
        ("mixer: norm: statistics", *ATTENTION, "rotated"),
        ("MLP: norm: statistics", "gate and up"),
        ("input", "residual"),
    ),
    ("selective", "block"): (ATTENTION, ("gate and up",), ("input",)),
}
"""By recompute and compile: tensors that attention, feed-forward and the residual stream keep for backward."""


@pytest.mark.parametrize(("recompute", "compile"), SAVED)
def test_saved_tensors_stand_where_they_belong(browser: Browser, recompute: Any, compile: Any) -> None:
    llama = next(shape for shape in SHIPPED if shape.name == "llama8b")
    experiment = Experiment(
        model=llama,
        pp=4,
        pp_schedule="1f1b",
        pp_split="even",
        tp=2,
        global_batch_size=16,
        recompute=recompute,
        compile=compile,
    )
    tensors = {one.name: one.bytes for one in kind_tensors(layers_of(llama).kinds[0], Sizes.of(experiment, 2)).all()}
    page = evaluate(browser, SCRIPTS, "MemoryModel.estimateMemory(input)", to_dict(experiment))
    assert page["stages"][1]["moment"].endswith("last layer, backward")
    shown = page["stages"][1]["parts"]["activations"]
    # With compiled blocks the outputs of both row-parallel layers stay: c T_s h, and with tp their partial sums, c T h.
    row_parallel = 2 * (2048 + 4096) * 4096 if compile == "block" else 0
    for part, names in zip(("attention", "feed-forward", "residual stream"), SAVED[recompute, compile], strict=True):
        layer = sum(tensors[name] for name in names) + (row_parallel if part != "residual stream" else 0)
        # Eight layers a stage, of three micro-batches in flight.
        assert shown.get(part, 0) == 8 * 3 * layer, part


def test_rules_are_told_in_the_planners_sentences(browser: Browser) -> None:
    draw = random.Random(7)
    experiments = [random_experiment(draw) for _ in range(1000)]
    # What the draws seldom meet: a schedule where it cannot be, sharding nothing, shards without ZeRO, captured steps.
    experiments += [
        dataclasses.replace(experiments[i], **changes)
        for i, changes in enumerate(
            [
                {"pp": 1, "pp_schedule": "1f1b"},
                {"pp": 4, "pp_schedule": "none"},
                {"zero_stage": 0, "dp_shard": 3},
                {"cuda_graph": "step"},
                {"cuda_graph": "step", "compile": "block"},
                {"attention": "flash4", "compile": "block"},
                {"recurrence": "fla", "precision": "fp64"},
            ]
        )
    ]
    experiments += [dataclasses.replace(one, gradient_accumulation_fusion=True) for one in experiments[:50]]
    unusual = {"grad_reduce": "bf16", "optimizer_states": "bf16", "master_weights": "bf16", "optimizer": "muon"}
    for field, value in (*unusual.items(), ("optimizer_offload", 0.5)):
        experiments += [dataclasses.replace(one, **{field: value}) for one in experiments[:50]]
        if field != "optimizer_offload":
            experiments += [
                dataclasses.replace(one, **{field: value}, optimizer_offload=0.5) for one in experiments[:9]
            ]
    for words in ("all", "input+norm+rope", "gate_up+swiglu"):
        experiments += [dataclasses.replace(one, activation_offload=words) for one in experiments[:120]]
    code = "input.experiments.map((e) => MemoryRules.violations(input.rules, e, input.cluster))"
    rack = dataclasses.replace(CLUSTER, linked_devices=16), {**CLUSTER_IN_PAGE, "joined_devices": 16}
    rules = set()
    for (cluster, in_page), layouts_there in (((CLUSTER, CLUSTER_IN_PAGE), experiments), (rack, experiments[:300])):
        given = {"experiments": [to_dict(e) for e in layouts_there], "cluster": in_page, "rules": rules_json()}
        said = evaluate(browser, SCRIPTS, code, given)
        for experiment, page in zip(layouts_there, said, strict=True):
            found = violations(experiment, cluster)
            assert [(entry["rule"], entry["message"]) for entry in page] == found, experiment
            rules |= {violation.rule for violation in found}
    can_hold = {rule.name for rule in RULES if LACKING or rule.name != "engine_support"}
    # of models with a list of layers, which have no rows
    of_lists = {"tp_recurrent_heads", "cp_recurrent_heads", "documents"}
    assert rules == can_hold - of_lists, "the layouts drawn visit every rule"
    anywhere = evaluate(browser, SCRIPTS, code, given | {"cluster": None})
    for of_cluster, of_any in zip(said, anywhere, strict=True):
        assert of_any == [entry for entry in of_cluster if entry["scope"] != "cluster"]


def test_senseless_numbers_are_refused_in_the_planners_sentences(browser: Browser) -> None:
    good = to_dict(layouts(1, seed=3)[0])
    wrong = [{**good, "tp": 0}, {**good, "seq_len": -1}]
    wrong += [{**good, "model": {**good["model"], "num_kv_heads": 3, "num_heads": 8}}]
    wrong += [{**good, "model": {**good["model"], "vocab_size": 0}}]
    many = MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=64, num_dense_layers=200)
    moe = dataclasses.asdict(many)
    wrong += [
        {**good, "model": {**good["model"], **shape}} for shape in ({"head_dim": 21}, {"head_dim": 7, "moe": moe})
    ]
    code = "input.experiments.map((e) => MemoryRules.refusal(input.rules, e))"
    told = evaluate(browser, SCRIPTS, code, {"experiments": [good, *wrong], "rules": rules_json()})
    for fields, said in zip([good, *wrong], told, strict=True):
        try:
            Experiment(**{**fields, "model": model_from_dict(fields["model"])})
        except UltrasweepError as error:
            assert said == str(error)
        else:
            assert said is None


def test_parameters_are_counted_alike(browser: Browser) -> None:
    draw = random.Random(11)
    models = [*SHIPPED, *(random_model(draw) for _ in range(100))]
    code = "input.map((model) => ClosedForms.num_params(py.made(ClosedForms.ModelSpec, model)))"
    counted = evaluate(browser, SCRIPTS, code, [dataclasses.asdict(model) for model in models])
    assert counted == [num_params(model) for model in models]


def test_what_doubles_cannot_count_is_refused_not_rounded(browser: Browser) -> None:
    far = dataclasses.replace(layouts(1, seed=3)[0], seq_len=2**40)
    code = "(() => { try { return MemoryModel.estimateMemory(input); } catch (error) { return String(error); } })()"
    assert str(evaluate(browser, SCRIPTS, code, to_dict(far))).startswith("RangeError: more than 8 PiB")
