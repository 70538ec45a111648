"""``python -m sweep export``: ten layouts for each engine, and what it refuses by name."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sweep.engine_configs import deepspeed, draft, megatron, nanotron, torchtitan, torchtitan03
from sweep.engine_configs.export import ENGINES, engine_config, summary
from tests.sweep.engine_configs.exported import refused
from tests.sweep.engine_configs.layouts import LAYOUTS, REFUSED, layout
from tests.workloads.engine.kind_models import kind_model
from workloads.rules.layout_rules import layout_violations
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import with_modules


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_layouts(name: str, engine: str) -> None:
    experiment = LAYOUTS[name]
    assert not layout_violations(experiment)
    expected = list(REFUSED[engine].get(name, ()))
    assert refused(experiment, engine) == expected
    if expected:
        with pytest.raises(UnsupportedByEngine, match=f"no counterpart in .*{re.escape(expected[0])}") as told:
            engine_config(experiment, engine)
        assert all(field in str(told.value) for field in expected)
        return
    config = engine_config(experiment, engine)
    assert summary(config)[0] == f"{experiment.id} for {ENGINES[engine][0].version}"
    for file, text in config.files.items():
        {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".json": json.loads, ".py": ast.parse, ".txt": str}[
            Path(file).suffix
        ](text)


def test_the_optimizer_is_the_engines_own() -> None:
    from workloads.engine.training import muon
    from workloads.engine.training import optimizer as own

    ours = (own.LEARNING_RATE, own.BETAS, own.EPSILON, own.WEIGHT_DECAY, own.MAX_GRAD_NORM)
    theirs = (draft.LEARNING_RATE, draft.BETAS, draft.EPSILON, draft.WEIGHT_DECAY, draft.MAX_GRAD_NORM)
    assert ours == theirs
    of_muon, of_sgd = (megatron.OPTIMIZERS[name].options for name in ("muon", "sgd"))
    told = of_muon["muon-momentum"], of_muon["muon-extra-scale-factor"], of_sgd["sgd-momentum"]
    assert told == (muon.MOMENTUM, muon.RMS_OF_ADAMW, own.SGD_MOMENTUM)


WRITTEN = layout("llama8b", pp=4, pp_stages="E|(t*16|)*2L", dp=2, zero_stage=1, global_batch_size=8)


def test_formats_of_two_bytes_are_exported_or_refused_by_name() -> None:
    narrow = layout("llama8b", dp=8, zero_stage=1, global_batch_size=8, grad_reduce="bf16")
    for engine, option in (
        ("torchtitan-0.2", 'mixed_precision_reduce = "bfloat16"'),
        ("torchtitan", "mixed_precision_reduce='bfloat16'"),
        ("megatron", "--grad-reduce-in-bf16"),
    ):
        _, config = ENGINES[engine][1](narrow, "same")
        assert any(option in text for text in dict(config.files).values()), engine
    states = layout("llama8b", dp=8, zero_stage=1, global_batch_size=8, optimizer_states="bf16")
    draft, config = ENGINES["megatron"][1](states, "same")
    assert "--exp-avg-sq-dtype bf16" in " ".join(dict(config.files).values())
    assert any("to nearest" in warning for warning in draft.warnings) and not draft.refusals
    for engine in ("torchtitan", "deepspeed", "nanotron", "transformers"):
        draft, _ = ENGINES[engine][1](states, "same")
        assert any("optimizer_states=bf16 (no counterpart here; fp32" in refusal for refusal in draft.refusals), engine
    for engine in ("torchtitan", "megatron"):
        draft, _ = ENGINES[engine][1](narrow.replace(master_weights="bf16"), "same")
        assert any("master_weights=bf16" in refusal for refusal in draft.refusals), engine


def test_written_stages_are_exported_or_refused_by_name() -> None:
    flags = engine_config(WRITTEN, "megatron").files["megatron_flags.txt"]
    assert "--pipeline-model-parallel-layout E|(t*16|)*2L\n" in flags
    parts = tomllib.loads(next(iter(engine_config(WRITTEN, "torchtitan-0.2").files.values())))["parallelism"]
    first, *middle, last = parts["module_fqns_per_model_part"]
    assert (first, [len(part) for part in middle], last) == (["tok_embeddings"], [16, 16], ["norm", "output"])
    with pytest.raises(
        UnsupportedByEngine, match=r"pp_stages=E\|\(t\*16\|\)\*2L \(it splits layers by a rule of its own"
    ):
        engine_config(WRITTEN, "nanotron")
    empty = WRITTEN.replace(pp_stages="E||t*32|L")
    assert "E||t*32|L" in engine_config(empty, "megatron").files["megatron_flags.txt"]
    with pytest.raises(UnsupportedByEngine, match="a stage without layers between the first and the last"):
        engine_config(empty, "torchtitan-0.2")
    with pytest.raises(UnsupportedByEngine, match="without m it would work"):
        engine_config(WRITTEN.replace(pp_stages="E|(t*16|)*2mL"), "megatron")


def test_modules_of_multi_token_prediction_are_exported_or_refused_by_name() -> None:
    """The layers before them are those of the model without them; others have no option of the kind."""
    fields: dict[str, Any] = {"dp": 8, "zero_stage": 1, "pp": 4, "ep": 8, "routing": "learned", "global_batch_size": 32}
    with_one, without = (layout("deepseek_v3", modules=count, **fields) for count in (1, 0))
    flags, plain = (
        engine_config(e, "megatron").files["megatron_flags.txt"].splitlines()[1:] for e in (with_one, without)
    )
    assert [flag for flag in flags if flag not in plain] == [
        f"--pipeline-model-parallel-layout E{'|'.join('t' * count for count in (16, 16, 16, 13))}mL",
        "--mtp-num-layers 1",
        "--mtp-loss-scaling-factor 0.3",
    ]
    for engine in set(ENGINES) - {"megatron"}:
        with pytest.raises(
            UnsupportedByEngine, match=f"to {engine} yet: no writer for modules of multi-token prediction"
        ):
            engine_config(with_one, engine)
    kinds = kind_model("sinks")
    with pytest.raises(UnsupportedByEngine, match=r"no writer for sliding 5 attention; attention sinks; modules of"):
        engine_config(Experiment.canonical(model=with_modules(kinds, 1), global_batch_size=8), "torchtitan")


def test_padded_rows_and_copied_heads_are_exported_or_refused_by_name() -> None:
    padded = layout("llama8b", tp=16, pad_vocab_to=128, global_batch_size=8)
    config = engine_config(padded, "megatron")
    flags = config.files["megatron_flags.txt"]
    assert "--make-vocab-size-divisible-by 128\n" in flags
    assert "--num-query-groups 8\n" in flags
    assert any("tp: above num_kv_heads=8 it gathers the columns of q, k and v" in one for one in config.warnings)
    with pytest.raises(UnsupportedByEngine, match=r"tp=16 \(it divides key and value heads; at most 8 would work\)"):
        engine_config(padded, "nanotron")
    with pytest.raises(UnsupportedByEngine, match=r"pad_vocab_to=128 \(it does not pad the vocabulary"):
        engine_config(padded, "torchtitan")


def test_latents_have_norms_in_megatron() -> None:
    """Megatron builds the norms of latents, which every such model here has, only with the flag for heads' norms."""
    for model, has_norms in (("deepseek_v3", True), ("deepseek_v2_lite", True), ("llama8b", False)):
        exported = megatron.export(layout(model, dp=4, zero_stage=1, global_batch_size=32), "x")[0].options
        assert exported.get("qk-layernorm", False) is has_norms, model


