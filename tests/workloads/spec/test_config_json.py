"""Published models are read from their config.json: parameters to the digit, FLOPs, refusals by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from workloads.costs.memory.estimate import peak_stage
from workloads.costs.shape.flops import flops_per_token
from workloads.costs.shape.params import active_params_with_embedding, num_params
from workloads.rules.engine_kinds import adapters_lack, lacking_kinds
from workloads.spec.config_json.expressible import model_spec, not_expressible
from workloads.spec.config_json.read import layers_from_config, name_of, read_config
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention, LatentAttention, Rope
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_spec import model_to_dict

FILE = json.loads((Path(__file__).parent / "published_models.json").read_text())
PUBLISHED: dict[str, Any] = FILE["models"]
WHOLE_FILES = Path(__file__).resolve().parents[4] / "shared" / "models" / "configs"
"""The untrimmed files, which lie beside some checkouts."""
RUN = {
    "MiniMaxAI/MiniMax-M2.5",
    "XiaomiMiMo/MiMo-7B-Base",
    "XiaomiMiMo/MiMo-V2-Flash",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "stepfun-ai/Step-3.7-Flash",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-35B-A3B",
    "nvidia/Nemotron-H-56B-Base-8K",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "openai/gpt-oss-20b",
    "google/gemma-4-26B-A4B",
}
"""Models that a list of layers describes and the engine runs."""
PLANNED = {
    *("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3", "meta-llama/Meta-Llama-3.1-405B"),
    *("meta-llama/Meta-Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"),
    *("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"),
    *("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"),
}
"""Those that the flat fields of `ModelSpec` can express."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_flops_of_published_models(name: str) -> None:
    known = PUBLISHED[name]
    models = [layers_from_config(name, known["config"])]
    whole = WHOLE_FILES / f"{name.replace('/', '--')}.json"
    models += [read_config(whole)] if whole.is_file() else []
    for model in models:
        assert model.parameters == known["parameters"]
        assert model.active_parameters == known["active_parameters"]
        for length in (4096, 131072):
            assert model.forward_flops(length) == pytest.approx(known[f"forward_flops_{length}"], rel=1e-9)
            assert model.training_flops(length) == pytest.approx(known[f"training_flops_{length}"], rel=1e-9)


def test_layers_that_use_the_keys_of_a_layer_before_have_no_indexer() -> None:
    own = layers_from_config("x", PUBLISHED["zai-org/GLM-5"]["config"])
    shared = layers_from_config("x", changed("zai-org/GLM-5", index_topk_freq=4, index_skip_topk_offset=3))
    mixers = [layer.mixer for layer in shared.layers]
    owners = [at for at, mixer in enumerate(mixers) if isinstance(mixer, LatentAttention) and mixer.owns_indexer]
    assert owners == [0, 1, 2, *range(6, 75, 4)]
    indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
    assert own.parameters - shared.parameters == (78 - 21) * indexer


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_planned_exactly_by_numbers_or_a_list_of_layers(name: str) -> None:
    model = layers_from_config(name, PUBLISHED[name]["config"])
    spec = model_spec(model)
    assert num_params(spec) == model.parameters
    assert active_params_with_embedding(spec) == model.active_parameters
    assert flops_per_token(spec, 4096, "causal") == pytest.approx(PUBLISHED[name]["training_flops_4096"], rel=5e-3)
    assert (spec.layers is None) == (name in PLANNED)
    missing = not_expressible(model)
    assert (missing == []) == (name in PLANNED)
    assert list(adapters_lack(spec)) == [what for what in missing if not what.startswith("residuals")]
    assert set(lacking_kinds(spec)) <= {
        *missing,
        "experts that differ by layer",
        "shared gated (situ) experts",
        "shared gated (clamped_silu) experts",
    }
    assert (lacking_kinds(spec) == ()) == (name in PLANNED or name in RUN)


