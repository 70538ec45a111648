"""More tensor-parallel ranks than key and value heads: ranks hold copies of heads, and compute what the unsharded model
does, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.shapes import WIDE
from tests.workloads.engine.kind_models import ROPE, SQUARED, attention, gated_delta, layer, mamba
from tests.workloads.engine.parity import check_on, experiment, experts, on_backends
from tests.workloads.engine.test_memory import alone, total
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
DENSE: list[dict[str, Any]] = [
    {"num_kv_heads": 1, "tp": 2, "qk_norm": True},
    {"num_kv_heads": 1, "tp": 2, "sequence_parallel": False, "recompute": "full"},
    {"num_kv_heads": 1, "tp": 4, "micro_batch_size": 4, "recompute": "rope", "qk_norm": True},
    {"tp": 4, "micro_batch_size": 4, "qk_norm": True, "recompute": "selective"},
    {"tp": 4, "micro_batch_size": 4, "qk_norm": True, "sequence_parallel": False},
    {"num_kv_heads": 1, "tp": 2, "dp": 3, "zero_stage": 3, "global_batch_size": 12},
    *({"num_kv_heads": 1, "tp": 2, "dp": 2, "zero_stage": zero} for zero in range(4)),
    {"num_kv_heads": 1, "tp": 2, "dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "micro_batch_size": 1},
    {"tp": 4, "dp": 2, "zero_stage": 3, "recompute": "full", "tie": True},
    {"tp": 4, "dp": 2, "zero_stage": 1, "gradient_accumulation_fusion": True},
    *({"num_kv_heads": 1, "tp": 2, "cp": 2, "cp_kind": kind} for kind in ("ring", "allgather")),
    {"tp": 4, "cp": 2, "cp_kind": "ring", "zero_stage": 3, "qk_norm": True},
    {"num_kv_heads": 1, "tp": 2, "pp": 2, "pp_schedule": "1f1b", "tie": True},
    {
        "num_kv_heads": 1,
        "tp": 2,
        "pp": 2,
        "pp_schedule": "zero_bubble_v",
        "virtual_stages": 2,
        "dp": 2,
        "zero_stage": 2,
    },
    {"tp": 4, "pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "recompute": "selective"},
    {"num_kv_heads": 1, "tp": 2, "pad_vocab_to": 100},
    {"num_kv_heads": 1, "tp": 2, "dp": 2, "ep": 4, "zero_stage": 3, "moe": experts()},
    {"num_kv_heads": 1, "tp": 2, "etp": 2, "moe": experts(), "sequence_parallel": False, "recompute": "full"},
    {"num_kv_heads": 1, "tp": 2, "cp": 2, "cp_kind": "allgather", "documents": "lognormal mean=5 sigma=0.9 seed=3"},
]
OF_KINDS: list[dict[str, Any]] = [
    {"tp": 4, "micro_batch_size": 4},
    {"tp": 4, "micro_batch_size": 2, "dp": 2, "zero_stage": 3, "recompute": "full"},
    {"tp": 4, "micro_batch_size": 4, "pp": 2, "recompute": "rope+swiglu"},
]
KINDS = (
    *("biases", "sinks", "gate_of_elements", "norm_over_heads", "soft_cap", "positions", "heads_by_kind", "sandwich"),
    "clamped_experts",
)
_QUERIES = attention(kv_heads=1, gate="element", norm="head", rope={**ROPE, "rotated": 0.5})
NEMOTRON: Any = (
    [layer(mamba(), None, norms=1), layer(None, SQUARED, norms=1), layer(attention(kv_heads=1), None, norms=1)],
    [0, 1, 2, 1, 0],
)
"""Layers as in Nemotron 3 Nano, which has 2 key and value heads."""
QWEN: Any = [layer(gated_delta()), layer(_QUERIES)], [0, 0, 1, 0, 1]
"""Layers as in Qwen3.5, which has 2 as well."""
CASES: list[Experiment] = [
    *(experiment(**layout) for layout in DENSE),
    *(experiment(layers=name, **layout) for name in KINDS for layout in OF_KINDS),
    *(
        experiment(layers=name, tp=4, cp=2, cp_kind="ring", seq_len=20, micro_batch_size=4)
        for name in ("sinks", "heads_by_kind")
    ),
    experiment(layers=NEMOTRON, tp=2, dp=2, ep=2, zero_stage=3, micro_batch_size=2),
    experiment(layers=QWEN, tp=2, micro_batch_size=4, recompute="selective"),
]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, 12), CASES))
def test_copies_of_heads_equal_one_process(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """What it computes, with copies that are equal; on gloo also what every rank sends, to the byte."""
    check_on(request, backend, case, CLIP_AT)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "global_batch_size": 6}, {"tp": 4, "dp": 2, "zero_stage": 1, "global_batch_size": 8}], ids=str
)
def test_predicted_peaks_are_the_traced_ones(layout: dict[str, Any]) -> None:
    """One head on all ranks: each has its weights, gradients and states, and its keys and values."""
    model = dataclasses.replace(WIDE, num_kv_heads=1)
    case = Experiment.canonical(model=model, seq_len=512, micro_batch_size=2, **layout)
    (stage,) = estimate_memory(case).stages
    assert abs(stage.peak_bytes / total(alone(case, 0, fake=True)) - 1) < 0.001
