"""No field of an experiment or its model is left out of an export in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from sweep.engine_configs.export import ENGINES
from tests.sweep.engine_configs.exported import refused, told
from tests.sweep.engine_configs.layouts import layout
from workloads.rules.captured_steps import is_captured
from workloads.rules.layout_rules import layout_violations
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import FIELDS
from workloads.spec.model_spec import Balance, MLASpec, ModelSpec, MoESpec


def rounding(model: str, **fields: object) -> Experiment:
    """A layout whose products do not add gradients, so that a field cannot seem to be told by changing that."""
    return layout(model, gradient_accumulation_fusion=False, **fields)


BASES = (
    rounding("llama8b", dp=2, zero_stage=1, tp=2, pp=2, cp=2, global_batch_size=32, sequence_parallel=False),
    rounding("llama8b", dp=4, zero_stage=2, tp=2, micro_batch_size=2, global_batch_size=32, recompute="full"),
    rounding("llama1b", dp=2, tp=2, pp=2, global_batch_size=32),
    rounding("llama8b", pp=4, pp_schedule="interleaved_1f1b", virtual_stages=4, global_batch_size=32),
    rounding("mixtral_8x7b", dp=4, zero_stage=1, tp=2, ep=2, global_batch_size=32, routing="learned"),
)
CHANGES: dict[str, list[object]] = {
    "dp_replicate": [2, 4],
    "dp_shard": [2, 8],
    "tp": [1, 4],
    "cp": [1, 4],
    "pp": [1, 4],
    "ep": [1, 4],
    "etp": [1, 2],
    "micro_batch_size": [1, 4],
    "global_batch_size": [64, 128],
    "seq_len": [2048, 8192],
    "zero_stage": [1, 2, 3],
    "recompute": ["none", "full", "selective", "norm", "mla_up", "experts"],
    "recompute_every": [2],
    "activation_offload": ["all", "input", "input+qkv+rope+attention"],
    "pp_schedule": ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"],
    "virtual_stages": [2],
    "pp_split": ["balanced", "even", "ends_count"],
    "pp_stages": ["Et*20|t*12L"],
    "pad_vocab_to": [4096],
    "gradient_accumulation_fusion": [True],
    "grad_reduce": ["bf16"],
    "optimizer": ["muon", "adafactor", "sgd"],
    "optimizer_states": ["bf16"],
    "master_weights": ["bf16"],
    "optimizer_offload": [0.5, 1.0],
    "cp_kind": ["ring", "allgather", "ulysses"],
    "sequence_parallel": [True, False],
    "precision": ["bf16", "fp16", "fp32", "fp64", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"],
    "attention": ["auto", "cudnn", "flash", "efficient", "math", "flash4"],
    "compile": ["none", "block"],
    "cuda_graph": ["none"],
    "routing": ["balanced", "learned", "skewed"],
    "capacity_factor": [1.5],
    "documents": ["lognormal mean=500 sigma=1 seed=1"],
    "seed": [7],
}
WITHOUT_EFFECT = {"routing_imbalance", "document_balance", "recurrence", "engine", "engine_version"}
"""What no engine has to be told: a load that is only assumed where the router decides, how the documents are dealt that
every export refuses, what computes layers that every export refuses, and by whom it was measured."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_no_field_is_dropped_in_silence(engine: str) -> None:
    """A change of any field that has an effect changes what is written, or is refused, or is told."""
    assert set(CHANGES) | WITHOUT_EFFECT == set(FIELDS)
    seen = set()
    for base in BASES:
        for field, values in CHANGES.items():
            for value in values:
                fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
                other = Experiment.canonical(**{**fields, field: value})
                if field == "cuda_graph" and is_captured(other) == is_captured(base):
                    continue  # steps are eager either way
                if getattr(other, field) != getattr(base, field) and not layout_violations(other):
                    assert told(other, engine) != told(base, engine), f"{field}: {getattr(base, field)} or {value}"
                    seen.add(field)
    assert seen >= set(CHANGES)


