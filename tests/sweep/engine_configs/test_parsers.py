"""What is exported, read by the engines' own code where `packages` has installed it: every value arrives."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sweep.engine_configs import deepspeed, torchtitan, torchtitan03, transformers
from sweep.engine_configs.export import engine_config, write_config
from sweep.engine_configs.torchtitan_models import FLAVOURS
from tests.sweep.engine_configs.layouts import LAYOUTS, OWN_SHAPES, REFUSED, layout
from tests.sweep.engine_configs.torchtitan_reads import FFN
from workloads.costs.shape.params import num_params
from workloads.spec.experiment import Experiment

ROOT = Path(__file__).resolve().parents[3]
TITAN_02 = {**LAYOUTS, **OWN_SHAPES}
TITAN = {name: e for name, e in TITAN_02.items() if name not in REFUSED["torchtitan"]} | {
    "8B gathered": layout("llama8b", cp=4, dp=2, zero_stage=3, cp_kind="allgather", global_batch_size=4, seq_len=65536),
    "8B flash": layout("llama8b", dp=4, zero_stage=3, tp=2, attention="flash", recompute="full", global_batch_size=32),
    "8B fp8": layout("llama8b_8_layers", dp=4, zero_stage=3, precision="fp8_rowwise", global_batch_size=32),
    "gpt-oss 20b ep": layout("gpt_oss_20b", dp=8, zero_stage=3, ep=8, global_batch_size=8),
    "gpt-oss 120b tp": layout("gpt_oss_120b", dp=8, zero_stage=2, tp=2, etp=2, recompute="full", global_batch_size=8),
}
DEEPSPEED = {name: e for name, e in LAYOUTS.items() if name not in REFUSED["deepspeed"]} | {
    "8B zero3 tp2": layout(
        "llama8b", dp=4, zero_stage=3, tp=2, sequence_parallel=False, micro_batch_size=2, global_batch_size=32
    ),
    "8B ulysses": layout("llama8b", dp=2, zero_stage=2, cp=4, cp_kind="ulysses", global_batch_size=4, seq_len=8192),
    "one rank": layout("llama1b", global_batch_size=4),
    "1B fp16 pp2 full": layout(
        "llama1b",
        dp=2,
        zero_stage=1,
        pp=2,
        recompute="full",
        precision="fp16",
        micro_batch_size=2,
        global_batch_size=16,
    ),
    "1B fp32": layout("llama1b", dp=4, zero_stage=3, precision="fp32", global_batch_size=8),
}
TRANSFORMERS = {name: e for name, e in LAYOUTS.items() if name not in REFUSED["transformers"]} | {
    "1B zero1 full": layout("llama1b", dp=4, zero_stage=1, recompute="full", global_batch_size=8),
    "8B zero2 replicated": layout("llama8b", dp_replicate=2, dp_shard=2, zero_stage=2, global_batch_size=8),
    "qwen3": layout("qwen3_30b_a3b", dp=8, zero_stage=3, routing="learned", global_batch_size=64),
    "mixtral": layout("mixtral_8x7b", dp=8, zero_stage=3, routing="learned", precision="fp16", global_batch_size=8),
}

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2, whole=True)]


def needs(*modules: str) -> pytest.MarkDecorator:
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"{', '.join(lacking)} not installed ({__package__}/packages)")


OLD_TITAN = Path(sys.prefix) / "torchtitan-0.2.2"
"""Where `packages` puts torchtitan 0.2.2, beside the newer one."""
OWN_DEEPSPEED = Path(sys.prefix) / "parsers" / "deepspeed-0.19.8"
HAS_DEEPSPEED = pytest.mark.skipif(
    not OWN_DEEPSPEED.is_dir(), reason=f"{OWN_DEEPSPEED} is not there ({__package__}/packages)"
)
OLD = pytest.mark.skipif(not OLD_TITAN.is_dir(), reason=f"{OLD_TITAN} is not there ({__package__}/packages)")


def run(module: str, arguments: list[str], packages: Path | None = None) -> list[Any]:
    """What the module prints; ``packages``: a folder of packages that come before the installed ones."""
    command = [sys.executable, "-m", f"tests.sweep.engine_configs.{module}", *arguments]
    path = os.pathsep.join(filter(None, [str(packages or ""), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@cache
def titan_02(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """torchtitan's own flavors, and what it read of each layout: one process for all."""
    for name, experiment in TITAN_02.items():
        write_config(engine_config(experiment, "torchtitan-0.2"), folder / "0.2" / name)
    own, *read = run("torchtitan_reads", [str(folder / "0.2" / name) for name in TITAN_02], OLD_TITAN)
    return own, dict(zip(TITAN_02, read, strict=True))


