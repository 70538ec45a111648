"""What the rules of a layout refuse and say, and that the compiled rules agree with each rule by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest

from tests.fixed_task import fixed_tasks
from tests.workloads.costs.shapes import (
    DEEPSEEK_V3,
    H200,
    LLAMA_1B,
    LLAMA_8B,
    MIXTRAL,
    ONE_NODE,
    study_experiment,
    study_rows,
)
from tests.workloads.engine.kind_models import kind_model
from tests.workloads.rules.broken_rules import broken
from workloads.costs.shape.schedule import schedule_actions
from workloads.rules import layout_rules as rules
from workloads.rules.derived_values import DERIVED, FUNCTIONS
from workloads.rules.layout_rules import RULES, Violation, layout_violations, names_of, violations
from workloads.spec.experiment import ENGINE_VERSION, Experiment
from workloads.spec.experiment_values import PipelineSchedule
from workloads.spec.model_layers import with_modules

AHEAD = with_modules(LLAMA_8B, 2)
FLASH_TO_DOCUMENTS = {"documents": "lognormal mean=500 sigma=1 seed=1", "attention": "flash"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp_replicate": 8},
        {"dp_shard": 8, "zero_stage": 3, "tp": 8, "pp": 4, "pp_schedule": "1f1b"},
        {"dp_replicate": 2, "dp_shard": 4, "zero_stage": 2},
        {"pp": 32, "pp_schedule": "gpipe", "global_batch_size": 1},  # mostly idle, but it runs
        {"pp": 5, "pp_schedule": "1f1b"},  # 32 layers over 5 stages: 7, 7, 6, 6, 6
        {"dp_shard": 48, "zero_stage": 1, "tp": 8, "global_batch_size": 96},  # 384 devices
        {"precision": "fp32", "recompute": "full", "compile": "block"},
        {"recompute": "selective", "compile": "block", "recompute_every": 2},
        {"recompute": "norm+rope", "recompute_every": 64},
        {**FLASH_TO_DOCUMENTS, "cp": 2, "cp_kind": "ulysses"},
        {"model": AHEAD, "pp": 4, "pp_schedule": "1f1b", "pp_stages": "E(t*8|)*3t*8mmL"},
        {"model": AHEAD, "documents": "lognormal mean=500 sigma=1 seed=1"},
        {"model": AHEAD, "pp": 33, "pp_schedule": "1f1b", "pp_split": "even"},
    ],
)
def test_layouts_that_run(fields: dict[str, Any]) -> None:
    assert broken(**fields) == {}


@pytest.mark.parametrize(
    ("fields", "rule", "says"),
    [
        (
            {"dp_replicate": 3, "micro_batch_size": 2},
            "global_batch",
            "global_batch_size=256 is not a multiple of dp*micro_batch_size = 3*2 = 6; 252 or 258 would be",
        ),
        (
            {"dp_replicate": 512},
            "global_batch",
            "global_batch_size=256 is not a multiple of dp*micro_batch_size = 512*1 = 512; 512 would be",
        ),
        ({"pp": 33, "pp_schedule": "1f1b"}, "pp_layers", "pp=33 stages need at least as many layers, llama8b has 32"),
        ({"pp": 2}, "pp_schedule", "pp_schedule=none with pp=2"),
        ({"pp_schedule": "1f1b"}, "pp_schedule", "pp_schedule=1f1b with pp=1"),
        ({"pp": 2, "pp_schedule": "1f1b", "virtual_stages": 2}, "virtual_stages", "it needs 1"),
        ({"pp": 2, "pp_schedule": "interleaved_1f1b"}, "virtual_stages", "it needs 2 or more"),
        ({"pp": 2, "pp_schedule": "zero_bubble_v"}, "virtual_stages", "it needs 2"),
        ({"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 3}, "virtual_stages", "=3; it needs 2"),
        ({"pp": 2, "pp_schedule": "gpipe", "virtual_stages": 2}, "virtual_stages", "=2; it needs 1"),
        (
            {"pp": 16, "pp_schedule": "interleaved_1f1b", "virtual_stages": 4},
            "pp_layers",
            "pp*virtual_stages = 16*4 = 64 stages",
        ),
        (
            {"tp": 12},
            "tp_num_kv_heads",
            "tp=12 neither divides num_kv_heads=8 of llama8b nor is a multiple of it that divides num_heads=32; "
            "tp may be one of 1, 2, 4, 8, or such a multiple",
        ),
        ({"tp": 7, "pad_vocab_to": 64}, "tp_num_heads", "tp=7 does not divide num_heads=32"),
        (
            {"pp": 4, "pp_schedule": "1f1b", "pp_stages": "Et*16|t*16|L"},
            "pp_stages",
            "pp_stages=Et*16|t*16|L has 3 stages, but pp*virtual_stages = 4*1 = 4; pp may be one of 1, 3",
        ),
        (
            {"pp": 2, "pp_schedule": "1f1b", "pp_stages": "E|(t*16|)*2L"},
            "pp_stages",
            "pp_stages=E|(t*16|)*2L has 4 stages, but pp*virtual_stages = 2*1 = 2; use virtual_stages=2",
        ),
        (
            {"pp": 2, "pp_schedule": "1f1b", "pp_stages": "Et*16|t*15L"},
            "pp_stages",
            "pp_stages=Et*16|t*15L has 31 layers (t), but llama8b has 32",
        ),
        (
            {"tp": 3},
            "tp_num_heads",
            "tp=3 does not divide num_heads=32 of llama8b; tp may be one of 1, 2, 4, 8, or a multiple of num_kv_heads "
            "that divides the others",
        ),
        ({"tp": 7}, "tp_vocab_size", "tp=7 does not divide vocab_size=128256"),
        ({"tp": 5}, "tp_ffn_hidden_size", "tp=5 does not divide ffn_hidden_size=14336"),
        (
            {"model": MIXTRAL, "tp": 3, "etp": 3},
            "etp",
            "etp=3 does not divide expert_hidden_size=14336 of mixtral; use etp=1",
        ),
        (
            {"tp": 8, "seq_len": 4100},
            "sequence_parallel",
            "1*4100/1 = 4100 tokens over tp=8 ranks; tp may be one of 1, 2, 4",
        ),
        ({"cp": 4, "seq_len": 4100}, "cp_seq_len", "seq_len=4100 is not a multiple of 8, 4104 would be"),
        ({"ep": 2}, "ep_model", "llama8b has no experts"),
        ({"model": MIXTRAL, "ep": 3, "dp_replicate": 3}, "ep_num_experts", "ep may be one of 1, 2, 4, 8"),
        (
            {"model": MIXTRAL, "ep": 8, "dp_replicate": 4},
            "ep_ranks",
            "ep=8 does not divide the dp*cp*tp/etp = 4*1*1/1 = 4 ranks",
        ),
        ({"dp_shard": 4}, "zero_shards", "use dp_replicate=4 with dp_shard=1"),
        ({"zero_stage": 2, "dp_replicate": 4}, "zero_shards", "use zero_stage=0"),
        (
            {"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 2, "compile": "block"},
            "compile_split_backward",
            "use compile=none, or pp_schedule=1f1b",
        ),
        (
            {"gradient_accumulation_fusion": True, "dp_shard": 2, "dp_replicate": 2, "zero_stage": 2},
            "fusion_zero",
            "gradient_accumulation_fusion=true with zero_stage=2 and dp_replicate=2",
        ),
        (
            {"documents": "lognormal mean=500 sigma=1 seed=1", "attention": "cudnn"},
            "documents_attention",
            "documents with attention=cudnn: it knows no documents here; use attention=auto (FlexAttention), flash or",
        ),
        (
            {**FLASH_TO_DOCUMENTS, "cp": 2, "cp_kind": "allgather"},
            "documents_attention",
            "use attention=auto, or cp_kind=ulysses",
        ),
        (
            {**FLASH_TO_DOCUMENTS, "attention": "flash4", "cp": 2, "cp_kind": "allgather"},
            "documents_attention",
            "documents with attention=flash4 and cp_kind=allgather",
        ),
        ({**FLASH_TO_DOCUMENTS, "model": DEEPSEEK_V3}, "documents_attention", "deepseek_v3 has 192 and 128"),
        (
            {"gradient_accumulation_fusion": True, "compile": "block"},
            "compile_fusion",
            "use compile=none, or gradient_accumulation_fusion=false",
        ),
        (
            {"grad_reduce": "bf16", "precision": "fp32"},
            "grad_reduce_precision",
            "grad_reduce=bf16 with precision=fp32",
        ),
        (
            {"optimizer_states": "bf16", "precision": "fp64"},
            "optimizer_states_precision",
            "use precision=fp32 or bf16, or optimizer_states=fp32",
        ),
        (
            {"master_weights": "bf16", "precision": "fp16"},
            "master_weights_precision",
            "master_weights=bf16 with precision=fp16",
        ),
        (
            {"cp": 8, "tp": 2, "cp_kind": "ulysses"},
            "cp_num_kv_heads",
            "cp=8 does not divide the 4 of num_kv_heads=8 that each of tp=2 ranks has; use cp_kind=ring or allgather",
        ),
        (
            {"recompute": "norm+swiglu", "compile": "block"},
            "compile_recompute",
            "compile=block with recompute=norm+swiglu: in a compiled block norms",
        ),
        ({"attention": "flash", "precision": "fp32"}, "attention", "no fp32 kernels on CUDA"),
        (
            {"attention": "flash4", "compile": "block"},
            "attention_compile",
            "compile=block with attention=flash4: torch.compile cannot look into its kernels",
        ),
        ({"recompute": "norm+mla_up"}, "recompute_mla_up", "llama8b has no latent attention"),
        (
            {
                "model": with_modules(kind_model("sinks"), 1),
                "seq_len": 16,
                "documents": "lognormal mean=8 sigma=1 seed=1",
            },
            "documents",
            "documents with the layers of parity_sinks, which differ by kind",
        ),
        (
            {"model": AHEAD, "pp": 2, "pp_schedule": "1f1b", "pp_stages": "Et*16|t*18L"},
            "pp_stages",
            "pp_stages=Et*16|t*18L must name the 2 multi-token modules of llama8b as m in its last stage",
        ),
        (
            {"model": AHEAD, "pp": 34, "pp_schedule": "1f1b"},
            "pp_layers",
            "34 stages; the last one holds all 2 multi-token modules of llama8b, and each other one needs one of its "
            "32 layers; use at most 33",
        ),
        ({"model": AHEAD, "activation_offload": "input"}, "activation_offload_model", "use activation_offload=none"),
        ({"recompute": "selective+experts"}, "recompute_experts", "llama8b has no routed experts"),
    ],
)
def test_broken_rules_say_what_would_work(fields: dict[str, Any], rule: str, says: str) -> None:
    assert says in broken(**fields)[rule]


def test_one_node_is_not_enough() -> None:
    assert "16 ranks (dp*cp*tp*pp = 2*1*8*1)" in broken(ONE_NODE, dp_replicate=2, tp=8)["single_node"]
    assert broken(ONE_NODE, tp=8) == {}


def test_more_ranks_than_the_outermost_tier_joins() -> None:
    rack = dataclasses.replace(H200, linked_devices=16, inter_node=None)
    tiers = dataclasses.replace(rack, intra_node=None, linked_devices=None, tiers=(rack.inside,))
    for cluster in (rack, tiers):
        assert broken(cluster, dp_replicate=2, tp=8) == {}
        said = broken(cluster, dp_replicate=4, tp=8)["tiers"]
        assert said.startswith(
            "32 ranks (dp*cp*tp*pp = 4*1*8*1) on cluster h200, whose outermost tier joins 16 devices"
        )


@pytest.fixture
def lacks_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this engine had no fp16."""
    lacking = rules._rules("engine", ("engine_support", "precision == 'fp16'", "fp16 ({model}; use bf16)"))
    tests = [rule.broken for rule in (*rules._STATED, *lacking)]
    names = (*rules.LAYOUT_NAMES, *rules.CLUSTER_NAMES)
    monkeypatch.setattr(rules, "LACKING", lacking)
    monkeypatch.setattr(rules, "_tests_of_all", rules.compile_tests(names, DERIVED, tests, FUNCTIONS))


