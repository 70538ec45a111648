"""What other engines are asked for: everything that they cannot run is refused at planning, with the field named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from sweep.grids.axes import AXES
from workloads.rules.engine_support import refused
from workloads.spec.engine_versions import ENGINE, ENGINES, WITHOUT_TRANSFORMER_ENGINE
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, MoESpec

MODEL = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=128,
)
QWEN = dataclasses.replace(MODEL, tie_embeddings=True, qk_norm=True)
WIDE_HEADS = dataclasses.replace(MODEL, head_dim=16)
EXPERTS = dataclasses.replace(MODEL, moe=MoESpec(num_experts=4, experts_per_token=2, expert_hidden_size=16))
BALANCED = dataclasses.replace(
    MODEL,
    moe=MoESpec(
        num_experts=4, experts_per_token=2, expert_hidden_size=16, balance="aux_loss", balance_coefficient=0.01
    ),
)
SIGMOID = dataclasses.replace(
    MODEL,
    moe=MoESpec(num_experts=4, experts_per_token=2, expert_hidden_size=16, gate="sigmoid", normalize_weights=False),
)
ALONE = {"engine": "megatron", "engine_version": WITHOUT_TRANSFORMER_ENGINE}


def of(**fields: Any) -> Experiment:
    return Experiment.canonical(
        **{"model": MODEL, "seq_len": 32, "global_batch_size": 8, "engine": "torchtitan", **fields}
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tp": 2}, "tp=2"),
        ({"pp": 2}, "pp=2"),
        ({"dp": 2, "zero_stage": 2, "pad_vocab_to": 100}, "pad_vocab_to=100"),
        ({"dp": 2, "zero_stage": 2, "cuda_graph": "step"}, "cuda_graph=step: only engine=ultrasweep captures"),
        ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion=True"),
        ({"grad_reduce": "bf16"}, "grad_reduce=bf16: its adapter reduces in fp32"),
        ({"optimizer": "muon"}, "optimizer=muon"),
        ({"optimizer_states": "bf16"}, "optimizer_states=bf16"),
        ({"master_weights": "bf16"}, "master_weights=bf16"),
        ({"optimizer_offload": 0.5}, "optimizer_offload=0.5"),
        ({"dp": 2, "tp": 4, "zero_stage": 2}, "no adapter copies key and value heads"),
        ({"dp": 2, "pp": 2, "zero_stage": 1, "pp_stages": "E|ttttL"}, "pp_stages=E|t*4L"),
        ({"dp": 2, "tp": 2}, "zero_stage=0"),
        ({"dp": 2, "zero_stage": 1}, "zero_stage=1"),
        ({"dp": 2, "pp": 2, "zero_stage": 2}, "zero_stage=2"),
        ({"dp": 2, "tp": 2, "zero_stage": 3, "sequence_parallel": False}, "sequence_parallel=False"),
        ({"cp": 2, "zero_stage": 3, "precision": "fp32"}, "precision=fp32"),
        ({"cp": 2, "zero_stage": 3, "cp_kind": "ulysses"}, "cp_kind=ulysses"),
        ({"cp": 2}, "zero_stage=0"),
        ({"dp": 2, "cp": 2}, "zero_stage=0"),
        ({"cp": 2, "tp": 2, "zero_stage": 3, "seq_len": 36}, "seq_len=36"),
        ({"dp": 2, "pp": 2, "zero_stage": 3, "pp_schedule": "zero_bubble_v"}, "zero_stage=3"),
        ({"dp": 2, "pp": 2, "zero_stage": 3, "pp_schedule": "dualpipe_v"}, "zero_stage=3"),
        (
            {"dp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "dualpipe_v", "global_batch_size": 6},
            "num_microbatches=3",
        ),
        ({"dp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "dualpipe_v", "compile": "block"}, "compile=block"),
        (
            {"dp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "interleaved_1f1b", "global_batch_size": 10},
            "num_microbatches=5",
        ),
        ({"model": QWEN, "dp": 2, "pp": 2, "zero_stage": 1}, "pp=2"),
        ({"model": WIDE_HEADS, "cp": 2, "tp": 2, "zero_stage": 3}, "cp=2"),
        ({"model": WIDE_HEADS, "tp": 2, "precision": "fp32"}, "precision=fp32"),
        ({"model": dataclasses.replace(QWEN, vocab_size=127), "dp": 2, "zero_stage": 3}, "model=tiny"),
        ({"precision": "fp64"}, "precision=fp64"),
        ({"precision": "fp8_blockwise", "dp": 2, "zero_stage": 3}, "precision=fp8_blockwise"),
        ({"precision": "fp8_rowwise"}, "precision=fp8_rowwise"),
        ({"precision": "fp8_rowwise", "dp": 2, "tp": 2, "zero_stage": 3}, "precision=fp8_rowwise"),
        ({"attention": "flash"}, "attention=flash"),
        ({"recompute": "selective"}, "recompute=selective"),
        ({"recompute": "full", "recompute_every": 2}, "recompute_every=2"),
        ({"engine_version": "0.4.0+1"}, "engine_version=0.4.0+1"),
    ],
)
def test_what_torchtitan_cannot_run_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    found = refused(of(**fields))
    assert any(field in sentence for sentence in found), found
    assert all(sentence.startswith("torchtitan ") for sentence in found)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dp": 2, "zero_stage": 2}, "zero_stage=2"),
        ({"dp": 2, "zero_stage": 3}, "zero_stage=3"),
        ({"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1}, "dp_replicate=2"),
        ({"cp": 2}, "cp=2"),
        ({"tp": 2, "model": dataclasses.replace(MODEL, vocab_size=127)}, "tp=2"),
        ({"pp": 2, "pp_schedule": "gpipe"}, "pp_schedule=gpipe"),
        ({"pp": 2, "pp_schedule": "zero_bubble_v"}, "pp_schedule=zero_bubble_v"),
        (
            {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "global_batch_size": 3},
            "num_microbatches=3",
        ),
        ({"precision": "fp8_rowwise"}, "precision=fp8_rowwise"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"attention": "flash"}, "attention=flash"),
        ({"compile": "block"}, "compile=block"),
        ({"recompute": "selective"}, "recompute=selective"),
        ({"recompute": "full", "recompute_every": 2}, "recompute_every=2"),
        ({"engine_version": "0.16.1+1"}, "engine_version=0.16.1+1"),
    ],
)
def test_what_megatron_cannot_run_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    found = refused(of(**{**ALONE, **fields}))
    assert any(field in sentence for sentence in found), found
    assert all(sentence.startswith("megatron 0.16.1+1") for sentence in found)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"precision": "fp32"}, "precision=fp32"),
        ({"precision": "fp8_blockwise"}, "precision=fp8_blockwise"),
        ({"dp": 2, "zero_stage": 2}, "zero_stage=2"),
        ({"compile": "block", "model": EXPERTS}, "compile=block"),
        ({"compile": "block", "recompute": "full"}, "compile=block"),
        ({"model": BALANCED, "routing": "learned"}, "model=tiny"),
        ({"model": SIGMOID}, "model=tiny"),
        ({"model": EXPERTS, "routing": "learned", "capacity_factor": 1.5}, "capacity_factor=1.5"),
        ({"model": EXPERTS, "tp": 2, "sequence_parallel": False}, "sequence_parallel=False"),
        ({"engine_version": "0.19.2+1 with Transformer Engine 2.11.0"}, "engine_version=0.19.2+1"),
    ],
)
def test_what_megatron_with_transformer_engine_cannot_run_is_refused(fields: dict[str, Any], field: str) -> None:
    found = refused(of(**{"engine": "megatron", "precision": "bf16", **fields}))
    assert any(field in sentence for sentence in found), found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "fp8_tensorwise", "dp": 2, "zero_stage": 1},
        {"compile": "block", "dp": 2, "zero_stage": 1},
        *({"cp": 2, "zero_stage": 1, "cp_kind": kind} for kind in ("ring", "allgather", "ulysses")),
        {"model": EXPERTS, "dp": 2, "ep": 2, "zero_stage": 1},
        {"model": EXPERTS, "tp": 2, "etp": 2, "routing": "learned"},
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
    ],
)
def test_what_megatron_with_transformer_engine_runs_is_not_refused(fields: dict[str, Any]) -> None:
    assert refused(of(**{"engine": "megatron", "precision": "bf16", **fields})) == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp": 2},
        {"dp": 2, "zero_stage": 1},
        {"tp": 2, "precision": "bf16"},
        {"tp": 2, "sequence_parallel": False},
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "recompute": "full"},
        {"model": dataclasses.replace(MODEL, head_dim=16)},
    ],
)
def test_what_megatron_runs_is_not_refused(fields: dict[str, Any]) -> None:
    assert refused(of(**{**ALONE, **fields})) == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp": 2},
        {"dp": 2, "zero_stage": 2},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
        {"dp": 2, "tp": 2, "zero_stage": 3},
        {"dp": 2, "pp": 2, "zero_stage": 1},
        {"tp": 2, "precision": "fp32"},
        {"pp": 2, "pp_schedule": "zero_bubble_v", "precision": "fp32"},
        {"recompute": "full", "compile": "block"},
        {"dp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "dualpipe_v"},
        {"cp": 2, "zero_stage": 2},
        {"dp": 2, "cp": 2, "tp": 2, "zero_stage": 3, "cp_kind": "allgather"},
        {"model": QWEN, "dp": 2, "tp": 2, "zero_stage": 3},
        {"model": WIDE_HEADS, "cp": 2, "zero_stage": 3},
        {"precision": "fp8_tensorwise"},
        {"precision": "fp8_rowwise", "dp": 2, "zero_stage": 3, "recompute": "full"},
    ],
)
def test_what_torchtitan_can_run_is_not_refused(fields: dict[str, Any]) -> None:
    assert refused(of(**fields)) == []


NEW = "0.3.0+1"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dp": 2, "zero_stage": 1}, "zero_stage=1"),
        ({"dp": 2, "pp": 2, "zero_stage": 2}, "zero_stage=2"),
        ({"dp": 2, "pp": 2, "zero_stage": 3, "pp_schedule": "zero_bubble_v"}, "zero_stage=3"),
        ({"cp": 2, "cp_kind": "allgather", "seq_len": 256}, "zero_stage=0"),
        ({"cp": 2, "zero_stage": 3, "seq_len": 256}, "cp_kind=ring"),
        ({"cp": 2, "zero_stage": 3, "cp_kind": "ulysses", "seq_len": 256}, "cp_kind=ulysses"),
        ({"cp": 2, "zero_stage": 3, "cp_kind": "allgather", "seq_len": 128}, "seq_len=128"),
        ({"tp": 2, "seq_len": 31}, "seq_len=31"),
        ({"pp": 2, "model": dataclasses.replace(MODEL, tie_embeddings=True)}, "pp=2"),
        ({"precision": "fp8_tensorwise"}, "precision=fp8_tensorwise"),
        ({"precision": "fp64"}, "precision=fp64"),
        ({"precision": "fp8_rowwise", "dp": 2, "tp": 2, "zero_stage": 3}, "precision=fp8_rowwise"),
        ({"attention": "flash"}, "attention=flash"),
        ({"recompute": "selective"}, "recompute=selective"),
        ({"recompute": "full", "recompute_every": 2}, "recompute_every=2"),
        ({"pp": 2, "pp_schedule": "zero_bubble_v", "compile": "block"}, "compile=block"),
    ],
)
def test_what_torchtitan_03_cannot_run_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    found = refused(of(engine_version=NEW, **fields))
    assert any(f"torchtitan 0.3.0+1 cannot run {field}" in sentence for sentence in found), found


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "precision": "bf16"},
        {"tp": 2, "sequence_parallel": False},
        {"dp": 2, "tp": 2},
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "precision": "bf16"},
        {"dp": 2, "pp": 2, "zero_stage": 3, "model": dataclasses.replace(MODEL, qk_norm=True)},
        {"cp": 2, "tp": 2, "zero_stage": 3, "cp_kind": "allgather", "seq_len": 256, "model": QWEN},
        {"precision": "fp8_rowwise", "compile": "block"},
    ],
)
def test_torchtitan_03_runs_what_the_older_one_refuses(fields: dict[str, Any]) -> None:
    assert refused(of(engine_version=NEW, **fields)) == []


def test_an_engine_brings_its_version_and_is_part_of_the_id() -> None:
    own, other = of(engine=ENGINE), of()
    assert other.engine_version == ENGINES["torchtitan"] == "0.2.2+2"
    assert own.engine_version == ENGINES[ENGINE]
    assert own.id != other.id
    assert "torchtitan" in other.id
    assert refused(own) == []


def test_an_engine_that_nobody_has_is_refused() -> None:
    with pytest.raises(InvalidSweep, match="torchtitan"):
        AXES["engine"].check("grid g: engine", "nanotron")
    assert "engine=nanotron is not one of" in refused(of(engine="nanotron", engine_version="1"))[0]


def test_megatron_is_refused_where_there_is_no_cuda_device() -> None:
    e = of(engine="megatron", precision="bf16")
    assert refused(e) == []
    assert refused(e, "cpu") == [
        f"megatron {ENGINES['megatron']} cannot run on backend=cpu: its buffers and gradient clipping need CUDA devices"
    ]
    assert refused(of(), "cpu") == [] == refused(of(engine=ENGINE), "cpu")


def test_torchtitan_on_a_cpu_has_no_fp8_and_needs_no_kernels_of_cuda() -> None:
    for fields in ({"cp": 2, "zero_stage": 3}, {"model": WIDE_HEADS, "tp": 2}):
        e = of(**fields, precision="fp32")
        assert refused(e, "cpu") == []
        assert len(refused(e)) == 1
    assert refused(of(precision="fp8_tensorwise"), "cpu") == [
        "torchtitan 0.2.2+2 cannot run precision=fp8_tensorwise: its float8 products need CUDA devices of capability "
        "8.9; use bf16"
    ]


EXPERTS = MoESpec(num_experts=4, experts_per_token=2, expert_hidden_size=32)
MIXTRAL, QWEN3_MOE = (dataclasses.replace(MODEL, qk_norm=qk_norm, moe=EXPERTS) for qk_norm in (False, True))


def mixture(**fields: Any) -> dict[str, Any]:
    return {"model": dataclasses.replace(QWEN3_MOE, moe=dataclasses.replace(EXPERTS, **fields)), "routing": "learned"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(({axis: 2}, f"{axis}=2") for axis in ("tp", "pp", "cp")),
        ({"model": MIXTRAL, "dp": 2, "ep": 2, "routing": "learned"}, "ep=2"),
        ({"model": MIXTRAL}, "routing=balanced"),
        ({"model": MIXTRAL, "routing": "learned", "capacity_factor": 1.5}, "capacity_factor=1.5"),
        (mixture(gate="sigmoid"), "model=tiny"),
        (mixture(balance="bias", balance_coefficient=0.1), "model=tiny"),
        (mixture(num_shared_experts=1), "model=tiny"),
        (
            {
                "model": dataclasses.replace(MIXTRAL, moe=dataclasses.replace(EXPERTS, num_dense_layers=1)),
                "routing": "learned",
            },
            "model=tiny",
        ),
        ({"precision": "fp64"}, "precision=fp64"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"precision": "fp8_tensorwise"}, "precision=fp8_tensorwise"),
        ({"precision": "fp32", "compile": "block"}, "precision=fp32"),
        ({"attention": "flash"}, "attention=flash"),
        ({"recompute": "selective"}, "recompute=selective"),
        ({"recompute": "full", "recompute_every": 2}, "recompute_every=2"),
        ({"engine_version": "4.57.6+1"}, "engine_version=4.57.6+1"),
    ],
)
def test_what_transformers_cannot_run_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    found = refused(of(**{"engine": "transformers", **fields}))
    assert any(field in sentence for sentence in found), found
    assert all(sentence.startswith("transformers ") for sentence in found)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp": 2},
        *({"dp": 2, "zero_stage": stage, "compile": "block", "recompute": "full"} for stage in (1, 2, 3)),
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3, "precision": "fp32"},
        {"model": QWEN, "dp": 2, "zero_stage": 2},
        {"model": WIDE_HEADS},
        {"model": MIXTRAL, "routing": "learned"},
        mixture(num_dense_layers=1, normalize_weights=False),
        mixture(balance="aux_loss", balance_coefficient=0.1),
        *(
            {"model": ConfFolders().model(name), "routing": "learned"}
            for name in ("gpt_oss_20b_8_layers", "nemotron_3_nano_14_layers", "llama4_scout_4_layers")
        ),
    ],
)
def test_what_transformers_runs_is_not_refused(fields: dict[str, Any]) -> None:
    assert refused(of(**{"engine": "transformers", **fields})) == []
    assert refused(of(engine="transformers", compile="block", precision="fp32"), "cpu") == []