def with_balance(experiment: Experiment, balance: Balance) -> Experiment:
    model = experiment.model
    assert model.moe is not None
    return experiment.replace(model=dataclasses.replace(model, moe=dataclasses.replace(model.moe, balance=balance)))


MODELS = (
    layout("llama8b", dp=4, zero_stage=2, global_batch_size=32),
    layout("qwen3_30b_a3b", dp=4, zero_stage=2, ep=2, global_batch_size=32, routing="learned"),
    layout("deepseek_v2_lite", dp=4, zero_stage=2, ep=2, global_batch_size=32, routing="learned"),
    layout("deepseek_v3", dp=4, zero_stage=2, ep=2, global_batch_size=32, routing="learned"),
    with_balance(layout("qwen3_30b_a3b", dp=4, zero_stage=2, ep=2, global_batch_size=32, routing="learned"), "bias"),
)
"""A dense model, one with routed experts alone, two with latent attention, and one whose experts another engine names
but balances in its own way."""
CHANGES_OF_MODELS: dict[type, dict[str, list[object]]] = {
    ModelSpec: {
        "num_layers": [8],
        "hidden_size": [1024],
        "num_heads": [16],
        "num_kv_heads": [2],
        "head_dim": [64],
        "ffn_hidden_size": [1536],
        "vocab_size": [50_000],
        "tie_embeddings": [True],
        "qk_norm": [True, False],
        "rope_theta": [20_000.0, 500_000.25],
        "norm_eps": [1e-4],
        "moe": [None, MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=512)],
        "mla": [None, MLASpec(kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)],
    },
    MoESpec: {
        "num_experts": [32],
        "experts_per_token": [3],
        "expert_hidden_size": [512],
        "num_shared_experts": [3],
        "num_dense_layers": [2],
        "gate": ["softmax", "sigmoid"],
        "normalize_weights": [True, False],
        "weight_scale": [1.75],
        "balance": ["none", "aux_loss", "bias"],
        "balance_coefficient": [0.125],
    },
    MLASpec: {
        "kv_lora_rank": [64],
        "qk_nope_head_dim": [160],
        "qk_rope_head_dim": [96],
        "v_head_dim": [96],
        "q_lora_rank": [0, 96],
    },
}
PLACES: dict[type, str] = {ModelSpec: "model", MoESpec: "model.moe", MLASpec: "model.mla"}


def without_effect(model: ModelSpec, field: str) -> bool:
    """Whether nothing of this model depends on the field."""
    if model.moe is not None and field == "balance_coefficient":
        return model.moe.balance == "none"
    if model.moe is not None and field == "ffn_hidden_size":
        return model.moe.num_dense_layers == 0
    return model.mla is not None and field == "head_dim"


def changed_models(model: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """The model with one field changed, for every field that has an effect and every value that is allowed."""
    for kind, place in PLACES.items():
        part = place.partition(".")[2]
        spec = getattr(model, part) if part else model
        for field, values in CHANGES_OF_MODELS[kind].items() if spec is not None else ():
            for value in values:
                if value == getattr(spec, field) or without_effect(model, field):
                    continue
                try:
                    changed = dataclasses.replace(spec, **{field: value})
                    other = dataclasses.replace(model, **{part: changed}) if part else changed
                except InvalidExperiment:
                    continue
                yield f"{place}.{field}", other


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_no_field_of_the_model_is_dropped_in_silence(engine: str) -> None:
    for kind, changes in CHANGES_OF_MODELS.items():
        # A list of layers is refused as a whole (`workloads.rules.engine_kinds`).
        assert {field.name for field in dataclasses.fields(kind)} - {"name", "layers"} == set(changes)
    seen, silent = set(), []
    for base in MODELS:
        assert not layout_violations(base)
        without = refused(base, engine)
        for place, model in changed_models(base.model):
            seen.add(place)
            if any(place.startswith(name) for name in without):  # the whole part, or how experts are balanced
                continue
            if told(base.replace(model=model), engine) == told(base, engine):
                silent.append(f"{place} of {base.model.name}")
    assert not silent
    assert seen == {f"{PLACES[kind]}.{field}" for kind, changes in CHANGES_OF_MODELS.items() for field in changes}