@pytest.mark.usefixtures("lacks_fp16")
def test_what_this_engine_cannot_run_yet() -> None:
    found = broken(model=DEEPSEEK_V3, precision="fp16")
    assert set(found) == {"engine_support"}
    expected = f"engine version {ENGINE_VERSION} cannot run fp16 (deepseek_v3; use bf16) yet"
    assert found["engine_support"] == expected
    assert broken(precision="bf16") == {}


def test_every_schedule_has_lists_for_the_chunks_and_micro_batches_that_the_rules_let_through() -> None:
    for schedule, pp, chunks, rounds in itertools.product(get_args(PipelineSchedule), (1, 2, 3), (1, 2, 3), (1, 2, 7)):
        e = Experiment(model=LLAMA_8B, pp=pp, pp_schedule=schedule, virtual_stages=chunks, global_batch_size=rounds)
        if not layout_violations(e):
            for rank in range(pp):
                assert schedule_actions(schedule, rank, pp, rounds, chunks)


@pytest.mark.usefixtures("lacks_fp16")
def test_a_layout_alone_breaks_its_own_rules_and_no_others() -> None:
    fields = {"model": DEEPSEEK_V3, "global_batch_size": 250, "cp": 3, "tp": 3, "precision": "fp16"}
    experiment = Experiment(dp_replicate=4, **fields)
    found = violations(experiment, H200)
    assert {"global_batch", "cp_seq_len", "tp_num_heads", "engine_support"} <= {v.rule for v in found}
    assert layout_violations(experiment) == [v for v in found if v.rule != "engine_support"]