@pytest.mark.parametrize(
    ("engine", "experiment", "fields"),
    [
        ("torchtitan", layout("llama8b", dp=4, zero_stage=1, global_batch_size=8), ["zero_stage"]),
        ("torchtitan", layout("llama8b", cp=4, cp_kind="allgather", global_batch_size=8), ["zero_stage"]),
        ("torchtitan", layout("llama8b", tp=4, global_batch_size=8, precision="fp64"), ["precision"]),
        ("torchtitan", layout("llama1b", pp=2, global_batch_size=8, precision="fp32"), ["model.tie_embeddings"]),
        ("torchtitan", layout("mixtral_8x7b", dp=4, zero_stage=3, tp=2, ep=1, etp=1, global_batch_size=8), ["etp"]),
        ("torchtitan", layout("mixtral_8x7b", dp=4, zero_stage=3, tp=2, ep=2, etp=2, global_batch_size=8), ["etp"]),
        (
            "torchtitan",
            layout("llama8b", cp=2, zero_stage=3, cp_kind="allgather", attention="flash", global_batch_size=8),
            ["attention"],
        ),
        (
            "torchtitan",
            layout("llama8b", dp=4, recompute="full", recompute_every=2, global_batch_size=8),
            ["recompute_every"],
        ),
        (
            "torchtitan",
            layout("llama8b", pp=4, pp_schedule="dualpipe_v", compile="block", global_batch_size=32),
            ["compile"],
        ),
        ("torchtitan-0.2", layout("llama8b", dp=4, zero_stage=1, global_batch_size=8), ["zero_stage"]),
        ("torchtitan-0.2", layout("llama8b", dp=4, tp=2, global_batch_size=8), ["zero_stage"]),
        ("torchtitan-0.2", layout("llama8b", tp=4, global_batch_size=8), ["precision"]),
        ("torchtitan-0.2", layout("llama8b", tp=4, global_batch_size=8, precision="fp64"), ["precision"]),
        ("torchtitan-0.2", layout("llama1b", pp=2, global_batch_size=8, precision="fp32"), ["model.tie_embeddings"]),
        ("torchtitan-0.2", layout("qwen3_30b_a3b", dp=2, zero_stage=1, pp=2, global_batch_size=8), ["pp"]),
        ("torchtitan-0.2", layout("mixtral_8x7b", dp=4, zero_stage=3, tp=2, ep=1, etp=1, global_batch_size=8), ["etp"]),
        (
            "torchtitan-0.2",
            layout("llama8b", dp=2, zero_stage=3, pp=4, pp_schedule="zero_bubble_v", global_batch_size=32),
            ["zero_stage"],
        ),
        ("megatron", layout("llama8b", pp=4, pp_schedule="gpipe", global_batch_size=8), ["pp_schedule"]),
        ("megatron", layout("llama8b", dp=4, precision="fp8_rowwise", global_batch_size=8), ["precision"]),
        ("megatron", layout("llama8b", dp=4, zero_stage=3, pp=2, global_batch_size=8), ["zero_stage"]),
        ("megatron", layout("llama8b", dp=4, recompute="rope", global_batch_size=8), ["recompute"]),
        *(
            (engine, layout("llama8b", pp=2, recompute="full/none", global_batch_size=8), ["recompute"])
            for engine in ("torchtitan", "megatron", "nanotron", "deepspeed")
        ),
        *(
            (engine, layout("llama8b", pp=2, recompute="full:3", global_batch_size=8), ["recompute"])
            for engine in ("torchtitan", "nanotron", "deepspeed")
        ),
        ("nanotron", layout("llama8b", dp=4, zero_stage=1, cp=2, global_batch_size=8), ["zero_stage"]),
        ("deepspeed", layout("llama8b", dp=4, zero_stage=2, pp=2, global_batch_size=8), ["zero_stage"]),
    ],
    ids=lambda value: value.id if isinstance(value, Experiment) else str(value),
)
def test_refused_by_name(engine: str, experiment: Experiment, fields: list[str]) -> None:
    assert refused(experiment, engine) == fields


