"""Configurations that transformers 5 has written read like the published files that it read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads.spec.config_json.read import layers_from_config
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.spans import Window

FOLDER = Path(__file__).parent
FILE = json.loads((FOLDER / "resaved_models.json").read_text())
PUBLISHED: dict[str, Any] = json.loads((FOLDER / "published_models.json").read_text())["models"]


@pytest.mark.parametrize("name", FILE["resaved"])
def test_a_file_that_was_saved_again_is_the_same_model(name: str) -> None:
    published = layers_from_config(name, PUBLISHED[name]["config"])
    again = layers_from_config(name, FILE["resaved"][name])
    assert again.layers == published.layers
    assert again.parameters == published.parameters == PUBLISHED[name]["parameters"]
    assert again.active_parameters == published.active_parameters
    assert again.training_flops(4096) == published.training_flops(4096)


@pytest.mark.parametrize("kind", FILE["native"])
def test_names_of_transformers_5_alone(kind: str) -> None:
    known = FILE["native"][kind]
    assert layers_from_config(kind, known["config"]).parameters == known["parameters"]


@pytest.mark.parametrize("name", FILE["own"])
def test_names_of_families_own_files(name: str) -> None:
    """Files with fields that transformers does not write. Parameters are those that it builds of them."""
    known = FILE["own"][name]
    assert layers_from_config(name, known["config"]).parameters == known["parameters"]


def test_dropout_is_said() -> None:
    model = layers_from_config("seed", FILE["native"]["seed_oss"]["config"])
    assert model.left_out == ("dropout of 0.1 (attention_dropout)", "dropout of 0.1 (residual_dropout)")


def mimo(**changes: Any) -> dict[str, Any]:
    return {**FILE["resaved"]["XiaomiMiMo/MiMo-V2-Flash"], **changes}


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"sliding_window": 129, "sliding_window_size": 128}, 129),
        ({"sliding_window": 128, "sliding_window_size": 128}, 129),
        ({"sliding_window": 129, "sliding_window_size": None, "attention_chunk_size": None}, 129),
    ],
)
def test_a_window_of_mimo_counts_the_query_once(fields: dict[str, Any], seen: int) -> None:
    spans = {
        layer.mixer.span for layer in layers_from_config("m", mimo(**fields)).layers if type(layer.mixer) is Attention
    }
    assert Window(seen) in spans


def test_windows_that_disagree_are_refused() -> None:
    with pytest.raises(InvalidExperiment, match="sliding_window=64 must be sliding_window_size=128, or one more"):
        layers_from_config("m", mimo(sliding_window=64))


def test_a_layer_that_is_not_there_is_refused() -> None:
    config = json.loads(json.dumps(FILE["resaved"]["google/gemma-4-26B-A4B"]))
    config["text_config"]["per_layer_config"]["99"] = {"head_dim": 512}
    with pytest.raises(InvalidExperiment, match="per_layer_config: 99 is no layer of 30"):
        layers_from_config("gemma", config)


@pytest.mark.parametrize(
    ("name", "kinds", "message"),
    [
        ("zai-org/GLM-5", ["full_attention"], "layer_types may hold only indexed_attention"),
        ("deepseek-ai/DeepSeek-V4-Flash", ["full_attention"], "compress_ratios has 'full_attention'"),
    ],
)
def test_kinds_of_attention_that_are_not_known_are_refused(name: str, kinds: list[str], message: str) -> None:
    config = FILE["resaved"][name]
    with pytest.raises(InvalidExperiment, match=message):
        layers_from_config(name, {**config, "layer_types": kinds * config["num_hidden_layers"]})