@pytest.mark.parametrize(
    ("name", "shipped", "differing"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3", {"name"}),
        ("meta-llama/Meta-Llama-3.1-70B", "llama70b", {"name"}),
        ("Qwen/Qwen3-30B-A3B", "qwen3_30b_a3b", {"name"}),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral_8x7b", {"name", "moe"}),  # another coefficient of the loss
        ("openai/gpt-oss-20b", "gpt_oss_20b", {"name"}),
        ("google/gemma-4-26B-A4B", "gemma_4_26b_a4b", {"name"}),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2", {"name"}),
    ],
)
def test_a_published_file_is_the_shipped_model(name: str, shipped: str, differing: set[str]) -> None:
    read = model_to_dict(model_spec(layers_from_config(name, PUBLISHED[name]["config"])))
    known = model_to_dict(ConfFolders().model(shipped))
    assert {field for field in read if read[field] != known[field]} == differing


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("openai/gpt-oss-20b", "gpt_oss_20b_8_layers"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_35b_a3b_8_layers"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_3_nano_14_layers"),
        ("google/gemma-4-26B-A4B", "gemma_4_26b_a4b_6_layers"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_scout_4_layers"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax_m2.5_2_layers"),
    ],
)
def test_a_cut_model_is_the_first_layers_of_the_published_file(name: str, shipped: str) -> None:
    whole = layers_from_config(name, PUBLISHED[name]["config"])
    known = ConfFolders().model(shipped)
    assert known.layers is not None
    cut = known.layers.model(
        name, known.hidden_size, known.vocab_size, tied=known.tie_embeddings, norm_eps=known.norm_eps
    )
    assert shipped.endswith(f"_{len(cut.layers)}_layers")
    assert cut.layers == whole.layers[: len(cut.layers)]
    assert set(cut.layers) == set(whole.layers)
    same = dataclasses.replace(
        whole, layers=cut.layers, longest=None, predicted_ahead=0, left_out=(), without_effect=()
    )
    assert cut == same


def test_the_larger_gpt_oss_has_more_layers_and_experts() -> None:
    """36 layers and 128 experts; its card (arXiv:2508.10925, table 1) has 116.83 B parameters and, without the
    embedding, 5.13 B active ones."""
    kinds = ["sliding_attention", "full_attention"] * 18
    config = changed("openai/gpt-oss-20b", num_hidden_layers=36, num_local_experts=128, layer_types=kinds)
    model = layers_from_config("gpt_oss_120b", config)
    assert model_to_dict(model_spec(model)) == model_to_dict(ConfFolders().model("gpt_oss_120b"))
    assert round(model.parameters / 1e9, 2) == 116.83
    assert round((model.active_parameters - model.embedding_parameters) / 1e9, 2) == 5.13


def test_gemma_3_is_read_as_transformers_builds_it() -> None:
    """Sizes of google/gemma-3-27b-it; the number of parameters is that of `Gemma3ForCausalLM` on the meta device."""
    sizes = {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    model = layers_from_config("g", {"model_type": "gemma3_text", "rope_scaling": scaling, **sizes})
    assert model.parameters == 27_009_346_304
    assert model.scaled_embedding and not model.logit_cap
    local, whole = (layer.mixer for layer, _ in model.distinct())
    assert isinstance(local, Attention) and isinstance(whole, Attention)
    assert local.rope == Rope(10_000.0), "the local base, which is not scaled"
    assert whole.rope is not None and (whole.rope.theta, '"linear"' in whole.rope.scaling) == (1_000_000.0, True)
    assert local.score_scale == whole.score_scale == 168**-0.5
    assert [isinstance(layer.mixer, Attention) and layer.mixer.sees_all for layer in model.layers[4:7]] == [
        False,
        True,
        False,
    ]
    assert lacking_kinds(model_spec(model)) == ()
    usual = layers_from_config("g", {"model_type": "gemma3_text", **sizes, "query_pre_attn_scalar": 128})
    assert {layer.mixer.score_scale for layer in usual.layers if isinstance(layer.mixer, Attention)} == {0.0}


def test_experts_of_nemotron_3_may_work_in_a_latent() -> None:
    """As in its Super and Ultra: experts have the latent's width, and two projections lie around them."""
    config = PUBLISHED["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]["config"]
    wide, narrow = (layers_from_config("n", config | size) for size in ({}, {"moe_latent_size": 1024}))
    layers, experts, width, hidden = 23, 128, 1856, 2688
    of_experts = layers * experts * 2 * width * (hidden - 1024)
    assert wide.parameters - narrow.parameters == of_experts - layers * 2 * hidden * 1024
    assert lacking_kinds(model_spec(narrow)) == ()


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("openai/gpt-oss-20b", (7.0, 1.702, 1.0)),
        ("MiniMaxAI/MiniMax-M3", (7.0, 1.702, 1.0)),
        ("deepseek-ai/DeepSeek-V4-Flash", (10.0, 1.0, 0.0)),
    ],
)
def test_constants_of_clamped_experts(name: str, constants: tuple[float, float, float]) -> None:
    """`_apply_gate` of transformers' gpt_oss, minimax_m3_vl and deepseek_v4."""
    experts = [layer.mlp.expert for layer in layers_from_config(name, PUBLISHED[name]["config"]).layers if layer.routed]
    assert {(one.activation, one.limit, one.slope, one.offset) for one in experts} == {("clamped_silu", *constants)}


