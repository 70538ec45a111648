"""The words in a table's cells: what ``predict`` takes them for, what it refuses, and what it says it has assumed."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from sweep.predicting.codebases import read_clusters
from sweep.predicting.predict_table import OUT
from tests.sweep.predicting.predicted import EXPERTS, one
from workloads.predict.cells.words import recomputed_of, zero_of
from workloads.predict.hardware import cluster_of


@pytest.mark.parametrize("code", ["ultrasweep", "nanotron"])
def test_a_word_says_how_many_layers_recompute(code: str) -> None:
    kinds = ("none", "full.every4", "full.every2", "full")
    found = [one(codebase=code, recompute=kind) for kind in kinds]
    times, peaks = ([of[name] for of in found] for name in ("step_time_s", "predicted_peak_allocated_bytes"))
    assert times == sorted(set(times)) and peaks == sorted(set(peaks), reverse=True)
    if code == "nanotron":  # of our engine, whole layers
        assert peaks[2] == pytest.approx((peaks[0] + peaks[3]) / 2, rel=0.1)


def test_a_word_says_what_the_host_does_again() -> None:
    small = {
        "hidden": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 1024,
        "mbs": 1,
        "gbs_seqs": 8,
        "grad_accum": 1,
        "seq": 512,
    }
    kinds = ("none", "norm.every2", "norm", "norm+rope", "selective")
    times = [one(**small, recompute=kind)["step_time_s"] for kind in kinds]
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sharding": "zero9"}, "sharding 'zero9' is not known; known: zero0 to zero3"),
        ({"sharding": "fsdp=1"}, "sharding 'fsdp=1' is not known"),  # a switch or a degree
        ({"sharding": "no zero3"}, "sharding 'no zero3' is not known"),
        ({"recompute": "most"}, "recompute 'most' is not known; known: none, selective, full"),
        ({"recompute": "not full"}, "recompute 'not full' is not known"),
        ({"recompute": "full.every0"}, "recompute 'full.every0' is not known"),
        ({"precision": "int4"}, "precision 'int4' is not known; known: bf16"),
        ({"precision": "fp4", "gpu": "B200"}, "precision 'fp4': of 4 bits only nvfp4 has known rates"),
        ({"precision": "bf16 + mxfp4", "gpu": "B200"}, "of 4 bits only nvfp4 has known rates"),
        ({"precision": "nvfp4", "gpu": "H200"}, "gpu 'H200' has no rate for precision 'nvfp4'"),
        ({"precision": "mxfp8", "gpu": "H200"}, "gpu 'H200' has no rate for precision 'mxfp8'"),
        ({"attention_kernel": "warp"}, "attention_kernel 'warp' is not known; known: flash, flash2"),
        ({**EXPERTS, "routing": "skewed"}, "routing 'skewed' is not known; known: balanced, learned"),
        ({**EXPERTS, "dispatcher": "pigeon"}, "dispatcher 'pigeon' is not known; known: alltoall, deepep, hybridep"),
        ({"gated_mlp": "maybe"}, "gated_mlp = 'maybe' is neither true nor false"),
        ({"tie_embeddings": "perhaps"}, "tie_embeddings = 'perhaps' is neither true nor false"),
        ({"gpu": "GH200"}, "a GH200 has 96 or 144 GB; write GH200 96GB or GH200 144GB"),
        ({"gpu": "GH200 80GB"}, "an GH200 with 96 GB or 120 GB or 480 GB or 144 GB is described, none with 80 GB"),
        ({"gpu": "NVIDIA H20-3e"}, "'3e' is not known; known: H20 with a form"),
        ({"gpu": "NVIDIA L40"}, "gpu 'NVIDIA L40' is not known"),
        ({"gpu": "AMD Instinct MI300A"}, "gpu 'AMD Instinct MI300A' is not known"),
        ({"gpu": "H100 PCIe"}, "cards for PCIe have lower rates"),
        ({"gpu": "H200 NVL"}, "NVL cards have other rates"),
        ({"gpu": "H100 96GB"}, "an H100 with 80 GB is described, none with 96 GB"),
        ({"gpu": "H1000"}, "gpu 'H1000' is not known"),
        ({"gpu": "H100 turbo"}, "gpu 'H100 turbo': 'turbo' is not known"),
    ],
)
def test_a_word_that_is_not_understood_refuses_its_row(changes: dict[str, Any], said: str) -> None:
    found = one(**changes)
    assert said in found["reason"]
    assert found[list(OUT[:-1])].isna().all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": ""}, "precision not given: 16 bits"),
        ({"precision": "fp8?"}, "precision 'fp8?' is not certain: taken as fp8"),
        ({"sharding": None, "codebase": "megatron"}, "sharding not given: zero"),
        ({"sharding": "hsdp"}, "sharding 'hsdp': taken as zero3 over all data-parallel ranks"),
        ({"tie_embeddings": ""}, "tie_embeddings not given: false"),
        ({"kv_heads": None}, "kv_heads not given: 32, as many as heads"),
        ({"codebase": None}, "codebase not given"),
        ({"vpp": 2}, "vpp 2 without a pipeline: taken as 1"),
        ({"allreduce_gb_s": "fast"}, "allreduce_gb_s = 'fast' is not a number above 0: ignored"),
        ({"codebase": "megatron"}, "gated_mlp not given: true, since kv_heads < heads"),
        ({"codebase": "megatron", "kv_heads": 32, "ffn": 16384}, "gated_mlp not given: false, since ffn is 4 x hidden"),
        ({"gpu": "AMD Instinct MI300X OAM"}, "AMD Instinct MI300X: products at 0.43 of peak, 0.68 on H200"),
        ({"gpu": "GH200", "cluster": "h200"}, "gpu 'GH200': taken as the NVIDIA H200 of cluster h200"),
        ({"power_w": 900}, "power_w 900: ignored, above the usual 700 W"),
        ({"attention_kernel": "flash2", "gpu": "B200"}, "its rate on NVIDIA B200 is not known, that of flash is taken"),
        (
            {"gpu": "H100", "gpus": 16, "dp": 16},
            "cluster not given: h100_ib400, 50 GB/s a device between nodes (h100_efa has 22.5)",
        ),
        ({**EXPERTS, "ep": 8}, "shared_experts not given: 0; dense_layers not given: 0"),
    ],
)
def test_what_a_row_does_not_say_is_said(changes: dict[str, Any], said: str) -> None:
    found = one(**changes)
    assert said in found["reason"] and found["step_time_s"] > 0
    assert pd.isna(one()["reason"])


NAMES = {
    "h200": "h200, NVIDIA H200, NVIDIA-H200 SXM, NVIDIA H200 141GB HBM3e",
    "h20": "H20, NVIDIA H20, H20 96GB",
    "h100_ib400": "H100, NVIDIA H100 80GB HBM3, HGX H100",
    "h800": "H800, NVIDIA H800, NVIDIA H800 80GB",
    "a100_80gb": "A100, NVIDIA A100-SXM4-80GB, A100-SXM4-80GB (see note)",
    "a100_40gb": "NVIDIA A100-SXM4-40GB",
    "a800_80gb": "A800, NVIDIA A800-SXM4-80GB",
    "gh200_96gb": "GH200 96GB, NVIDIA GH200 480GB, NVIDIA GH200 120GB, GH200 120GB",
    "gh200_144gb": "GH200 144GB, NVIDIA GH200 144G HBM3e",
    "l40s": "L40S, NVIDIA L40S",
    "b200": "B200, NVIDIA B200",
    "b300": "B300, NVIDIA B300 SXM6 AC",
    "gb200": "GB200, NVIDIA GB200, GB200 NVL72",
    "gb300": "GB300, NVIDIA GB300",
    "mi300x": "MI300X, AMD Instinct MI300X, AMD Instinct MI300X OAM",
    "mi325x": "MI325X, AMD Instinct MI325X, AMD Instinct MI325 OAM",
    "mi355x": "MI355X, AMD Instinct MI355X, AMD Instinct MI355X 288GB HBM3e, AMD Instinct MI355 OAM",
}
"""Names that nvidia-smi, torch on ROCm, Slurm and published tables use, by the cluster that describes them."""


def test_a_name_is_one_device_by_whole_words() -> None:
    clusters = read_clusters()
    found = {name: cluster_of(name, "", clusters, []).name for names in NAMES.values() for name in names.split(", ")}
    assert found == {name: cluster for cluster, names in NAMES.items() for name in names.split(", ")}
    devices = {clusters[cluster].device.name for cluster in NAMES}
    assert devices == {cluster.device.name for cluster in clusters.values() if cluster.backend != "cpu"}


def test_whole_words_of_sharding_and_recomputation() -> None:
    """``fsdp=0`` and ``no fsdp`` hold the word fsdp and mean that there is none."""
    stages = {
        0: ("zero0", "none", "ddp", "distributed data parallel", "fsdp=0", "no fsdp", "fsdp: off", "no_shard", "0"),
        1: ("zero-1", "ZeRO: 1", "distributed optimizer", "dist_opt", "1"),
        2: ("ZeRO stage 2", "shard_grad_op", "fsdp (zero2)"),
        3: ("zero3", "fsdp", "FSDP2", "fsdp=8", "full_shard", "3.0"),
    }
    note: list[str] = []
    for stage, cells in stages.items():
        assert {zero_of(cell, 0, note) for cell in cells} == {stage}, stage
    kinds = {
        0: ("none", "no checkpointing", "off", "0"),
        1: ("selective", "norm+swiglu", "selective (core_attn, moe_act)", "selective+mla_up+experts"),
        2: ("full", "full.every2", "True", "activation checkpointing", "block"),
    }
    for kind, cells in kinds.items():
        assert {recomputed_of(cell, note).kind for cell in cells} == {kind}, kind
    assert note == []


@pytest.mark.slow
def test_columns_say_what_the_profile_of_a_code_base_would_guess() -> None:
    def time(**changes: Any) -> float:
        return float(one(**{"codebase": "megatron", "gpu": "H100", **changes})["step_time_s"])

    assert time(gated_mlp=False) < 0.9 * time() == pytest.approx(0.9 * time(gated_mlp="yes"))
    long = {"seq": 32768, "mbs": 1}
    newest, second, stored = (time(**long, attention_kernel=kernel) for kernel in ("cudnn", "FA2", "eager"))
    assert newest < second < stored
    assert time(power_w=700) == time() < time(power_w=350) < 1.3 * time()
    wide = {"gpu": None, "gpus": 64, "dp": 8, "tp": 8, "sharding": "zero2"}
    assert time(**wide, cluster="h100_ib400") < time(**wide, cluster="h100_efa")
    linked = {"tp": 8, "dp": 1}
    assert time(**linked, gpu="H800") > 1.05 * time(**linked, gpu="H100")
    assert time(gpu="H20") > 5 * time()


def test_products_that_add_gradients_are_a_column() -> None:
    """They take 0.3 of the time; fp8 products cannot add; Megatron-LM's do by default."""
    apart, added, unsaid = (
        float(one(gradient_accumulation_fusion=said)["step_time_s"]) for said in ("false", "true", "")
    )
    assert apart == unsaid and 0.97 * apart < added < 0.99 * apart
    low = {"precision": "fp8", "gradient_accumulation_fusion": "true"}
    assert one(**low)["step_time_s"] == one(precision="fp8")["step_time_s"]
    theirs = {"codebase": "megatron", "gpu": "H100"}
    assert one(**theirs, gradient_accumulation_fusion="no")["step_time_s"] > 1.02 * one(**theirs)["step_time_s"]
    assert one(**theirs, gradient_accumulation_fusion="yes")["step_time_s"] == one(**theirs)["step_time_s"]


