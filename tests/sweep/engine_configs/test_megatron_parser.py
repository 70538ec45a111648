"""What is exported for Megatron, read by its own command line where `packages` has installed it: ten chosen layouts and
ten drawn from the grids, and every refusal."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sweep.composing.config import compose_sweep
from sweep.engine_configs import megatron
from sweep.engine_configs.export import engine_config
from sweep.grids.expand import expand_all
from tests.sampling import SEED
from tests.sweep.engine_configs.layouts import LAYOUTS, OWN_SHAPES, REFUSED, layout
from tests.sweep.engine_configs.megatron_reads import TRANSFORMER_ENGINE, VERSION, flags_in, folder
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import experiment_layers
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import numbers_of
from workloads.spec.pipeline_stages import written_stages

ROOT = Path(__file__).resolve().parents[3]
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
GRIDS = ("half_node", "half_node_experts", "qwen3_30b_a3b_64gpu", "deepseek_v3_2048gpu", "long_context")
KINDS: Mapping[str, Callable[[Experiment], bool]] = {
    "dense": lambda e: e.model.moe is None and e.zero_stage == 1,
    "experts": lambda e: e.model.moe is not None and e.model.mla is None,
    "tp": lambda e: e.tp > 1,
    "interleaved": lambda e: e.virtual_stages > 1,
    "cp": lambda e: e.cp > 1,
    "ep": lambda e: e.ep > 1,
    "fp8": lambda e: e.precision.startswith("fp8"),
    "full": lambda e: e.recompute == "full",
    "selective": lambda e: e.recompute not in ("none", "full"),
    "fsdp": lambda e: e.zero_stage >= 2,
}
MORE = {
    "1B replicated tp": layout("llama1b", dp=2, tp=2, global_batch_size=8),
    "1B fp32": layout("llama1b", dp=4, zero_stage=1, precision="fp32", global_batch_size=8),
    "1B fp16": layout("llama1b", dp=4, zero_stage=1, precision="fp16", global_batch_size=8),
    "odd micro-batches": layout(
        "llama8b", pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, pp_split="even", global_batch_size=5
    ),
    "written stages": layout("llama8b", pp=4, pp_stages="Et*7|(t*9|)*2t*7L", global_batch_size=8),
    "written virtual stages": layout(
        "llama8b",
        pp=2,
        pp_schedule="interleaved_1f1b",
        virtual_stages=2,
        global_batch_size=8,
        pp_stages="Et*6|t*9|t*10|t*7L",
    ),
    "padded, ends count": layout("llama8b", tp=2, pp=4, pp_split="ends_count", pad_vocab_to=4096, global_batch_size=8),
    "8B hsdp of optimizers": layout("llama8b", dp_replicate=2, dp_shard=2, zero_stage=1, global_batch_size=8),
    "8B half on the host": layout("llama8b", dp=4, zero_stage=1, optimizer_offload=0.5, global_batch_size=8),
    "8B activations on the host": layout(
        "llama8b", tp=2, dp=2, zero_stage=1, activation_offload="input+qkv+rope+attention", global_batch_size=8
    ),
    "8B fp8 in blocks": layout("llama8b", dp=4, zero_stage=2, precision="fp8_blockwise", global_batch_size=8),
    "V3 with a module": layout("deepseek_v3", modules=1, dp=8, zero_stage=1, pp=4, ep=8, global_batch_size=32),
    "8B with two modules": layout("llama8b", modules=2, dp=4, zero_stage=1, global_batch_size=8),
    "written modules": layout("llama8b", modules=2, pp=2, pp_stages="Et*20|t*12mmL", zero_stage=1, global_batch_size=8),
    "experts dropped": layout("mixtral_8x7b", dp=4, zero_stage=1, ep=2, capacity_factor=1.5, global_batch_size=8),
}
OF_OPTIMIZERS = {
    "sgd": layout("llama1b", dp=2, zero_stage=1, global_batch_size=8, optimizer="sgd"),
    "muon": layout("llama1b", dp=2, tp=2, zero_stage=0, global_batch_size=8, optimizer="muon"),
    "muon, sharded": layout("llama1b", dp=4, zero_stage=1, global_batch_size=8, optimizer="muon"),
}
CHOSEN = {name: e for name, e in {**LAYOUTS, **OWN_SHAPES, **MORE}.items() if name not in REFUSED["megatron"]}
CHOSEN |= OF_OPTIMIZERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.drawn(one_in=1, whole=True),
    pytest.mark.skipif(
        not folder().is_dir() or importlib.util.find_spec("triton") is None,
        reason=f"megatron-core {VERSION} or triton not installed ({__package__}/packages)",
    ),
]


@cache
def drawn() -> dict[str, Experiment]:
    """One exported layout of each of ten kinds, drawn by the seed from points of the grids."""
    points = []
    for grid in GRIDS:
        config = compose_sweep([f"+grid={grid}"])
        points += [point.experiment for point in expand_all(config.grids, config.models.__getitem__).points]
    order = random.Random(SEED).sample(points, len(points))
    exported = (e for e in order if not megatron.export(e, e.id)[0].refusals)
    wanted = dict(KINDS)
    found: dict[str, Experiment] = {}
    for e in exported:
        if kind := next((name for name, has in wanted.items() if has(e)), None):
            del wanted[kind]
            found[f"{kind}: {e.id}"] = e
            if not wanted:
                break
    return found


def job(e: Experiment, flags: Mapping[str, str | None] | None = None, shell: str | None = None) -> dict[str, Any]:
    """The exported command, with some flags replaced, in a shell with this value of `QUEUES`."""
    config = engine_config(e, "megatron")
    environment = {"WORLD_SIZE": str(e.world_size), QUEUES: shell}
    environment |= dict(re.findall(r"(\w+)=(\S+) (?=.*torchrun)", config.start))
    environment |= dict.fromkeys(re.findall(r"env -u (\w+) .*torchrun", config.start))
    words = flags_in(config.files[megatron.FILE])
    for name, value in (flags or {}).items():
        if name in words:
            start = words.index(name)
            end = next((n for n in range(start + 1, len(words)) if words[n].startswith("--")), len(words))
            del words[start:end]
        words += [] if value is None else [name, *value.split()]
    return {"words": words, "environment": environment}


DENSE = layout("llama8b", dp=4, zero_stage=1, global_batch_size=8)
EXPERTS = layout("qwen3_30b_a3b", dp=4, zero_stage=1, ep=2, global_batch_size=8, routing="learned")
LATENT = layout("deepseek_v2_lite", dp=4, zero_stage=1, ep=2, global_batch_size=8)
TENSOR = layout("llama8b", dp=2, zero_stage=1, tp=2, global_batch_size=8)
CONTEXT = layout("llama8b", dp=2, zero_stage=1, cp=2, global_batch_size=8)
FULLY_SHARDED = layout("llama8b", dp=4, zero_stage=3, tp=2, global_batch_size=8)
WRONG: Mapping[str, tuple[Experiment, Mapping[str, str | None], str]] = {
    "fp8_rowwise": (DENSE, {"--fp8-format": "hybrid", "--fp8-recipe": "rowwise"}, r"--fp8-recipe: invalid choice"),
    "a fraction in rope_theta": (DENSE, {"--rotary-base": "500000.25"}, r"--rotary-base: invalid int value"),
    "every second layer": (
        DENSE,
        {"--recompute-granularity": "full", "--recompute-method": "every", "--recompute-num-layers": "2"},
        r"--recompute-method: invalid choice",
    ),
    **{
        f"recompute {name}": (
            DENSE,
            {"--recompute-granularity": "selective", "--recompute-modules": name},
            r"Invalid choices for recompute_modules",
        )
        for name in ("rope", "swiglu")
    },
    "one expert, normalized": (
        EXPERTS,
        {"--moe-router-topk": "1", "--moe-router-pre-softmax": None},
        r"Please use --moe-router-pre-softmax when topk is 1",
    ),
    "bias with softmax": (
        EXPERTS,
        {"--moe-router-score-function": "softmax", "--moe-router-enable-expert-bias": ""},
        r"Expert bias .* only supports 'sigmoid'",
    ),
    # What is written where it could be left out.
    "rotation of latents, fused": (
        LATENT,
        {"--no-rope-fusion": None},
        r"apply_rope_fusion for MLA only works with YARN",
    ),
    "the other fused loss": (DENSE, {"--cross-entropy-fusion-impl": "te"}, r"disabled due to stability issues"),
    "FSDP in another format": (FULLY_SHARDED, {"--ckpt-format": "torch_dist"}, r"requires the `fsdp_dtensor`"),
}


@cache
def read() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What Megatron does beyond its command line, and what it made of every job: one process for all."""
    jobs = {name: job(e) for name, e in {**CHOSEN, **drawn()}.items()}
    jobs |= {f"wrong: {name}": job(e, flags) for name, (e, flags, _) in WRONG.items()}
    queues = {"tp": TENSOR, "cp": CONTEXT, "fsdp": FULLY_SHARDED}
    unset, one = {"WORLD_SIZE": "8", QUEUES: None}, {"WORLD_SIZE": "8", QUEUES: "1"}
    jobs |= {f"queues: {name}": {**job(e), "environment": unset} for name, e in queues.items()}
    jobs["queues: fsdp, one"] = {**job(FULLY_SHARDED), "environment": one}
    jobs["queues: fsdp, exported"] = job(FULLY_SHARDED, shell="1")
    jobs["queues: tp, exported"] = job(TENSOR, shell="8")
    return run(jobs)