def changed(name: str, **changes: Any) -> dict[str, Any]:
    config = {**PUBLISHED[name]["config"], **changes}
    return {field: value for field, value in config.items() if value != "REMOVED"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("Qwen/Qwen3-8B", model_type="qwen33"), "x: no reader for model_type='qwen33'; known: afmoe"),
        (changed("Qwen/Qwen3-8B", model_type="REMOVED"), "x: model_type is missing"),
        (changed("Qwen/Qwen3-8B", hidden_size="REMOVED"), "x: hidden_size is missing"),
        (changed("Qwen/Qwen3-8B", hidden_size="big"), "x: hidden_size='big' must be a whole number of at least 1"),
        (changed("Qwen/Qwen3-8B", hidden_act="relu"), "x: hidden_act='relu'"),
        (
            changed("Qwen/Qwen3-8B", num_key_value_heads=7),
            "x: num_key_value_heads=7 must divide num_attention_heads=32",
        ),
        (changed("Qwen/Qwen3-8B", twists=3), "x: twists=3 is not understood; it may change the computation"),
        (changed("mistralai/Mixtral-8x7B-v0.1", num_experts_per_tok="REMOVED"), "x: num_experts_per_tok is missing"),
        (changed("mistralai/Mixtral-8x7B-v0.1", num_experts_per_tok=9), "x: num_experts_per_tok=9 must be at most 8"),
        (changed("openai/gpt-oss-20b", layer_types=["full_attention"]), "x: layer_types must be a list of 24 entries"),
        (changed("openai/gpt-oss-20b", experts_per_token=5), "and experts_per_token=5 must be equal"),
        (changed("Qwen/Qwen3.5-27B", twists=3), "x: twists beside text_config is not understood"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        layers_from_config("x", config)
    (line,) = refused.value.messages
    assert message in line and "\n" not in line


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"[1]", "does not hold a mapping"), (b"\xff", "is not UTF-8 text")],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidExperiment, match=message):
        read_config(tmp_path)


def test_minimax_01_has_lightning_attention() -> None:
    config = {
        "model_type": "minimax",
        "num_hidden_layers": 80,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9216,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "vocab_size": 200064,
        "layer_types": ["linear_attention"] * 7 + ["full_attention"],
        "mlp_alpha_factor": 3.5565588200778455,
    }
    config["layer_types"] *= 10
    model = layers_from_config("MiniMax-Text-01", config)
    # 456 B parameters, 45.9 B of them active without embedding and head (arXiv:2501.08313)
    linear, full = 5 * 6144 * 8192 + 8192, 2 * 6144 * 8192 + 2 * 6144 * 1024
    layers = 80 * (2 * 6144 + 32 * 6144 + 32 * 3 * 6144 * 9216)
    assert model.parameters == layers + 70 * linear + 10 * full + 2 * 200064 * 6144 + 6144
    assert (
        round(model.parameters / 1e9) == 456 and round((model.active_parameters - 2 * 200064 * 6144) / 1e9, 1) == 45.9
    )
    spec = model_spec(model)
    assert lacking_kinds(spec)[0] == "lightning attention"
    e = Experiment.canonical(model=spec, dp=64, tp=8, ep=32, zero_stage=3, global_batch_size=64, recompute="full")
    assert peak_stage(e).peak_bytes > 12 * model.parameters / e.world_size


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="no such file"):
        read_config(tmp_path / "config.json")


def test_names_come_from_folders_and_files() -> None:
    assert name_of(Path("/m/Qwen3-8B/config.json")) == "Qwen3-8B"
    assert name_of(Path("/m/Qwen--Qwen3-8B.json")) == "Qwen3-8B"
    assert name_of(Path("/hub/models--Qwen--Qwen3-8B/snapshots/0a1b/config.json")) == "Qwen3-8B"


def test_a_vision_encoder_is_left_out_and_said() -> None:
    model = layers_from_config("x", PUBLISHED["Qwen/Qwen3.5-27B"]["config"])
    assert model.left_out == ("vision encoder (vision_config)",)
    assert model.predicted_ahead == 1


def test_keys_of_spans_equal_those_counted_one_by_one() -> None:
    for length in (1, 7, 8, 29):
        positions = range(1, length + 1)
        assert Window(8).keys(length) == pytest.approx(sum(min(at, 8) for at in positions) / length)
        assert Chunk(8).keys(length) == pytest.approx(sum((at - 1) % 8 + 1 for at in positions) / length)


def test_biases_of_attention_are_one_option_of_its_kind() -> None:
    plain = Attention(heads=4, kv_heads=2, head_dim=8, value_dim=8)
    biased = Attention(heads=4, kv_heads=2, head_dim=8, value_dim=8, bias=True, output_bias=True)
    more = sum(w.parameters for w in biased.weights(16)) - sum(w.parameters for w in plain.weights(16))
    assert more == 4 * 8 + 2 * 2 * 8 + 16
