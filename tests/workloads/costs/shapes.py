"""Model shapes, clusters and the study's table, for the cost tests."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec

STUDY = Path(__file__).resolve().parents[4] / "shared" / "study" / "bench_final2_mfu2.csv"
STUDY_FFN = {2048: 8192, 3072: 8192, 4096: 14336, 8192: 28672, 16384: 53248}

LLAMA_8B = ModelSpec(
    name="llama8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=14336,
    vocab_size=128256,
)
LLAMA_1B = ModelSpec(
    name="llama1b",
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=8192,
    vocab_size=128256,
    tie_embeddings=True,
)
LLAMA_70B = ModelSpec(
    name="llama70b",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=28672,
    vocab_size=128256,
)
MIXTRAL = ModelSpec(
    name="mixtral",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=14336,
    vocab_size=32000,
    moe=MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=14336),
)
QWEN3_14B = ModelSpec(
    name="qwen3_14b",
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=17408,
    vocab_size=151936,
    qk_norm=True,
)
QWEN3_30B = ModelSpec(
    name="qwen3_30b_a3b",
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    ffn_hidden_size=6144,
    vocab_size=151936,
    qk_norm=True,
    moe=MoESpec(num_experts=128, experts_per_token=8, expert_hidden_size=768),
)
QWEN3_235B = ModelSpec(
    name="qwen3_235b_a22b",
    num_layers=94,
    hidden_size=4096,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    ffn_hidden_size=12288,
    vocab_size=151936,
    qk_norm=True,
    moe=MoESpec(num_experts=128, experts_per_token=8, expert_hidden_size=1536),
)
DEEPSEEK_V2_LITE = ModelSpec(
    name="deepseek_v2_lite",
    num_layers=27,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    ffn_hidden_size=10944,
    vocab_size=102400,
    moe=MoESpec(num_experts=64, experts_per_token=6, expert_hidden_size=1408, num_shared_experts=2, num_dense_layers=1),
    mla=MLASpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)
DEEPSEEK_V3 = ModelSpec(
    name="deepseek_v3",
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    ffn_hidden_size=18432,
    vocab_size=129280,
    moe=MoESpec(
        num_experts=256, experts_per_token=8, expert_hidden_size=2048, num_shared_experts=1, num_dense_layers=3
    ),
    mla=MLASpec(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)
TINY = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_hidden_size=16,
    vocab_size=32,
)

H200 = ClusterSpec(
    name="h200",
    backend="cuda",
    device=DeviceSpec(
        name="H200",
        memory_bytes=150_754_820_096,
        peak_flops={"bf16": 989e12, "fp8": 1979e12},
        memory_bandwidth=4.8e12,
    ),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=360e9, latency_s=4e-6),
    inter_node=LinkSpec(bandwidth=50e9, latency_s=5e-6),
    matmul_efficiency=0.68,
)
ONE_NODE = ClusterSpec(
    name="one_node",
    backend="cpu",
    device=DeviceSpec(name="cpu", memory_bytes=None),
    devices_per_node=8,
    intra_node=LinkSpec(bandwidth=1e9, latency_s=1e-5),
    inter_node=None,
)


def study_rows() -> list[dict[str, str]]:
    """Rows of the study's raw table; skips the test where the file is absent."""
    if not STUDY.exists():
        pytest.skip(f"the study's raw table is not at {STUDY}")
    with STUDY.open(newline="") as file:
        return list(csv.DictReader(file))


def study_experiment(row: dict[str, str]) -> Experiment:
    """A row of the study as an experiment, without recomputation."""
    hidden, heads = int(row["hidden_size"]), int(row["num_heads"])
    model = ModelSpec(
        name=row["num_params"],
        num_layers=int(row["num_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(float(row["num_kv_heads"] or heads)),
        head_dim=hidden // heads,
        ffn_hidden_size=STUDY_FFN[hidden],
        vocab_size=int(row["vocab_size"]),
        tie_embeddings=hidden <= 3072,
    )
    dp, micro_batch = int(row["dp"]), int(row["mbs"])
    return Experiment.canonical(
        model=model,
        dp=dp,
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        micro_batch_size=micro_batch,
        global_batch_size=round(dp * micro_batch * float(row["batch_accum"])),
        seq_len=int(row["seq_len"]),
        zero_stage=int(row["zero_stage"]),
        pp_split="even",
    )


WIDE = ModelSpec(
    name="wide",
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden_size=1536,
    vocab_size=1024,
)
"""Small, but wide enough that its matrices, not its vectors, decide what a step needs."""