def run(jobs: Mapping[str, dict[str, Any]], *options: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.sweep.engine_configs.megatron_reads", "/dev/stdin", *options]
    text = json.dumps(list(jobs.values()))
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    facts, *found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return facts, dict(zip(jobs, found, strict=True))


def expected(e: Experiment) -> dict[str, Any]:
    """What the layout means, by the names of Megatron's arguments and configuration."""
    m = numbers_of(e.model)
    assert m is not None
    dtype = {"fp16": "torch.float16", "fp32": "torch.float32"}.get(e.precision, "torch.bfloat16")
    found: dict[str, Any] = {
        "world_size": e.world_size,
        "data_parallel_size": e.dp,
        "tensor_model_parallel_size": e.tp,
        "context_parallel_size": e.cp,
        "pipeline_model_parallel_size": e.pp,
        "virtual_pipeline_model_parallel_size": e.virtual_stages if e.virtual_stages > 1 else None,
        "expert_model_parallel_size": e.ep,
        "micro_batch_size": e.micro_batch_size,
        "global_batch_size": e.global_batch_size,
        "seq_length": e.seq_len,
        "sequence_parallel": e.tp > 1 and e.sequence_parallel,
        "use_distributed_optimizer": e.zero_stage > 0,
        "use_megatron_fsdp": e.zero_stage >= 2,
        "overlap_grad_reduce": e.dp > 1 or e.zero_stage > 0,
        "params_dtype": dtype,
        "fp8": "hybrid" if e.precision.startswith("fp8") else None,
        "recompute_granularity": {"none": None, "full": "full"}.get(e.recompute, "selective"),
        "transformer_impl": "transformer_engine",
        "cross_entropy_loss_fusion": True,
        "apply_rope_fusion": m.mla is None,
        "bias_activation_fusion": True,
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "ffn_hidden_size": m.ffn_hidden_size,
        "num_attention_heads": m.num_heads,
        "layernorm_epsilon": m.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not m.tie_embeddings,
        "qk_layernorm": m.qk_norm or m.mla is not None,
        "rotary_base": m.rope_theta,
        "attention_dropout": 0,
        "hidden_dropout": 0,
    }
    if e.precision.startswith("fp8"):
        found["fp8_recipe"] = e.precision.removeprefix("fp8_")
    if e.zero_stage >= 2:
        found["data_parallel_sharding_strategy"] = {2: "optim_grads", 3: "optim_grads_params"}[e.zero_stage]
    found["optimizer"] = {"adamw": "adam"}.get(e.optimizer, e.optimizer)
    if e.optimizer == "muon":
        # Emerging optimizers are layer-wise where others are distributed.
        found |= {"use_distributed_optimizer": False, "muon_momentum": 0.95, "muon_nesterov": True}
        found |= {"use_layer_wise_distributed_optimizer": e.zero_stage > 0, "muon_extra_scale_factor": 0.2}
    if e.zero_stage > 0:
        found["num_distributed_optimizer_instances"] = e.dp_replicate
    if m.mla is None:
        found |= {"num_query_groups": m.num_kv_heads, "kv_channels": m.head_dim}
    else:
        found |= {"kv_lora_rank": m.mla.kv_lora_rank, "v_head_dim": m.mla.v_head_dim, "rope_type": "rope"}
        found |= {"qk_head_dim": m.mla.qk_nope_head_dim, "qk_pos_emb_head_dim": m.mla.qk_rope_head_dim}
    if (moe := m.moe) is not None:
        found |= {"num_moe_experts": moe.num_experts, "moe_router_topk": moe.experts_per_token}
        found |= {"moe_ffn_hidden_size": moe.expert_hidden_size, "moe_router_score_function": moe.gate}
        found |= {"expert_tensor_parallel_size": e.etp, "moe_grouped_gemm": True, "moe_permute_fusion": True}
        found |= {"moe_expert_capacity_factor": e.capacity_factor}
        found |= {"moe_router_force_load_balancing": e.routing == "balanced"}
    found["mtp_num_layers"] = e.model.mtp_modules or None
    if e.model.mtp_modules:
        found["mtp_loss_scaling_factor"] = e.model.mtp_loss_weight
    return found


def check(e: Experiment, read: dict[str, Any]) -> None:
    assert "refused" not in read, read
    values = {**read["args"], **read["config"]}
    wanted = expected(e)
    assert {name: values[name] for name in wanted} == wanted
    # Its own numbers of micro-batches and of rows in the embedding.
    assert (read["microbatches"], read["vocabulary"]) == (e.num_microbatches, as_held(e).model.vocab_size)
    stages = experiment_layers(e)
    if (text := read["args"]["pipeline_model_parallel_layout"]) is not None:
        written = written_stages(str(text))
        assert list(written.with_modules) == [len(layers) for layers in stages]
        assert written.multi_token_modules == e.model.mtp_modules
    else:
        assert len({len(layers) for layers in stages}) == 1


@pytest.mark.parametrize("name", CHOSEN)
def test_it_takes_chosen_layouts(name: str) -> None:
    check(CHOSEN[name], read()[1][name])


def test_it_takes_ten_layouts_drawn_from_the_grids() -> None:
    assert len(drawn()) == len(KINDS) == 10
    for name, e in drawn().items():
        try:
            check(e, read()[1][name])
        except AssertionError as error:
            raise AssertionError(f"{name}, TESTS_SEED={SEED}") from error


@pytest.mark.parametrize("name", WRONG)
def test_it_refuses_what_is_not_written(name: str) -> None:
    assert re.search(WRONG[name][2], read()[1][f"wrong: {name}"]["refused"])


def test_queues_of_kernels_are_as_it_asserts() -> None:
    """One for tp and cp, several for FSDP, whatever the user's shell has."""
    found = read()[1]
    for name in ("tp", "cp"):
        assert f"setting the environment variable {QUEUES} to 1" in found[f"queues: {name}"]["refused"]
    assert f"FSDP requires {QUEUES} > 1 or unset" in found["queues: fsdp, one"]["refused"]
    for name in ("fsdp", "fsdp, exported", "tp, exported"):
        assert "refused" not in found[f"queues: {name}"]
    assert QUEUES not in engine_config(DENSE, "megatron").start


def test_it_has_no_counterpart_of_what_is_refused() -> None:
    """Schedules, fp64, compilation, a load with an imbalance: no option names any of them."""
    options = read()[0]["options"]
    absent = re.compile(r"bubble|gpipe|dualpipe|fp64|torch-compile|imbalance")
    assert not [option for option in options if absent.search(option)]
    forced = {option for option in options if option.startswith("--moe-router-force")}
    assert forced == {"--moe-router-force-load-balancing", "--moe-router-force-biased"}


def test_sums_of_weights_are_those_that_the_export_assumes() -> None:
    """Sigmoid weights of several experts are always divided by their sum, of one never; softmax as it is asked for."""
    sums = read()[0]["sums"]
    assert sums["sigmoid 2 False"] == sums["sigmoid 2 True"] == 1.0 and sums["sigmoid 1 False"] < 1.0
    assert sums["softmax 2 False"] == 1.0 and sums["softmax 2 True"] < 1.0 and sums["softmax 1 True"] < 1.0
    assert EXPERTS.model.moe is not None
    for gate, count, normalize in ((g, k, n) for g in ("softmax", "sigmoid") for k in (1, 2) for n in (True, False)):
        moe = dataclasses.replace(EXPERTS.model.moe, gate=gate, experts_per_token=count, normalize_weights=normalize)
        e = EXPERTS.replace(model=dataclasses.replace(EXPERTS.model, moe=moe))
        draft, _ = megatron.export(e, "x")
        refused = [text.partition("=")[0] for text in draft.refusals]
        takes = sums[f"{gate} {count} {'moe-router-pre-softmax' in draft.options}"] == 1.0
        divided = takes == normalize and not (gate == "softmax" and count == 1 and normalize)  # it refuses that
        assert refused == ([] if divided else ["model.moe.normalize_weights"])


def test_what_its_layers_and_schedules_refuse_is_refused() -> None:
    facts = read()[0]
    assert "without also enabling sequence parallelism" in facts["experts with tp alone"]
    alone = layout("mixtral_8x7b", dp=2, zero_stage=1, tp=2, sequence_parallel=False, global_batch_size=8)
    assert [text.partition("=")[0] for text in megatron.export(alone, "x")[0].refusals] == ["sequence_parallel"]
    schedules = facts["interleaved"]
    assert "should range in [PP=2 , M=1]" in schedules["1 in 2"] and "bubbles" in schedules["5 in 2"]
    assert not any("ValueError" in schedules[ok] or "RuntimeError" in schedules[ok] for ok in ("5 in 3", "4 in 2"))
    odd = MORE["odd micro-batches"]
    assert megatron.export(odd, "x")[0].options["microbatch-group-size-per-virtual-pipeline-stage"] == 3
    few, _ = megatron.export(odd.replace(global_batch_size=1), "x")
    assert [text.partition("=")[0] for text in few.refusals] == ["global_batch_size"]


def test_without_transformer_engine_it_takes_the_flags_of_the_note() -> None:
    fused = ("--no-rope-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion")
    local = {"--transformer-impl": "local", **dict.fromkeys(fused, "")}
    assert " ".join(" ".join(pair).strip() for pair in local.items()) == megatron.LOCAL
    experts = {**local, "--moe-permute-fusion": None, "--moe-router-fusion": None}
    routed = layout("mixtral_8x7b", dp=4, zero_stage=1, ep=2, global_batch_size=8)
    jobs = {"as exported": job(DENSE), "local": job(DENSE, local), "local experts": job(routed, experts)}
    facts, found = run(jobs, "--alone")
    assert "apply_rope_fusion is not available" in found["as exported"]["refused"]
    for name in ("local", "local experts"):
        assert "refused" not in found[name] and found[name]["config"]["transformer_impl"] == "local"
    for e, flags in ((DENSE, megatron.LOCAL), (routed, "none of --moe-permute-fusion, --moe-router-fusion")):
        assert any(note.startswith("without Transformer Engine") and flags in note for note in notes(e))
    # Its own layers do without sequence parallelism, context parallelism and fp8.
    assert "sequence parallel not supported" in facts["local norm"]["sequence_parallel"]
    assert "persist_layer_norm not supported" in facts["local norm"]["persist_layer_norm"]
    assert not facts["local norm"][""]
    assert "scaled_masked_softmax_cuda" in facts["local softmax"]["True"] and not facts["local softmax"]["False"]
    assert "Context parallelism is only supported by TEDotProductAttention" in facts["local attention with cp"]
    assert "it needs Transformer Engine: sequence_parallel" in notes(TENSOR)
    assert "it needs Transformer Engine: cp" in notes(CONTEXT)


def notes(e: Experiment) -> tuple[str, ...]:
    return engine_config(e, "megatron").notes


def test_versions_are_those_of_the_target() -> None:
    assert megatron.TARGET.version.endswith(VERSION)
    assert TRANSFORMER_ENGINE == "2.11.0"  # the newest that CUDA 13.0 runs
