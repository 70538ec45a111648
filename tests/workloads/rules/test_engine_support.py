"""What other engines are asked for: everything that they cannot run is refused at planning, with the field named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from workloads.rules.engine_support import refused
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import AXES, ENGINE, ENGINES, Experiment
from workloads.spec.model_spec import ModelSpec

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


def of(**fields: Any) -> Experiment:
    return Experiment.canonical(
        **{"model": MODEL, "seq_len": 32, "global_batch_size": 8, "engine": "torchtitan", **fields}
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tp": 2}, "tp=2"),
        ({"pp": 2}, "pp=2"),
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
    found = refused(of(**{"engine": "megatron", **fields}))
    assert any(field in sentence for sentence in found), found
    assert all(sentence.startswith("megatron 0.16.1+1") for sentence in found)


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
    assert refused(of(**{"engine": "megatron", **fields})) == []


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
    e = of(engine="megatron")
    assert refused(e) == []
    assert refused(e, "cpu") == [
        "megatron 0.16.1+1 without Transformer Engine cannot run on backend=cpu: its buffers and gradient clipping "
        "need CUDA devices"
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
