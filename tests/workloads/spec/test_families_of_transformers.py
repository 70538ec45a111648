"""A configuration that transformers writes is read as the model that transformers builds of it, parameter by layer."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled
from workloads.rules.engine_kinds import adapters_lack, lacking_kinds
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.families import FAMILIES
from workloads.spec.config_json.read import layers_from_config, read_config
from workloads.spec.config_json.refused_families import REFUSED
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.layer_list import LayerList, from_plain, to_plain
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import LayeredModel
from workloads.spec.layer_kinds.spans import Window

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
_FACTORS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
_GRANITE = {**_FACTORS, "attention_multiplier": 0.0625, "attention_bias": True}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
}
_SPANS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_WINDOWS = {"layer_types": _SPANS, "sliding_window": 5}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_OF_DEEPSEEK = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_MLPS = ["dense", "sparse", "dense", "sparse"]
SMALL: dict[str, dict[str, Any]] = {
    "afmoe": {**_ROUTED, **_WINDOWS, "num_dense_layers": 2, "head_dim": 6, "mup_enabled": True, "route_scale": 2.5},
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "attention_bias": True},
    "cwm": {**_WINDOWS, "head_dim": 6},
    "ernie4_5": {"head_dim": 6, "use_bias": True, "tie_word_embeddings": False},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 12,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 2,
    },
    "exaone4": {**_WINDOWS},
    "exaone_moe": {**_ROUTED, **_WINDOWS, "first_k_dense_replace": 2, "num_shared_experts": 2, "n_group": 2},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8, "attention_bias": False},
    "glm4_moe_lite": {**_LATENT, **_OF_DEEPSEEK, "attention_bias": True, "mlp_layer_types": _MLPS},
    "granite": {**_GRANITE, "mlp_bias": True},
    "granite_swa": {**_GRANITE, **_WINDOWS, "layer_rope_theta": [1e4, 0, 1e6, 1e4]},
    "granitemoe": {**_GRANITE, **_EXPERTS},
    "granitemoe_swa": {**_GRANITE, **_EXPERTS, **_WINDOWS, "shared_intermediate_size": 20},
    "granitemoehybrid": {**_GRANITE, **_EXPERTS, **_MAMBA, "layer_types": _KINDS, "shared_intermediate_size": 20},
    "granitemoeshared": {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 20},
    "helium": {"head_dim": 8, "mlp_bias": True, "tie_word_embeddings": True},
    "hunyuan_v1_dense": {"head_dim": 6, "attention_bias": True},
    "hunyuan_v1_moe": {"head_dim": 6, "num_experts": 6, "moe_topk": [2] * 4},
    "hy_v3": {**_ROUTED, "head_dim": 6, "num_shared_experts": 2, "attention_bias": True},
    "hyperclovax": {**_FACTORS, "head_dim": 6, "mlp_bias": True},
    "internlm3": {"head_dim": 6, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"head_dim": 6},
    "laguna": {
        **_ROUTED,
        **_WINDOWS,
        "head_dim": 6,
        "shared_expert_intermediate_size": 20,
        "num_attention_heads_per_layer": [4, 2, 6, 4],
        "mlp_layer_types": _MLPS,
        "gating": "per-element",
    },
    "mellum": {**_EXPERTS, **_WINDOWS, "moe_intermediate_size": 12, "head_dim": 6, "mlp_layer_types": _MLPS},
    "minicpm3": {**_LATENT, "v_head_dim": None, "dim_model_base": 16, "mlp_bias": True},
    "olmo_hybrid": {
        "layer_types": _KINDS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
    },
    "sarvam_mla": {**_LATENT, **_OF_DEEPSEEK, "q_lora_rank": None},
    "sarvam_moe": {**_OF_DEEPSEEK, "head_dim": 6, "attention_bias": True},
    "solar_open": {**_OF_DEEPSEEK, "head_dim": 6, "attention_bias": True},
    "vaultgemma": {**_WINDOWS, "head_dim": 6, "query_pre_attn_scalar": 12},
    "youtu": {**_LATENT, "attention_bias": True},
}
"""Sizes by ``model_type``; options that add weights are on."""
OWN_DEFAULTS = [
    *(kind for kind in SMALL if not kind.startswith("hunyuan")),
    *(
        "apertus",
        "arcee",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm_moe_dsa",
    ),
    *("gpt_oss", "kimi_linear", "llama", "llama4_text", "mimo_v2_flash", "minimax", "minimax_m2", "ministral3"),
    *("mistral", "mixtral", "nemotron_h", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
]
"""Families whose class can be built without arguments."""


def written(kind: str, sizes: dict[str, Any], folder: Path) -> tuple[int, Counter[int]]:
    """Lets transformers write config.json, and counts the trained parameters that it builds: all, and by layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    trained = [(name, weight.numel()) for name, weight in model.named_parameters() if weight.requires_grad]
    by_layer: Counter[int] = Counter()
    for name, count in trained:
        if found := re.search(r"\.layers\.(\d+)\.", name):
            by_layer[int(found[1])] += count
    return sum(count for _, count in trained), by_layer