def test_torchtitan_by_hand() -> None:
    """Pipelines: the batch of a rank is all its micro-batches, and every layer's stage is the planner's."""
    found = torchtitan.export(LAYOUTS["8B zero1 tp2 pp2"], "x")[0].options
    assert found["training.local_batch_size"] == 16 and found["parallelism.pipeline_parallel_microbatch_size"] == 2
    parts = found["parallelism.module_fqns_per_model_part"]
    assert parts[0][:2] == ["tok_embeddings", "layers.0"] and parts[1][-3:] == ["layers.31", "norm", "output"]
    assert [len(part) for part in parts] == [18, 17]  # 17 and 15 layers: the head weighs as much as two
    assert found["parallelism.fsdp_reshard_after_forward"] == "never"
    # "default" keeps parameters gathered under a pipeline, which is no ZeRO-3.
    piped = layout("llama8b", dp=2, zero_stage=3, pp=2, global_batch_size=32)
    assert torchtitan.export(piped, "x")[0].options["parallelism.fsdp_reshard_after_forward"] == "always"
    long = {
        kind: layout("llama8b", cp=4, zero_stage=3, cp_kind=kind, global_batch_size=4, cuda_graph="none")
        for kind in ("ring", "allgather")
    }
    assert "gathers all keys" in str(engine_config(long["ring"], "torchtitan-0.2").warnings)
    assert not engine_config(long["allgather"], "torchtitan-0.2").warnings