def test_sequence_parallelism_is_a_column_or_a_word_beside_recomputation() -> None:
    """Without it norms and residuals are whole on every rank: 10 of the values that a layer moves a token and hidden
    unit, and 4 of the 7 that Megatron's keeps."""

    def found(**changes: Any) -> pd.Series[Any]:
        return one(**{"codebase": "megatron", "tp": 8, "dp": 1, "sharding": "zero1", "recompute": "full", **changes})

    whole, split = found(sequence_parallel="false"), found(sequence_parallel="yes")
    assert split["step_time_s"] == found()["step_time_s"] < whole["step_time_s"] < 1.2 * split["step_time_s"]
    assert found(recompute="full recompute, no SP")["step_time_s"] == whole["step_time_s"]
    assert found(recompute="full + SP")["step_time_s"] == split["step_time_s"]
    kept = {"recompute": "none"}
    more, less = (found(**kept, sequence_parallel=said)["predicted_peak_allocated_bytes"] for said in ("false", "true"))
    tokens, hidden, layers = 2 * 4096, 4096, 32
    assert more - less == pytest.approx(2 * 4 * (1 - 1 / 8) * tokens * hidden * layers, rel=1e-6)
    alone = {"tp": 1, "dp": 8}
    assert found(**alone, sequence_parallel="false")["step_time_s"] == found(**alone)["step_time_s"]
    refused = found(recompute="full, no SP", sequence_parallel="true")
    assert refused["reason"] == "sequence_parallel is true, but recompute is 'full, no SP'"


@pytest.mark.parametrize(
    ("changes", "reading", "covers"),
    [
        ({"precision": "fp8?"}, {"precision": "bf16"}, "precision bf16"),
        (
            {"codebase": "megatron", "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192},
            {"gated_mlp": "false"},
            "gated_mlp false",
        ),
        ({**EXPERTS, "ep": 8, "layers": 4}, {"dense_layers": 3}, "dense_layers 3"),
        (
            {"gpu": "H100", "gpus": 64, "dp": 8, "tp": 8, "sharding": "zero2"},
            {"cluster": "h100_efa"},
            "cluster h100_efa",
        ),
    ],
)
def test_an_interval_covers_what_a_row_leaves_open(
    changes: dict[str, Any], reading: dict[str, Any], covers: str
) -> None:
    found, other = one(**changes), one(**{**changes, **reading})
    assert f"the interval also covers {covers}" in found["reason"]
    low, high = found["step_time_low_s"], found["step_time_high_s"]
    assert low <= other["step_time_low_s"] and high >= other["step_time_high_s"]
    alone = found["step_time_s"] ** 2  # an interval of one reading is even in the logarithm, one of two is wider
    assert low * high != pytest.approx(alone, rel=1e-6)