def test_no_success_of_the_study_is_invalid() -> None:
    """One success has more stages than layers (its engine cuts embedding and head off as stages): 32 for 28 layers."""
    invalid: list[tuple[str, Violation]] = []
    for row in study_rows():
        if row["status"] == "Success":
            invalid += [(row["name"], v) for v in violations(study_experiment(row), H200)]
    assert [(v.rule, "pp32" in name and "3.57G" in name) for name, v in invalid] == [("pp_layers", True)]


def test_invalid_rows_of_the_study_failed() -> None:
    rows = [r for r in study_rows() if r["batch_accum"]]
    rules = [v.rule for r in rows for v in violations(study_experiment(r), H200)]
    assert rules.count("pp_layers") > 100
    assert set(rules) <= {"pp_layers", "tp_num_heads", "tp_num_kv_heads"}


@pytest.mark.slow
def test_the_compiled_rules_say_what_each_rule_says() -> None:
    """Layouts that break every rule in turn: all at once as each by itself."""
    count = 0
    for model in (LLAMA_8B, MIXTRAL, DEEPSEEK_V3):
        for tp, cp, pp, ep, zero, schedule, precision in itertools.product(
            (1, 3, 16), (1, 4), (1, 2, 40), (1, 3), (0, 3), ("none", "1f1b", "zero_bubble_v"), ("bf16", "fp8_rowwise")
        ):
            experiment = Experiment(
                model=model,
                tp=tp,
                cp=cp,
                pp=pp,
                ep=ep,
                zero_stage=zero,
                dp_shard=2,
                global_batch_size=7,
                pp_schedule=schedule,
                precision=precision,
                seq_len=4100,  # type: ignore[arg-type]
            )
            for cluster in (H200, ONE_NODE):
                names = names_of(experiment, cluster)
                one_by_one = [Violation(r.name, r.message.fill(names)) for r in RULES if r.broken.evaluate(names)]
                assert violations(experiment, cluster) == one_by_one
                count += len(one_by_one)
    assert count > 1000


def test_cheap() -> None:
    experiments = [
        Experiment.canonical(model=LLAMA_1B, dp=8, tp=tp, pp=pp, global_batch_size=64)
        for tp in (1, 3, 16)
        for pp in (1, 8)
    ]

    def three_thousand() -> None:
        for _ in range(500):
            for experiment in experiments:
                violations(experiment, H200)

    assert fixed_tasks(three_thousand) < 2.5  # 0.8 on idle cores


def test_a_layout_that_breaks_nothing_costs_a_fraction_of_its_rules_one_by_one() -> None:
    experiments = [Experiment.canonical(model=LLAMA_1B, dp=8, tp=tp, global_batch_size=64) for tp in (1, 2, 4, 8)]

    def one_by_one(experiment: Experiment) -> list[Any]:
        names = names_of(experiment, H200)
        return [rule for rule in RULES if rule.broken.evaluate(names)]

    def time_of(check: Callable[[Experiment], list[Any]]) -> float:
        def often() -> None:
            for _ in range(300):
                for experiment in experiments:
                    assert check(experiment) == []

        return fixed_tasks(often)

    together, single = time_of(lambda experiment: violations(experiment, H200)), time_of(one_by_one)
    assert together < 0.8 * single