@pytest.mark.parametrize("engine", ["torchtitan", "torchtitan-0.2"])
@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("zero_bubble_v", "9 times a micro-batch instead of 2"),
        ("interleaved_zero_bubble", "9 times a micro-batch instead of 2"),
        ("dualpipe_v", "in up to 7 of 64 backwards of a rank"),
        ("1f1b", None),
    ],
)
def test_a_split_backward_repeats_what_torchtitan_checkpoints(engine: str, schedule: str, told: str | None) -> None:
    def of(recompute: str) -> Experiment:
        fields = {"pp_schedule": schedule, "recompute": recompute, "global_batch_size": 64}
        return layout("llama8b", dp=2, zero_stage=1, pp=4, **fields)

    about = [text for text in engine_config(of("full"), engine).warnings if text.startswith("recompute: ")]
    assert len(about) == (told is not None) and all(str(told) in text for text in about)
    assert not any(text.startswith("recompute: ") for text in engine_config(of("none"), engine).warnings)
    assert refused(of("selective"), engine) == (["recompute"] if told else [])


def test_torchtitan_has_graphs_where_it_can_capture() -> None:
    """Pipelines, the exchange of tokens between experts and varlen attention cannot be captured; the rest is."""
    for fields, has_graphs in (
        ({"dp": 4, "zero_stage": 2}, True),
        ({"tp": 4, "sequence_parallel": False, "attention": "cudnn"}, True),
        ({"pp": 4}, False),
        ({"dp": 4, "zero_stage": 3, "attention": "flash"}, False),
    ):
        exported, config = torchtitan03.export(layout("llama8b", global_batch_size=8, **fields), "x")
        assert exported.options[torchtitan03.GRAPHS] is not has_graphs
        assert f"disable_cuda_graphs={not has_graphs}," in config.files[torchtitan03.FILE]
    for ep, has_graphs in ((1, True), (2, False)):
        experts = layout("mixtral_8x7b", dp=4, zero_stage=3, ep=ep, global_batch_size=8)
        assert torchtitan03.export(experts, "x")[0].options[torchtitan03.GRAPHS] is not has_graphs


def test_what_went_from_torchtitan_is_named_with_what_would_work() -> None:
    gone = {
        "quantize.linear.float8.enable_fsdp_float8_all_gather": {"precision": "fp8_tensorwise"},
        "parallelism.context_parallel_rotate_method": {"cp": 2, "dp": 2},
        "activation_checkpoint.selective_ac_option": {"recompute": "full", "recompute_every": 2},
    }
    for key, fields in gone.items():
        asked = {"dp": 4, "zero_stage": 3, "global_batch_size": 8, **fields}
        assert f"{key} is gone" in str(torchtitan03.export(layout("llama8b", **asked), "x")[0].refusals)


def test_a_flavor_of_torchtitan_is_named_only_for_sequences_that_it_can_hold() -> None:
    for seq_len, is_named in ((40_960, True), (81_920, False)):
        asked = layout("qwen3_30b_a3b", dp=4, zero_stage=3, ep=4, global_batch_size=8, seq_len=seq_len)
        text = torchtitan03.export(asked, "x")[1].files[torchtitan03.FILE]
        assert ('model_registry("30B-A3B"' in text) is is_named


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        ("gpt_oss_20b", {}, 'model_registry("20b", attn_backend="flex")'),
        ("gpt_oss_120b", {"attention": "flash"}, 'model_registry("120b", attn_backend="varlen")'),
        ("gpt_oss_20b_8_layers", {}, "no writer for a gpt-oss that is none of its flavors (20b, 120b)"),
        ("gpt_oss_20b", {"routing": "learned"}, "model.moe.balance=aux_loss (it balances only by a bias)"),
        ("gpt_oss_20b", {"pp": 2}, "pp=2 (not tried with its gpt-oss)"),
        ("gpt_oss_20b", {"precision": "fp8_rowwise"}, "precision=fp8_rowwise (not tried with its gpt-oss"),
        ("llama4_scout_4_layers", {}, "no writer for Llama 4, which it has no longer"),
        ("gemma_4_26b_a4b_6_layers", {}, "no writer for sliding 1024 attention"),
    ],
)
def test_layers_of_other_kinds_are_flavors_of_torchtitan_or_refused(
    model: str, fields: dict[str, Any], told: str
) -> None:
    asked = layout(model, **{"dp": 8, "zero_stage": 3, "global_batch_size": 8, **fields})
    try:
        found = engine_config(asked, "torchtitan").files[torchtitan03.FILE]
    except UnsupportedByEngine as refusal:
        found = str(refusal)
    assert told in found


