"""A field without effect changes no id: a walk over every size of every kind of model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workloads.spec.test_model_relations import DENSE, EXPERTS, LATENT
from workloads.spec import weights
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment, canonical_id, from_dict, layout_id, to_dict
from workloads.spec.model_spec import ModelSpec, canonical_model, model_from_dict

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "all routed": {"moe": EXPERTS},
    "dense layers first": {"moe": {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1}},
    "latents": {"num_kv_heads": 4, "mla": LATENT},
    "latents, all routed": {"num_kv_heads": 4, "mla": {**LATENT, "q_lora_rank": 8}, "moe": EXPERTS},
}
UNUSED = {
    "all routed": {"ffn_hidden_size", "moe.balance_coefficient"},
    "dense layers first": {"moe.balance_coefficient"},
    "latents": {"head_dim"},
    "latents, all routed": {"head_dim", "ffn_hidden_size", "moe.balance_coefficient"},
}


def variants(model: ModelSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each number of a model, changed alone: its name and the model's fields."""
    fields = dataclasses.asdict(model)
    for part in ("", "moe", "mla"):
        holder = fields[part] if part else fields
        for name, value in (holder or {}).items():
            if type(value) in (int, float):
                changed = {**holder, name: 2 * value or type(value)(1)}
                yield f"{part}.{name}".strip("."), {**fields, part: changed} if part else changed


def built(model: ModelSpec) -> tuple[Any, ...]:
    """All that the engine reads of a model: its matrices, its rotation, its heads and its router."""
    layers = [
        tuple(weights.block(model, f"layers.{at}", routed=weights.routed(model, at))) for at in range(model.num_layers)
    ]
    moe = model.moe
    router = None
    if moe is not None:
        balance = (moe.balance, moe.balance_coefficient) if moe.balance != "none" else None
        router = moe.experts_per_token, moe.num_experts, moe.gate, moe.normalize_weights, moe.weight_scale, balance
    heads = (model.num_heads, model.num_kv_heads, model.rope_dim, model.mla)
    return layers, weights.embedding(model), router, heads, model.rope_theta, model.norm_eps


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_changes_the_id_exactly_if_the_engine_reads_it(kind: str) -> None:
    model = model_from_dict({**DENSE, **KINDS[kind]})
    unused = set()
    for name, fields in variants(model):
        try:
            other = model_from_dict(fields)
        except InvalidExperiment:
            continue
        same = Experiment.canonical(model=other, global_batch_size=8).id == layout_of(model)
        assert same == (built(other) == built(model)), name
        unused |= {name} if same else set()
    assert unused == UNUSED.get(kind, set())


def layout_of(model: ModelSpec) -> str:
    return Experiment.canonical(model=model, global_batch_size=8).id


@pytest.mark.parametrize("kind", KINDS)
def test_fields_without_effect_need_not_be_given(kind: str) -> None:
    given = {**DENSE, **KINDS[kind]}
    whole = model_from_dict(given)
    unused = {name for name in UNUSED.get(kind, set()) if "." not in name}
    if whole.mla is not None:
        unused |= {"num_kv_heads"}
    assert model_from_dict({name: value for name, value in given.items() if name not in unused}) == whole


def test_stored_experiments_keep_their_ids_and_are_the_same_layout() -> None:
    model = model_from_dict({**DENSE, **KINDS["latents, all routed"]})
    new = Experiment.canonical(model=model, global_batch_size=8)
    stored = to_dict(new)
    stored["model"] |= {"head_dim": 16, "ffn_hidden_size": 99}
    old = from_dict(stored)
    assert to_dict(old) == stored
    assert old.id != new.id == canonical_id(old) == canonical_id(new)
    assert layout_id(old) == layout_id(new)
    assert canonical_model(old.model) == new.model == Experiment.canonical(model=old.model, global_batch_size=8).model
