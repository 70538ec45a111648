"""Fields of a model that do not fit together are refused in one line, with what would work."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment, from_dict, to_dict
from workloads.spec.model_spec import broken_relations, canonical_model, model_from_dict

DENSE: dict[str, Any] = {
    "name": "ours",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_hidden_size": 24}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"hidden_size": 34},
            "head_dim is not given, and hidden_size=34 is not a multiple of num_heads=4; write head_",
        ),
        ({"hidden_size": 128, "num_heads": 6}, "is not a multiple of num_heads=6; write head_dim, for example 22"),
        (
            {"head_dim": 21},
            "model ours: head_dim=21 must be even, because the rotary embedding turns pairs of numbers; 22",
        ),
        ({"hidden_size": 20}, "model ours: head_dim=5 must be even"),
        (
            {"num_kv_heads": 4, "mla": {**LATENT, "qk_rope_head_dim": 5}},
            "model ours: mla: qk_rope_head_dim=5 must be even, because the rotary embedding turns pairs of",
        ),
        (
            {"moe": {**EXPERTS, "num_dense_layers": 30}},
            "moe: num_dense_layers=30 must be less than num_layers=4, or no layer has experts; use num_",
        ),
        ({"moe": {**EXPERTS, "num_dense_layers": 4}}, "num_dense_layers=4 must be less than num_layers=4"),
        (
            {"moe": {**EXPERTS, "balance": "bias"}},
            "balance=bias with balance_coefficient=0 balances nothing; use balance_",
        ),
        ({"moe": {**EXPERTS, "weight_scale": 0}}, "weight_scale=0 takes every effect from the experts"),
        ({"moe": {**EXPERTS, "weight_scale": float("inf")}}, "weight_scale=inf must be a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a finite number"),
        ({"moe": {**EXPERTS, "num_dense_layers": 1}, "ffn_hidden_size": None}, "ffn_hidden_size=None must be a whole"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused_in_one_line(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidExperiment) as error:
        model_from_dict({**DENSE, **fields})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_all_broken_relations_are_said_at_once() -> None:
    moe = {**EXPERTS, "num_dense_layers": 9, "balance": "aux_loss"}
    with pytest.raises(
        InvalidExperiment, match=r"head_dim=7 must .*; moe: num_dense_layers=9 must .*; moe: balance=aux"
    ):
        model_from_dict({**DENSE, "head_dim": 7, "moe": moe})


def test_stored_models_that_break_a_relation_are_read() -> None:
    """Their rows were written before the relation was checked."""
    stored = to_dict(Experiment(model=model_from_dict(DENSE), global_batch_size=1))
    stored["model"] |= {"head_dim": 21, "moe": {**EXPERTS, "num_dense_layers": 30}}
    read = from_dict(stored)
    assert len(broken_relations(read.model)) == 2
    assert canonical_model(read.model) is read.model
    assert to_dict(read)["model"]["head_dim"] == 21


def test_a_model_without_attention_has_no_head_to_rotate() -> None:
    mamba = {"kind": "mamba2", "heads": 8, "head_dim": 64, "groups": 2, "state": 16, "kernel": 4}
    layers = {"kinds": [{"mixer": mamba, "mlp": None, "norms": 1}], "order": [0, 0]}
    fields = {"name": "mamba", "hidden_size": 256, "vocab_size": 512, "layers": layers}
    assert broken_relations(model_from_dict(fields)) == []
    odd = {"kind": "attention", "heads": 2, "kv_heads": 2, "head_dim": 5, "value_dim": 5}
    layers["kinds"].append({"mixer": odd, "mlp": None, "norms": 1})
    with pytest.raises(InvalidExperiment, match="head_dim=5 must be even"):
        model_from_dict({**fields, "layers": {**layers, "order": [0, 1]}})
