"""The layers of models that numbers describe count what the engine's table of weights counts."""

from __future__ import annotations

from sweep.composing.conffiles import ConfFolders
from workloads.costs.shape.params import layer_counts, matmul_of
from workloads.spec import weights
from workloads.spec.model_layers import layers_of, routed_layers, splits_of


def test_kinds_of_shipped_models_count_as_the_engine() -> None:
    folders = ConfFolders()
    for name in ("llama8b", "deepseek_v2_lite", "deepseek_v3", "mixtral_8x7b", "qwen3_30b_a3b", "tiny_moe"):
        model = folders.model(name)
        for kind in layers_of(model).kinds:
            held, counts = list(weights.block(model, "layer", routed=kind.routed)), layer_counts(model, kind)
            experts = sum(one.numel for one in held if one.placement.is_expert)
            split = sum(one.numel for one in held if one.placement.dim("tp") is not None)
            assert (counts.split, counts.experts) == (split, experts)
            assert counts.total == sum(one.numel for one in held)
            matrices = sum(one.numel for one in held if len(one.shape) > 1)
            visited = experts * model.moe.experts_per_token // model.moe.num_experts if model.moe is not None else 0
            assert matmul_of(kind, model.hidden_size) == matrices - experts + visited


def test_dense_layers_come_first() -> None:
    model = ConfFolders().model("deepseek_v3")
    assert routed_layers(model) == (False,) * 3 + (True,) * 58
    assert splits_of(model).heads == 128 and splits_of(model).shared_columns == 2048
