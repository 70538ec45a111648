"""A list of layers in a model: read and written unchanged, its sizes derived, mistakes named."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from tests.workloads.costs.published import PUBLISHED, published
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment, from_json, to_json
from workloads.spec.layer_kinds.layer_list import from_plain, to_plain
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.layer_kinds.weight import Splits
from workloads.spec.model_spec import ModelSpec, model_from_dict, model_to_dict

LISTED = [name for name in PUBLISHED if published(name).layers is not None]
FLAT = {
    "name": "flat",
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
}


def plain_of(name: str) -> dict[str, Any]:
    model = published(name)
    assert model.layers is not None
    return copy.deepcopy(to_plain(model.layers))


def test_a_list_is_read_as_it_was_written() -> None:
    assert len(LISTED) == 16
    for name in LISTED:
        model = published(name)
        stored = json.loads(json.dumps(model_to_dict(model)))
        assert model_from_dict(stored) == model
        assert from_plain("x", yaml.safe_load(yaml.safe_dump(stored["layers"]))) == model.layers
        experiment = Experiment.canonical(model=model, global_batch_size=8)
        assert from_json(to_json(experiment)) == experiment


def test_models_without_a_list_are_stored_as_before() -> None:
    model = model_from_dict(FLAT)
    assert "layers" not in model_to_dict(model)
    assert (
        Experiment.canonical(model=model, global_batch_size=8, cuda_graph="none", engine_version="3").hash == "043bfa60"
    )


def test_sizes_follow_from_the_layers() -> None:
    gemma = published("google/gemma-4-26B-A4B")
    assert gemma.layers is not None
    assert (gemma.num_layers, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (30, 16, 2, 512)
    assert [kind.splits for kind in gemma.layers.kinds] == [
        Splits(heads=16, kv_heads=8, shared_columns=2112),
        Splits(heads=16, kv_heads=2, shared_columns=2112),
    ]
    nano = published("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert nano.layers is not None
    assert nano.layers.kinds[0].splits == Splits(recurrent_heads=8)
    with pytest.raises(InvalidExperiment, match="num_heads=7 does not fit its layers; leave num_heads out"):
        model_from_dict({**model_to_dict(gemma), "num_heads": 7})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain["kinds"][0]["mixer"].update(kind="atention"), "mixer: kind='atention'"),
        (lambda plain: plain["kinds"][0]["mixer"].update(heads="many"), "heads='many' must be a whole number"),
        (lambda plain: plain["kinds"][0]["mixer"].update(twists=3), "twists"),
        (lambda plain: plain["kinds"][0].update(mixer=plain["kinds"][0]["mlp"]), "mixer must be a kind of mixer"),
        (lambda plain: plain.update(order=[0, 0]), "order must use each of the 2 kinds"),
        (
            lambda plain: plain["kinds"][0]["mixer"].update(span={"kind": "rope", "theta": 1.0}),
            "rope cannot stand here",
        ),
    ],
)
def test_a_mistake_in_a_list_is_named(change: Any, message: str) -> None:
    plain = plain_of("openai/gpt-oss-20b")
    change(plain)
    with pytest.raises(InvalidExperiment) as refused:
        from_plain("model x: layers", plain)
    assert message in refused.value.messages[0]


def test_a_cap_of_logits_is_a_number_and_was_a_flag() -> None:
    plain = plain_of("google/gemma-4-26B-A4B")
    assert (plain["logit_cap"], plain["scaled_embedding"]) == (30.0, True)
    for given, cap in ((True, 30.0), (False, 0.0), (20, 20.0)):
        assert from_plain("model x: layers", {**plain, "logit_cap": given}).logit_cap == cap
    with pytest.raises(InvalidExperiment, match="logit_cap='high'"):
        from_plain("model x: layers", {**plain, "logit_cap": "high"})


def test_a_model_is_written_by_hand() -> None:
    window = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
    kinds = [
        {
            "mixer": {**window, "span": {"kind": "window", "size": 8}},
            "mlp": {"kind": "dense", "width": 128, "activation": "silu"},
        },
        {"mixer": None, "mlp": {"kind": "dense", "width": 64, "activation": "relu2", "gated": False}, "norms": 1},
    ]
    model = model_from_dict(
        {"name": "own", "hidden_size": 64, "vocab_size": 256, "layers": {"kinds": kinds, "order": [0, 1, 0]}}
    )
    assert isinstance(model, ModelSpec) and model.layers is not None
    assert (model.num_layers, model.num_heads, model.ffn_hidden_size) == (3, 4, 64)
    mixer = model.layers.kinds[0].mixer
    assert mixer is not None and getattr(mixer, "span", None) == Window(8)