@cache
def titan(folder: Path) -> dict[str, Any]:
    for name, experiment in TITAN.items():
        write_config(engine_config(experiment, "torchtitan"), folder / "0.3" / name)
    read = run("torchtitan03_reads", [str(folder / "0.3" / name) for name in TITAN])
    return dict(zip(TITAN, read, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


def titan_shape(experiment: Experiment, read: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Of each number of the model: what we mean, and what torchtitan will build."""
    model = experiment.model
    named = {
        "dim": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "head_dim": model.head_dim,
        "qk_norm": model.qk_norm,
        "enable_weight_tying": model.tie_embeddings,
        FFN: model.ffn_hidden_size,
        "hidden_dim": model.ffn_hidden_size,
        "inter_dim": model.ffn_hidden_size,
        "moe_enabled": model.moe is not None,
    }
    if model.mla is None:
        named["n_kv_heads"] = model.num_kv_heads
    else:
        named |= {"kv_lora_rank": model.mla.kv_lora_rank, "q_lora_rank": model.mla.q_lora_rank}
        named |= {"v_head_dim": model.mla.v_head_dim, "qk_rope_head_dim": model.mla.qk_rope_head_dim}
    pairs = {name: (value, read[name]) for name, value in named.items() if name in read}
    if model.moe is not None:
        theirs, moe = read["moe_args"], model.moe
        pairs["moe_inter_dim"] = (moe.expert_hidden_size, read["moe_inter_dim"])
        pairs["experts"] = (moe.num_experts, theirs["num_experts"])
        pairs["top_k"] = (moe.experts_per_token, theirs["top_k"])
        pairs["shared"] = (moe.num_shared_experts, theirs["num_shared_experts"])
        pairs["gate"] = (moe.gate, theirs["score_func"])
        pairs["normalized"] = (moe.normalize_weights, theirs["route_norm"])
        pairs["scale"] = (moe.weight_scale, theirs["route_scale"])
    return pairs


@needs("torchtitan", "tyro", "spmd_types")
@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_reads_every_value(name: str, folder: Path) -> None:
    e, read = TITAN[name], titan(folder)[name]
    for option, value in torchtitan03.export(e, e.id)[0].options.items():
        place = read
        for part in option.split("."):
            place = place[part]
        assert place == (value or "NoneType" if option == "activation_checkpoint" else value), option
    degrees = read["parallelism"]
    ranks = [degrees[f"{axis}_parallel_degree"] for axis in ("tensor", "context", "pipeline")]
    ranks += [degrees[f"data_parallel_{kind}_degree"] for kind in ("replicate", "shard")]
    assert math.prod(ranks) == e.world_size
    assert degrees["spmd_backend"] == ("spmd_types" if torch.__version__ >= "2.14" else "partial_dtensor")
    assert read["optimizer"]["param_groups"][0]["optimizer_kwargs"] == {
        "lr": 3e-5,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


@needs("torchtitan", "tyro", "spmd_types")
@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_builds_the_shape(name: str, folder: Path) -> None:
    e, read = TITAN[name], titan(folder)[name]
    model, built = e.model, read["model_spec"]["model"]
    number, first, last = built["layers"]
    assert (number, read["parameters"]) == (model.num_layers, num_params(model))
    assert {norm["eps"] for norm in (built["norm"], first["attention_norm"], last["ffn_norm"])} == {model.norm_eps}
    attention = first["attention"]
    assert (attention["n_heads"], built["dim"]) == (model.num_heads, model.hidden_size)
    rotary = attention["rope"]
    assert (rotary["theta"], rotary["max_seq_len"]) == (model.rope_theta, e.seq_len)
    kernel = attention["inner_attention"]
    assert ("block_size" in kernel) is (e.attention != "flash")  # of flex attention alone
    if (moe := model.moe) is not None:
        router = last["moe"]["router"]
        assert (router["top_k"], router["score_func"]) == (moe.experts_per_token, moe.gate)
        assert (router["route_norm"], router["route_scale"]) == (moe.normalize_weights, moe.weight_scale)
        assert (first["moe"] is None) is (moe.num_dense_layers > 0)


@needs("torchtitan", "tyro")
@OLD
@pytest.mark.parametrize("name", TITAN_02)
def test_torchtitan_02_reads_every_value(name: str, folder: Path) -> None:
    experiment = TITAN_02[name]
    read = titan_02(folder)[1][name]
    for option, value in torchtitan.export(experiment, experiment.id)[0].options.items():
        place = read["config"]
        for part in option.split("."):
            place = place[part]
        assert place == value, option
    pairs = titan_shape(experiment, read["model"])
    assert {key: ours for key, (ours, _) in pairs.items()} == {key: theirs for key, (_, theirs) in pairs.items()}
    assert len(pairs) >= 8
    degrees = read["config"]["parallelism"]
    ranks = [degrees[f"{axis}_parallel_degree"] for axis in ("tensor", "context", "pipeline")]
    ranks += [degrees[f"data_parallel_{kind}_degree"] for kind in ("replicate", "shard")]
    product = 1
    for degree in ranks:
        product *= degree
    assert product == experiment.world_size


@needs("torchtitan", "tyro")
@OLD
def test_named_shapes_are_torchtitans_own(folder: Path) -> None:
    own = titan_02(folder)[0]
    for (family, flavor), shape in FLAVOURS.items():
        from workloads.spec.model_spec import ModelSpec

        experiment = Experiment(model=ModelSpec(name="x", **shape), global_batch_size=1)
        for key, (ours, theirs) in titan_shape(experiment, own[family][flavor]).items():
            assert ours == theirs, (family, flavor, key)


@cache
def deepspeed_reads(folder: Path) -> dict[str, Any]:
    arguments: list[str] = []
    for name, experiment in DEEPSPEED.items():
        write_config(engine_config(experiment, "deepspeed"), folder / "deepspeed" / name)
        arguments += [str(folder / "deepspeed" / name / deepspeed.FILE), str(experiment.dp)]
    return dict(zip(DEEPSPEED, run("deepspeed_reads", arguments, OWN_DEEPSPEED), strict=True))


@HAS_DEEPSPEED
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_takes_every_value(name: str, folder: Path) -> None:
    e = DEEPSPEED[name]
    read = deepspeed_reads(folder)[name]
    # Its own check has multiplied micro-batch, accumulation and ranks to the whole batch.
    assert (read["train_batch_size"], read["world_size"]) == (e.global_batch_size, e.dp)
    assert read["train_micro_batch_size_per_gpu"] == e.micro_batch_size
    assert read["gradient_accumulation_steps"] == e.num_microbatches
    assert read["zero_optimization_stage"] == (e.zero_stage or int(e.world_size == 1))
    assert (read["sequence_parallel_size"], read["data_parallel_size"]) == ((e.cp, e.dp) if e.cp > 1 else (None, None))
    assert "refused" not in read["mixed_precision"]
    assert (read["bf16"], read["fp16"]) == (e.precision == "bf16", e.precision == "fp16")
    assert read["grad_accum_dtype"] == (None if e.precision == "fp32" else "fp32")
    assert (read["gradient_clipping"], read["optimizer_name"]) == (1.0, "adamw")
    assert read["optimizer_params"] == {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert read["autotp_size"] == (e.tp if e.tp > 1 else 0)
    assert read["pipeline"]["activation_checkpoint_interval"] == int(e.pp > 1 and e.recompute == "full")


@HAS_DEEPSPEED
def test_deepspeed_refuses_fp32_gradients_without_zero(folder: Path) -> None:
    experiment = DEEPSPEED["8B zero2"]
    write_config(engine_config(experiment, "deepspeed"), folder / "stage0")
    file = folder / "stage0" / deepspeed.FILE
    file.write_text(file.read_text().replace('"stage": 2', '"stage": 0'))
    assert (
        "unsupported mix"
        in run("deepspeed_reads", [str(file), str(experiment.dp)], OWN_DEEPSPEED)[0]["mixed_precision"]
    )
    replicated = deepspeed.export(experiment.replace(zero_stage=0), "x")[0]
    assert [text.partition("=")[0] for text in replicated.refusals] == ["zero_stage"]


@HAS_DEEPSPEED
def test_deepspeed_refuses_a_batch_that_does_not_add_up(folder: Path) -> None:
    experiment = DEEPSPEED["8B zero2"]
    write_config(engine_config(experiment, "deepspeed"), folder / "wrong")
    with pytest.raises(AssertionError, match="batch"):
        run("deepspeed_reads", [str(folder / "wrong" / deepspeed.FILE), str(experiment.dp * 2)], OWN_DEEPSPEED)


@cache
def accelerate_reads(folder: Path) -> dict[str, Any]:
    for name, experiment in TRANSFORMERS.items():
        write_config(engine_config(experiment, "transformers"), folder / "transformers" / name)
    read = run("accelerate_reads", [str(folder / "transformers" / name) for name in TRANSFORMERS])
    return dict(zip(TRANSFORMERS, read, strict=True))


@needs("transformers", "accelerate")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_accelerate_and_transformers_take_every_value(name: str, folder: Path) -> None:
    e = TRANSFORMERS[name]
    read = accelerate_reads(folder)[name]
    found = read[transformers.FILE]
    environment = found["environment"]
    assert found["processes"] == e.world_size
    assert environment["ACCELERATE_MIXED_PRECISION"] == e.precision
    assert environment.get("ACCELERATE_USE_FSDP", "false") == str(e.zero_stage > 0).lower()
    assert found["compiled"] == (["INDUCTOR", True] if e.compile == "block" else ["NO", False])
    if e.zero_stage:
        assert found["fsdp"] == [2, e.zero_stage == 3, e.recompute == "full"]
    if e.dp_replicate > 1 and e.zero_stage:
        assert found["mesh"] == [e.dp_replicate, e.dp_shard]
    if e.zero_stage and e.dp_replicate == 1:
        environment = read[transformers.DEEPSPEED_FILE]["environment"]
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(e.zero_stage)
        assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == str(e.num_microbatches)
        assert environment["ACCELERATE_GRADIENT_CLIPPING"] == "1.0"
    written = transformers.model_config(e)
    assert {key: read["model"][key] for key in written} == written
    assert read["parameters"] == num_params(e.model)
    classes = {"llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
    assert read["class"] == f"{classes[written['model_type']]}ForCausalLM"


@needs("transformers", "accelerate")
def test_the_script_for_accelerate_trains(tmp_path: Path) -> None:
    e = layout("tiny", seq_len=32, micro_batch_size=2, global_batch_size=4, precision="fp32", recompute="full")
    write_config(engine_config(e, "transformers"), tmp_path)
    command = [sys.executable, "-m", f"{__package__}.accelerate_reads", "--run", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 2 and all(4 < loss < 9 for loss in losses)
