"""Layouts that others published, with what they measured: memory, verdicts and step times, nothing fitted."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from tests.sweep.predicting.predicted import one
from workloads.predict.cells.shapes import SHAPES

GIB = 2**30
LLAMA_70B = {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "tie_embeddings": False}
LLAMA_405B = {**LLAMA_70B, "hidden": 16384, "heads": 128, "ffn": 53248}
SIMUMAX = {"gpu": "B200", "gpus": 8, "mbs": 1, "grad_accum": 4, "codebase": "Megatron-LM 0.14", "sharding": "zero1"}
"""Megatron-LM on eight B200 (SimuMax, docs/b200)."""
MLPERF = {
    **LLAMA_405B, "gpu": "H100", "gpus": 512, "layers": 126, "seq": 8192, "mbs": 1, "grad_accum": 288, "dp": 4, "tp": 8,
    "pp": 8, "vpp": 8, "cp": 2, "precision": "fp8", "codebase": "NeMo 25.01", "sharding": "zero1", "vocab": 32768,
}  # fmt: skip
"""NVIDIA's Llama 3.1 405B on 512 H100 (MLPerf Training 5.0), which ran."""


@pytest.mark.parametrize(
    ("layout", "measured_gib"),
    [
        ({**LLAMA_70B, "layers": 12, "tp": 2, "dp": 4}, 60.68),
        ({**LLAMA_70B, "layers": 12, "pp": 2, "dp": 4}, 66.55),
        ({**LLAMA_405B, "layers": 4, "tp": 8, "dp": 1}, 38.57),
        ({**LLAMA_70B, "layers": 12, "seq": 131072, "tp": 2, "cp": 4, "dp": 1}, 112.67),
        ({**LLAMA_70B, "layers": 12, "seq": 131072, "cp": 8, "dp": 1}, 147.99),
    ],
)
def test_memory_of_megatron_follows_from_its_tensors(layout: dict[str, Any], measured_gib: float) -> None:
    found = one(**SIMUMAX, **layout)
    assert found["predicted_peak_allocated_bytes"] / GIB == pytest.approx(measured_gib, rel=0.05)
    assert found["fits"]


def test_a_run_that_ran_fits_with_gradients_and_inputs_as_its_recipe_keeps_them() -> None:
    assert one(**MLPERF)["fits"]
    assert not one(**{**MLPERF, "codebase": "megatron"})["fits"], "gradients in fp32 would not fit"
    peaks = [one(**{**MLPERF, "precision": kind})["predicted_peak_allocated_bytes"] for kind in ("fp8", "bf16")]
    assert peaks[0] < 0.95 * peaks[1], "inputs of products take a byte in fp8"


def test_more_chunks_hold_no_more_micro_batches_than_there_are() -> None:
    layout = {"gpus": 8, "layers": 32, "pp": 4, "dp": 2, "mbs": 1, "vocab": 1024, "codebase": "megatron"}
    few, many = (
        [one(**layout, grad_accum=m, vpp=v)["predicted_peak_allocated_bytes"] for v in (1, 8)] for m in (4, 32)
    )
    assert few[0] == few[1]
    assert many[0] < many[1]


@pytest.mark.parametrize(
    ("layout", "measured_s"),
    [
        ({**SIMUMAX, **LLAMA_70B, "layers": 12, "pp": 2, "dp": 4}, 0.843),
        ({**SIMUMAX, **LLAMA_70B, "layers": 12, "tp": 8, "dp": 1}, 0.2809),
        ({**SIMUMAX, **LLAMA_405B, "layers": 4, "tp": 2, "dp": 4}, 0.9073),
        ({**SIMUMAX, **LLAMA_70B, "layers": 12, "seq": 32768, "cp": 8, "dp": 1}, 1.7681),
        (MLPERF, 55.136),
        ({**MLPERF, "gpus": 8192, "dp": 64, "grad_accum": 24}, 5.1888),
        ({**MLPERF, "gpu": "GB200", "gpus": 512, "dp": 8, "tp": 4, "grad_accum": 112}, 19.4614),
    ],
)
def test_step_times_of_others(layout: dict[str, Any], measured_s: float) -> None:
    assert one(**layout)["step_time_s"] == pytest.approx(measured_s, rel=0.15)


