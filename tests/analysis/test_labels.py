"""Layouts that differ in one field have different names, in tables of plans and answers and in those of a report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from analysis.rows.labels import add_labels
from sweep.planning.summary import layout, workload
from tests.workloads.costs.shapes import LLAMA_8B, QWEN3_30B
from workloads.spec.experiment import Experiment
from workloads.spec.record import config_columns

DENSE: dict[str, Any] = {"model": LLAMA_8B, "global_batch_size": 64, "seq_len": 4096}
EXPERTS: dict[str, Any] = {**DENSE, "model": QWEN3_30B, "dp_shard": 8, "zero_stage": 1}
PIPED: dict[str, Any] = {**DENSE, "pp": 4, "pp_schedule": "1f1b", "micro_batch_size": 2}
DIFFER: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "model": [(DENSE, {"model": QWEN3_30B})],
    "dp_replicate": [
        ({**DENSE, "dp_shard": 8, "zero_stage": 1}, {"dp_replicate": 2, "dp_shard": 4}),
        ({**DENSE, "dp_shard": 8, "cp": 2, "zero_stage": 1}, {"dp_replicate": 8, "dp_shard": 1}),
    ],
    "dp_shard": [({**DENSE, "dp_shard": 8, "zero_stage": 1}, {"dp_shard": 4})],
    "tp": [(DENSE, {"tp": 2})],
    "cp": [(DENSE, {"cp": 2})],
    "pp": [(PIPED, {"pp": 2})],
    "ep": [(EXPERTS, {"ep": 2})],
    "etp": [({**EXPERTS, "tp": 2}, {"etp": 2})],
    "micro_batch_size": [(DENSE, {"micro_batch_size": 2})],
    "global_batch_size": [(DENSE, {"global_batch_size": 32})],
    "seq_len": [(DENSE, {"seq_len": 8192})],
    "zero_stage": [({**DENSE, "dp_shard": 8, "zero_stage": 1}, {"zero_stage": 3})],
    "recompute": [(DENSE, {"recompute": "full"}), ({**DENSE, "recompute": "norm"}, {"recompute": "norm+rope"})],
    "recompute_every": [({**DENSE, "recompute": "full"}, {"recompute_every": 2})],
    "activation_offload": [(DENSE, {"activation_offload": "all"})],
    "pp_schedule": [(PIPED, {"pp_schedule": "gpipe"}), (PIPED, {"pp_schedule": "dualpipe_v", "virtual_stages": 2})],
    "virtual_stages": [({**PIPED, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2}, {"virtual_stages": 4})],
    "pp_split": [(PIPED, {"pp_split": "even"}), ({**PIPED, "pp_split": "even"}, {"pp_split": "ends_count"})],
    "pp_stages": [(PIPED, {"pp_stages": "Et*8|t*8|t*8|t*8L"})],
    "cp_kind": [({**DENSE, "cp": 2}, {"cp_kind": "ulysses"}), ({**DENSE, "cp": 2}, {"cp_kind": "allgather"})],
    "sequence_parallel": [({**DENSE, "tp": 2}, {"sequence_parallel": False})],
    "precision": [(DENSE, {"precision": "fp16"})],
    "attention": [(DENSE, {"attention": "math"})],
    "recurrence": [],  # models with recurrent layers alone; below
    "compile": [(DENSE, {"compile": "block"})],
    "cuda_graph": [(DENSE, {"cuda_graph": "none"}), (DENSE, {"cuda_graph": "step"})],
    "routing": [(EXPERTS, {"routing": "learned"})],
    "routing_imbalance": [({**EXPERTS, "routing": "skewed", "routing_imbalance": 2.0}, {"routing_imbalance": 3.0})],
    "capacity_factor": [({**EXPERTS, "routing": "learned"}, {"capacity_factor": 1.5})],
    "pad_vocab_to": [({**DENSE, "tp": 2}, {"pad_vocab_to": 1000})],
    "gradient_accumulation_fusion": [(DENSE, {"gradient_accumulation_fusion": False})],
    "grad_reduce": [(DENSE, {"grad_reduce": "bf16"})],
    "optimizer": [(DENSE, {"optimizer": "muon"})],
    "optimizer_states": [(DENSE, {"optimizer_states": "bf16"})],
    "master_weights": [(DENSE, {"master_weights": "bf16"})],
    "optimizer_offload": [
        (DENSE, {"optimizer_offload": 0.5}),
        ({**DENSE, "optimizer_offload": 0.25}, {"optimizer_offload": 0.5}),
    ],
    "documents": [(DENSE, {"documents": "lognormal mean=512 sigma=1 seed=7"})],
    "document_balance": [
        (
            {**DENSE, "dp_shard": 2, "zero_stage": 1, "documents": "lognormal mean=512 sigma=1 seed=7"},
            {"document_balance": "greedy"},
        )
    ],
    "seed": [(DENSE, {"seed": 1})],
    "engine": [(DENSE, {"engine": "megatron", "engine_version": "0.16.1+2"})],
    "engine_version": [({**DENSE, "engine": "torchtitan", "engine_version": "0.2.2+2"}, {"engine_version": "0.3.0+1"})],
}
COHORTS = {"engine", "engine_version", "seed"}
"""A report has a part for each engine and version, and rows of several seeds are runs of one layout."""


def pairs(names: set[str]) -> list[Any]:
    cases = [(name, *case) for name in sorted(names) for case in DIFFER[name]]
    return [pytest.param(*case, id=f"{case[0]}-{case[0] == 'model' or next(iter(case[2].values()))}") for case in cases]


def of(base: dict[str, Any], other: dict[str, Any]) -> tuple[Experiment, Experiment]:
    first, second = Experiment.canonical(**base), Experiment.canonical(**{**base, **other})
    assert first != second, "the fields have an effect"
    return first, second


def test_every_field_is_looked_at() -> None:
    assert set(DIFFER) == {field.name for field in dataclasses.fields(Experiment)}


@pytest.mark.parametrize(("name", "base", "other"), pairs({*DIFFER}))
def test_a_plan_names_them_differently(name: str, base: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = of(base, other)
    assert (workload(first), first.world_size, layout(first)) != (workload(second), second.world_size, layout(second))


@pytest.mark.parametrize(("name", "base", "other"), pairs({*DIFFER} - COHORTS))
def test_a_report_names_them_differently(name: str, base: dict[str, Any], other: dict[str, Any]) -> None:
    rows = pd.DataFrame([config_columns(one) for one in of(base, other)])
    frame = add_labels(rows)
    assert len(frame[["workload", "world_size", "layout"]].drop_duplicates()) == 2


def test_usual_values_have_no_words() -> None:
    assert layout(Experiment.canonical(**DENSE)) == "dp 1, mbs 1 x 64"


def test_one_unusual_value_of_all_rows_does_not_lengthen_every_name() -> None:
    rows = pd.DataFrame([config_columns(Experiment.canonical(**DENSE, tp=2, sequence_parallel=False))] * 2)
    assert not add_labels(rows)["layout"].str.contains("sequence").any()