def of_layers(model: LayeredModel) -> list[int]:
    return [sum(weight.parameters for weight in layer.weights(model.hidden_size)) for layer in model.layers]


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.slow
def test_a_small_model_of_a_family(kind: str, tmp_path: Path) -> None:
    parameters, by_layer = written(kind, COMMON | SMALL[kind], tmp_path)
    model = read_config(tmp_path)
    assert of_layers(model) == [by_layer[at] for at in range(len(model.layers))]
    assert model.parameters == parameters


@pytest.mark.parametrize("kind", sampled(OWN_DEFAULTS, 12, seconds=1))
@pytest.mark.slow
def test_the_defaults_of_a_family(kind: str, tmp_path: Path) -> None:
    parameters, by_layer = written(kind, {}, tmp_path)
    model = read_config(tmp_path)
    if model.streams is None:
        assert of_layers(model) == [by_layer[at] for at in range(len(model.layers))]
    assert model.parameters == parameters


def read(kind: str, **fields: Any) -> LayeredModel:
    return layers_from_config(kind, {"model_type": kind, **COMMON, **SMALL.get(kind, {}), **fields})


def mixers(model: LayeredModel) -> list[Attention]:
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]


def test_factors_of_granite_are_kept_by_name_and_refused_by_name() -> None:
    model = read("granite")
    factors = ("embeddings multiplied by 12", "residuals multiplied by 0.22", "logits divided by 8")
    assert model.same_cost == factors
    assert {mixer.score_scale for mixer in mixers(model)} == {0.0625}
    assert set(factors) <= set(adapters_lack(model_spec(model)))
    assert lacking_kinds(model_spec(model)) == ("biases of MLPs", *factors)
    plain = to_plain(LayerList.of(model))
    assert from_plain("g", json.loads(json.dumps(plain))).same_cost == factors
    neutral = read("granite", **dict.fromkeys(_FACTORS, 1.0), attention_multiplier=8**-0.5, mlp_bias=False)
    assert neutral.same_cost == () and {mixer.score_scale for mixer in mixers(neutral)} == {0.0}
    assert lacking_kinds(model_spec(neutral)) == ()


def test_text_alone_names_what_costs_the_same() -> None:
    plain = to_plain(LayerList.of(read("granite")))
    with pytest.raises(InvalidExperiment, match="same_cost must be a list of texts"):
        from_plain("g", {**plain, "same_cost": "residuals"})


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("hunyuan_v1_dense", ("norms of queries and keys after their rotation",)),
        ("hunyuan_v1_moe", ("norms of queries and keys after their rotation",)),
        ("laguna", ("output gates by softplus",)),
        ("minicpm3", ("embeddings multiplied by 12", "residuals multiplied by 0.7", "logits divided by 2")),
        (
            "olmo_hybrid",
            ("rates of the gated delta rule of up to 2", "norms of recurrent heads with an epsilon of 1e-05"),
        ),
        ("hyperclovax", ("embeddings multiplied by 12", "residuals multiplied by 0.22", "logits divided by 8")),
    ],
)
def test_what_costs_the_same_is_not_run(kind: str, names: tuple[str, ...]) -> None:
    fields = {"v_head_dim": 6} if kind == "minicpm3" else {}
    layers = {"layer_types": SMALL[kind]["layer_types"]} if "layer_types" in SMALL[kind] else {}
    model = read(kind, **fields, **layers)
    assert model.same_cost == names
    assert set(names) <= set(lacking_kinds(model_spec(model)))


@pytest.mark.parametrize("kind", ["exaone4", "exaone_moe", "afmoe"])
def test_layers_with_windows_alone_have_positions(kind: str) -> None:
    model = read(kind, first_k_dense_replace=2) if kind == "exaone_moe" else read(kind)
    assert [mixer.rope is not None for mixer in mixers(model)] == [False, True, True, False]
    assert [isinstance(mixer.span, Window) for mixer in mixers(model)] == [False, True, True, False]


def test_exaone_without_windows_has_positions_everywhere() -> None:
    model = read("exaone4", sliding_window=None, layer_types=["full_attention"] * 4)
    assert all(mixer.rope is not None for mixer in mixers(model))
    assert all(layer.outputs_normed for layer in model.layers)


