"""The layers of models that numbers describe count what the engine's table of weights counts."""

from __future__ import annotations

from sweep.composing.conffiles import ConfFolders
from workloads.costs.shape.params import dense_layer, layer_counts, matmul_of, matmul_of_layer, moe_layer
from workloads.spec.model_layers import layers_of, routed_layers, splits_of


def test_kinds_of_shipped_models_count_as_the_engine() -> None:
    folders = ConfFolders()
    for name in ("llama8b", "deepseek_v2_lite", "deepseek_v3", "mixtral_8x7b", "qwen3_30b_a3b", "tiny_moe"):
        model = folders.model(name)
        for kind in layers_of(model).kinds:
            assert layer_counts(model, kind) == (moe_layer(model) if kind.routed else dense_layer(model))
            assert matmul_of(kind, model.hidden_size) == matmul_of_layer(model, routed=kind.routed)


def test_dense_layers_come_first() -> None:
    model = ConfFolders().model("deepseek_v3")
    assert routed_layers(model) == (False,) * 3 + (True,) * 58
    assert splits_of(model).heads == 128 and splits_of(model).shared_columns == 2048