def test_torchtitan_02_refuses_layers_of_other_kinds_by_name() -> None:
    for model, lacking in (
        ("gpt_oss_20b", "gpt-oss with weights in 32 bits, which its own has in 16"),
        ("llama4_scout_4_layers", "a norm of queries and keys; chunks shorter than the sequence (8192)"),
    ):
        with pytest.raises(UnsupportedByEngine, match=re.escape(lacking)):
            engine_config(layout(model, dp=8, zero_stage=3, global_batch_size=8), "torchtitan-0.2")


def test_megatron_by_hand() -> None:
    found = megatron.export(LAYOUTS["8B zero1 tp2 pp2"], "x")[0].options
    assert found["eval-iters"] == 0 and found["eval-interval"] == found["train-iters"]
    assert found["vocab-size"] == 128256  # its tokenizer without text adds none since 0.18
    assert found["pipeline-model-parallel-layout"] == "E" + "t" * 17 + "|" + "t" * 15 + "L"
    assert "num-virtual-stages-per-pipeline-rank" not in found
    even = megatron.export(LAYOUTS["70B interleaved"], "x")[0].options
    assert even["num-virtual-stages-per-pipeline-rank"] == 5 and "pipeline-model-parallel-layout" not in even
    first = megatron.export(layout("llama8b", pp=2, recompute="full:3", global_batch_size=8), "x")[0].options
    assert (first["recompute-method"], first["recompute-num-layers"]) == ("block", 3)
    v3 = megatron.export(LAYOUTS["V3 experts"], "x")[0].options
    assert v3["moe-layer-freq"] == "([0]*3+[1]*58)" and v3["moe-shared-expert-intermediate-size"] == 2048
    for precision, of, kind in (("mxfp8", "fp8", "e4m3"), ("nvfp4", "fp4", "e2m1")):
        found = megatron.export(layout("llama8b", dp=4, precision=precision, global_batch_size=8), "x")[0].options
        assert found["bf16"] and found[f"{of}-format"] == kind and found[f"{of}-recipe"] == precision
    hsdp = megatron.export(LAYOUTS["8B hsdp"], "x")[0].options
    assert hsdp["num-distributed-optimizer-instances"] == 2


def test_nanotron_and_deepspeed_by_hand() -> None:
    experiment = layout("llama8b", dp=2, zero_stage=1, cp=1, tp=2, pp=2, micro_batch_size=2, global_batch_size=32)
    text = engine_config(experiment, "nanotron").files[nanotron.FILE]
    found = yaml.safe_load(text)
    assert found["parallelism"]["tp_mode"] == "REDUCE_SCATTER" and found["parallelism"]["pp_engine"] == "1f1b"
    assert found["tokens"]["batch_accumulation_per_replica"] == 8 and found["optimizer"]["zero_stage"] == 1
    assert found["model"]["model_config"]["num_hidden_layers"] == 32
    piped = layout("llama8b", dp=2, zero_stage=1, pp=2, global_batch_size=32, recompute="full")
    config = engine_config(piped, "deepspeed")
    written = json.loads(config.files[deepspeed.FILE])
    assert written["train_batch_size"] == 32 == written["gradient_accumulation_steps"] * 1 * 2
    assert written["pipeline"] == {"activation_checkpoint_interval": 1}
    assert any("PipelineModule(num_stages=2" in note for note in config.notes)