DEEPSEEK = {
    "heads": 128, "kv_heads": 128, "layers": 4, "tie_embeddings": False, "grad_accum": 32, "dense_layers": None,
}  # fmt: skip
V2 = {
    **DEEPSEEK, "hidden": 5120, "ffn": 12288, "vocab": 102400, "num_experts": 160, "experts_per_token": 6,
    "expert_ffn": 1536, "shared_experts": 2,
}  # fmt: skip
V3 = {
    **DEEPSEEK, "hidden": 7168, "ffn": 18432, "vocab": 129280, "num_experts": 256, "experts_per_token": 8,
    "expert_ffn": 2048, "shared_experts": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "measured_s", "measured_gib"),
    [
        ({**V2, "dp": 8, "ep": 8}, 2.7213, 45.63),
        ({**V2, "dp": 4, "ep": 4, "pp": 2}, 1.7277, 44.7),
        ({**V3, "dp": 8, "ep": 8}, 4.1412, 104.3),
        ({**V3, "dp": 4, "ep": 4, "pp": 2}, 2.7186, 114.0),
    ],
)
def test_published_models_have_their_attention_and_first_layers(
    layout: dict[str, Any], measured_s: float, measured_gib: float
) -> None:
    found = one(**{**SIMUMAX, **layout})
    assert "attention of DeepSeek-V" in found["reason"] and "dense_layers not given: 1" in found["reason"]
    assert found["step_time_s"] == pytest.approx(measured_s, rel=0.1)
    assert found["predicted_peak_allocated_bytes"] / GIB == pytest.approx(measured_gib, rel=0.05)


def test_the_sizes_of_published_models_are_those_of_the_shipped_ones() -> None:
    found = {}
    for name in ("deepseek_v2_lite", "deepseek_v3", "qwen3_30b_a3b", "qwen3_235b_a22b"):
        m = ConfFolders().model(name)
        assert m.moe is not None
        shape = (m.hidden_size, m.num_heads, m.num_kv_heads, m.moe.num_experts, m.moe.expert_hidden_size, m.head_dim)
        found[(*shape, m.mla, m.moe.num_dense_layers)] = name
    assert found.keys() <= {tuple(one[1:9]) for one in SHAPES}


def test_the_size_of_a_head_is_a_column() -> None:
    def seconds(**changes: Any) -> float:
        return float(one(codebase="megatron", **changes)["step_time_s"])

    assert seconds() == seconds(head_dim=128) < seconds(head_dim=256)
    said = one(codebase="megatron", hidden=5120, heads=32, kv_heads=8)["reason"]
    assert "attention of Mistral-Nemo-12B, whose sizes the row has" in said


def test_a_token_crosses_once_to_each_node_where_the_dispatcher_does_so() -> None:
    """Of 8 copies over 2 nodes, 4 go to the other node, or one. On one node there is nothing to save."""
    qwen = {
        "gpu": "H100", "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "mbs": 1, "grad_accum": 64,
        "num_experts": 128, "experts_per_token": 8, "expert_ffn": 768, "shared_experts": 0, "dense_layers": 0,
        "sharding": "zero1",
    }  # fmt: skip
    wide, narrow = ({**qwen, "gpus": n, "dp": n, "ep": n} for n in (16, 8))
    ratios = [
        one(**layout, codebase="Megatron-Bridge")["step_time_s"] / one(**layout, codebase="Megatron-LM")["step_time_s"]
        for layout in (wide, narrow)
    ]
    assert ratios[0] < 0.8 * ratios[1]


def test_recipes_with_cuda_graphs_do_not_wait_for_the_host() -> None:
    """Of 512 tokens, layers of Megatron-LM take as long as the host needs to launch them."""
    small = {"gpu": "GB200", "gpus": 4, "dp": 4, "seq": 512, "mbs": 1, "grad_accum": 8}
    host, graph = (one(**small, codebase=code)["step_time_s"] for code in ("Megatron-LM", "NeMo"))
    assert graph < 0.6 * host


def test_a_ring_over_many_ranks_starts_within_milliseconds() -> None:
    """32 layers, reduced and gathered once each: (8 x 30 us + 504 hops of at most 8 us) x 64 is 0.3 s at most."""
    wide = {"gpu": "GB200", "seq": 8192, "mbs": 1, "grad_accum": 4, "codebase": "unheard of", "sharding": "zero1"}
    few, many = (one(**wide, gpus=ranks, dp=ranks)["step_time_s"] for ranks in (64, 512))
    assert few < many < few + 0.4


def test_messages_between_chunks_travel_beside_compute_where_the_code_base_overlaps_them() -> None:
    layout = {**MLPERF, "grad_accum": 16}
    chunks = [
        one(**{**layout, "codebase": code, "vpp": 8})["step_time_s"]
        - one(**{**layout, "codebase": code, "vpp": 4})["step_time_s"]
        for code in ("megatron", "unheard of")
    ]
    assert chunks[0] < chunks[1]