def test_experts_of_families() -> None:
    by_kind = {
        kind: next(layer.mlp for layer in read(kind).layers if isinstance(layer.mlp, RoutedMLP))
        for kind in ("afmoe", "ernie4_5_moe", "flex_olmo", "granitemoe_swa", "hy_v3", "mellum")
    }
    scores = {kind: (mlp.score, mlp.normalize, mlp.correction) for kind, mlp in by_kind.items()}
    assert scores == {
        "afmoe": ("sigmoid", True, True),
        "ernie4_5_moe": ("softmax", True, True),
        "flex_olmo": ("softmax", False, False),
        "granitemoe_swa": ("softmax_of_chosen", True, False),
        "hy_v3": ("sigmoid", True, True),
        "mellum": ("softmax", True, False),
    }
    assert by_kind["afmoe"].scale == 2.5
    assert by_kind["granitemoe_swa"].shared == DenseMLP(width=20, activation="silu")


def test_positions_of_granite_differ_by_layer() -> None:
    ropes = [mixer.rope and mixer.rope.theta for mixer in mixers(read("granite_swa"))]
    assert ropes == [1e4, None, 1e6, 1e4]
    hybrid = read("granitemoehybrid", layer_types=["mamba", "attention", "mamba", "attention"], num_local_experts=0)
    assert [mixer.rope for mixer in mixers(hybrid)] == [None, None]
    assert {layer.mlp for layer in hybrid.layers} == {DenseMLP(width=20, activation="silu")}
    rotated = read("granitemoehybrid", position_embedding_type="rope")
    assert all(mixer.rope is not None for mixer in mixers(rotated))


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, None),
        ({"rope_parameters": {"rope_type": "default"}}, 1e4),
    ],
)
def test_olmo_hybrid_without_a_base_has_no_positions(fields: dict[str, Any], base: float | None) -> None:
    found = {mixer.rope and mixer.rope.theta for mixer in mixers(read("olmo_hybrid", **fields))}
    assert found == {base}


def test_hy3_has_the_parameters_of_its_files() -> None:
    """tencent/Hy3 holds 298,786,140,416 numbers in bf16, with one module of multi-token prediction of the last layer's
    kind: two norms more, a product of twice the hidden size, and a norm before the shared head."""
    sizes = {"num_hidden_layers": 80, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 8}
    sizes |= {"vocab_size": 120832, "intermediate_size": 13312, "num_experts": 192, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 1536, "expert_hidden_dim": 1536, "num_shared_experts": 1, "qk_norm": True}
    model = layers_from_config("Hy3", {"model_type": "hy_v3", "num_nextn_predict_layers": 1, **sizes})
    module = of_layers(model)[-1] + 2 * 4096 * 4096 + 3 * 4096
    assert model.parameters + module == 298_786_140_416


def test_fields_of_hunyuans_own_files() -> None:
    """Names and values of Hunyuan-A13B-Instruct; sizes that transformers takes from elsewhere must agree."""
    own: dict[str, Any] = {"num_experts": 6, "moe_topk": [2] * 4, "moe_intermediate_size": [40] * 4}
    own |= {"num_shared_expert": [1] * 4, "use_mixed_mlp_moe": True, "use_cla": False, "use_qk_norm": True}
    own |= {"attention_head_dim": 6, "head_dim": None, "moe_layer_num_skipped": 0, "cla_share_factor": 2}
    assert read("hunyuan_v1_moe", **own).parameters == read("hunyuan_v1_moe").parameters
    for wrong, message in (
        ({"moe_intermediate_size": [12] * 4}, "moe_intermediate_size must be 40"),
        ({"moe_topk": [2, 2, 2, 3]}, "moe_topk may not differ by layer"),
        ({"use_cla": True}, "use_cla=True; it may be false"),
    ):
        with pytest.raises(InvalidExperiment, match=message):
            read("hunyuan_v1_moe", **{**own, **wrong})


def test_latent_attention_without_experts_is_described_by_numbers() -> None:
    spec = model_spec(read("youtu", attention_bias=False))
    assert spec.layers is None and spec.mla is not None and spec.moe is None
    assert all(isinstance(layer.mixer, LatentAttention) for layer in read("youtu").layers)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_without_kinds_is_refused_in_one_line(kind: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        read(kind)
    assert refused.value.messages == (
        f"{kind}: no kinds of layers describe model_type={kind!r}: it has {REFUSED[kind]}",
    )
    assert kind not in FAMILIES


def test_refused_families_are_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    assert set(REFUSED) <= set(mapping)


def test_the_page_lists_every_family() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
    table = page.partition("## Which families are read")[2].partition("\n\nParameters")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", table)) - {"model_type"} == set(FAMILIES)
