"""Peaks in closed form beside those traced on FakeTensors, of models whose layers differ by kind: within 0.1 %."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.kind_models import (
    LOCAL_ROPE,
    attention,
    chunk,
    gated_delta,
    kimi_delta,
    kind_model,
    latent,
    layer,
    mamba,
    window,
)
from tests.workloads.engine.test_memory import alone, total
from tests.workloads.engine.traffic_checks import check_counts, count
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.mixer_working import ROW_BLOCK
from workloads.engine.ops.backend import BLOCK_ELEMENTS
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of

DENSE: dict[str, Any] = {"kind": "dense", "width": 1536, "activation": "silu"}
RELU2: dict[str, Any] = {"kind": "dense", "width": 1280, "activation": "relu2", "gated": False}
GELU: dict[str, Any] = {**DENSE, "activation": "gelu_tanh"}

MAMBA: dict[str, Any] = {"heads": 16, "head_dim": 64, "groups": 2, "state": 64}
KIMI: dict[str, Any] = {"heads": 12, "head_dim": 64, "kernel": 4}
MLA: dict[str, Any] = {"heads": 8, "kv_rank": 96, "nope_dim": 64, "rope_dim": 32, "value_dim": 96}
DELTA: dict[str, Any] = {"key_heads": 4, "value_heads": 8, "key_dim": 64, "value_dim": 120}


def wide(**changes: Any) -> dict[str, Any]:
    return attention(**{"heads": 8, "kv_heads": 4, "head_dim": 64, "value_dim": 64, **changes})


CLAMPED: dict[str, Any] = {
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {
        "kind": "dense",
        "width": 512,
        "activation": "clamped_silu",
        "bias": True,
        "limit": 7.0,
        "slope": 1.702,
        "offset": 1.0,
    },
    "score": "softmax_of_chosen",
    "router_bias": True,
}
SQUARED: dict[str, Any] = {
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {"kind": "dense", "width": 640, "activation": "relu2", "gated": False},
    "shared": RELU2,
    "shared_experts": 1,
    "score": "sigmoid",
    "scale": 2.5,
}
SIGMOID: dict[str, Any] = {
    **SQUARED,
    "expert": {"kind": "dense", "width": 640, "activation": "silu"},
    "shared": {"kind": "dense", "width": 640, "activation": "silu"},
    "correction": True,
}
LATENT: dict[str, Any] = {**SQUARED, "latent": 192, "shared": {**RELU2, "width": 640}}

BESIDE: dict[str, Any] = {
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {**GELU, "width": 512},
    "shared": {**GELU, "width": 640},
    "router_scales": True,
}
GEMMA4: dict[str, Any] = {"norm": "head", "value_norm": True, "score_scale": 1.0}
PARTLY: dict[str, Any] = {"kind": "rope", "theta": 1_000_000.0, "rotated": 0.25, "proportional": True}

KINDS: dict[str, list[dict[str, Any]]] = {
    "windows": [layer(wide(span=window(80), sinks=True), DENSE), layer(wide(), DENSE)],
    "chunks": [layer(wide(span=chunk(100), rope=None), DENSE), layer(wide(), DENSE)],
    "biases": [layer(wide(bias=True, output_bias=True, gate="head"), DENSE)],
    "gates": [layer(wide(gate="element", norm="head"), DENSE)],
    "norm_over_heads": [layer(wide(norm="all_heads"), DENSE)],
    "norms_of_outputs": [layer(wide(norm="all_heads"), DENSE, outputs_normed=True)],
    "values": [layer(wide(head_dim=96, sinks=True, value_scale=0.7), DENSE)],
    "scaled_values": [layer(wide(sinks=True, value_scale=0.7), DENSE)],
    "caps": [layer(wide(soft_cap=True), GELU)],
    "norms": [layer(wide(span=window(80), norm="without_weight"), GELU, norms=4)],
    "relu": [layer(wide(rope=None), RELU2)],
    "mamba": [layer(mamba(**MAMBA, bias=True), RELU2), layer(wide(), DENSE)],
    "kimi_delta": [layer(kimi_delta(**KIMI), RELU2), layer(wide(), DENSE)],
    "one_part": [
        layer(mamba(**MAMBA), None, norms=1),
        layer(None, {**RELU2, "width": 1664}, norms=1),
        layer(wide(heads=8, kv_heads=8, head_dim=104, value_dim=104), None, norms=1),
    ],
    "gated_delta": [layer(gated_delta(**DELTA), RELU2), layer(wide(), DENSE)],
    "kimi_linear": [layer(kimi_delta(**KIMI), DENSE), layer(latent(**MLA), DENSE)],
    "kimi_linear_of_experts": [
        layer(latent(**MLA, q_rank=160), SIGMOID),
        layer(kimi_delta(**{**KIMI, "heads": 16}), SIGMOID),
    ],
    "clamped_experts": [
        layer(wide(span=window(80), sinks=True, bias=True, output_bias=True), CLAMPED),
        layer(wide(sinks=True, bias=True, output_bias=True), CLAMPED),
    ],
    "experts_of_squared_relu": [layer(wide(rope=None), SQUARED)],
    "latent_experts": [layer(wide(rope=None), LATENT)],
    "latent_experts_alone": [
        layer(wide(heads=8, kv_heads=8, rope=None), None, norms=1),
        layer(None, LATENT, norms=1),
    ],
    "dense_beside_experts": [
        layer(wide(kv_heads=2, span=window(80), rope=LOCAL_ROPE, **GEMMA4), BESIDE, norms=7),
        layer(
            wide(heads=4, kv_heads=2, head_dim=128, value_dim=128, rope=PARTLY, shared_kv=True, **GEMMA4),
            BESIDE,
            norms=7,
        ),
    ],
}
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "zero_stage": 1, "rounds": 3},
    {"tp": 2, "rounds": 1},
    {"dp": 2, "zero_stage": 3, "rounds": 2, "recompute": "selective"},
    {"pp": 2, "rounds": 4, "recompute": "full"},
    {"cp": 2, "rounds": 2},
]
NOT_ON_A_RING = ("chunks", "caps", "values", "one_part")
"""Chunks and caps are not exchanged; on a CPU the kernel of a ring pads values, which others do not, and heads of 104
numbers have none."""
WITH_EXPERTS = (
    "kimi_linear_of_experts",
    "clamped_experts",
    "experts_of_squared_relu",
    "latent_experts",
    "dense_beside_experts",
)
OF_EXPERTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "zero_stage": 1, "rounds": 2, "recompute": "experts"},
    {"tp": 2, "etp": 2, "rounds": 1, "recompute": "swiglu"},
    {"dp": 2, "ep": 2, "zero_stage": 3, "rounds": 1, "recompute": "full"},
    {"dp": 2, "zero_stage": 1, "rounds": 1, "precision": "fp8_rowwise"},
]
CASES = [
    (name, layout)
    for name in KINDS
    for layout in LAYOUTS + (OF_EXPERTS if name in WITH_EXPERTS else [])
    if not (name in NOT_ON_A_RING and layout.get("cp", 1) > 1)
]


def wide_case(name: str, rounds: int, **layout: Any) -> Experiment:
    model = kind_model((KINDS[name], [at % len(KINDS[name]) for at in range(6)]), hidden_size=512, vocab_size=1024)
    sequences = 2 * layout.get("dp", 1) * rounds
    model = dataclasses.replace(model, name=f"wide_{name}")
    return Experiment.canonical(model=model, seq_len=512, micro_batch_size=2, global_batch_size=sequences, **layout)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_biases_of_experts_are_gathered_in_16_bits(gloo_pool: Pool, scaling: str) -> None:
    """Beside products in fp8, in one message; what is sent is the closed form's to the byte."""
    model = kind_model((KINDS["clamped_experts"], [0, 1]), hidden_size=512, vocab_size=128)
    case = Experiment.canonical(
        model=model, seq_len=16, global_batch_size=2, dp=2, zero_stage=3, precision=f"fp8_{scaling}"
    )
    check_counts(case, gloo_pool.run(count, case.world_size, case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(CASES, 1, seconds=6),
    ids=str,
)
def test_predicted_peaks_of_kinds_are_the_traced_ones(name: str, layout: dict[str, Any]) -> None:
    case = wide_case(name, **layout)
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = total(alone(case, rank_of(case, pp=rank), fake=True))
        assert abs(stage.peak_bytes / traced - 1) < 0.001


SPLIT: list[dict[str, Any]] = [
    {"pp_schedule": schedule, "recompute": recompute, **more}
    for schedule in ("zero_bubble_v", "interleaved_zero_bubble", "dualpipe_v")
    for recompute in ("none", "selective", "full")
    for more in ({}, {"tp": 2}, {"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3})
]
"""What is recomputed waits for the weight-gradient pass, once for all products that have it as their input. With ZeRO 2
and 3 what the last reduction has read exists, of a block or of an end."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled([(name, layout) for name in KINDS if name != "values" for layout in SPLIT], 3, seconds=5),
    ids=str,
)
def test_predicted_peaks_of_split_backwards_are_the_traced_ones(name: str, layout: dict[str, Any]) -> None:
    """Without values that a kernel on a CPU pads."""
    case = wide_case(name, pp=2, virtual_stages=2, rounds=4, **layout)
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = total(alone(case, rank_of(case, pp=rank), fake=True))
        assert abs(stage.peak_bytes / traced - 1) < 0.003


def test_norms_over_all_heads_work_on_as_many_rows_as_counted() -> None:
    assert ROW_BLOCK == BLOCK_ELEMENTS


NARROW: dict[str, Any] = {**DENSE, "width": 64}
UNLIKE: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "small_last": ([layer(gated_delta(**DELTA), DENSE), layer(wide(heads=2, kv_heads=2), NARROW)], [0, 0, 0, 1]),
    "large_last": ([layer(wide(heads=2, kv_heads=2), NARROW), layer(mamba(**MAMBA), DENSE)], [0, 0, 0, 1]),
    "dense_last": ([layer(wide(), SQUARED), layer(wide(heads=2, kv_heads=2), NARROW)], [0, 0, 1, 1]),
}
"""Layers of very different sizes: a rank peaks in one that is neither its last nor its first, or not in the largest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        [
            (name, layout)
            for name in UNLIKE
            for layout in (
                {"dp": 2, "zero_stage": 1, "rounds": 2},
                {"dp": 2, "zero_stage": 3, "rounds": 2},
                {"rounds": 2, "recompute": "full", "recompute_every": 2},
            )
        ]
        + [(name, {"pp": 2, "rounds": 2}) for name in ("small_last", "large_last")],
        2,
        seconds=6,
    ),
    ids=str,
)
def test_a_layer_counts_with_its_own_size(name: str, layout: dict[str, Any]) -> None:
    case = _unlike(name, **layout)
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = total(alone(case, rank_of(case, pp=rank), fake=True))
        assert abs(stage.peak_bytes / traced - 1) < 0.001


def _unlike(name: str, rounds: int, **layout: Any) -> Experiment:
    model = kind_model(UNLIKE[name], hidden_size=512, vocab_size=1024)
    model = dataclasses.replace(model, name=f"unlike_{name}")
    sequences = 2 * layout.get("dp", 1) * rounds
    return Experiment.canonical(model=model, seq_len=512, micro_batch_size=2, global_batch_size=sequences, **layout)


MANY: dict[str, Any] = {**SQUARED, "experts": 64, "shared": {**RELU2, "width": 64}}
"""Experts whose gradients take more than the tensors of so few tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        [
            (name, layout)
            for name in ("gated_delta", "kimi_delta", "mamba")
            for layout in (
                {"recurrence": "fla"},
                {"recurrence": "torch"},
                {"recurrence": "fla", "dp": 2, "zero_stage": 2},
                {"recurrence": "fla", "pp": 2},
            )
        ],
        1,
        seconds=6,
    ),
    ids=str,
)
def test_a_recurrence_is_beside_the_gradients_of_its_layers_experts(name: str, layout: dict[str, Any]) -> None:
    mixers = {"gated_delta": gated_delta(**DELTA), "kimi_delta": kimi_delta(**KIMI), "mamba": mamba(**MAMBA)}
    model = kind_model(([layer(mixers[name], MANY)], [0] * 4), hidden_size=512, vocab_size=8192)
    model = dataclasses.replace(model, name=f"beside_{name}")
    sequences = 4 * layout.get("dp", 1)
    case = Experiment.canonical(model=model, seq_len=512, micro_batch_size=2, global_batch_size=sequences, **layout)
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = total(alone(case, rank_of(case, pp=rank), fake=True))
        assert abs(stage.peak_bytes / traced - 1) < 0.001


EXCHANGED: dict[str, list[dict[str, Any]]] = {
    "mamba": [layer(mamba(**MAMBA, bias=True), NARROW)],
    "gated_delta": [layer(gated_delta(**DELTA), NARROW)],
    "kimi_delta": [layer(kimi_delta(**KIMI), NARROW), layer(kimi_delta(**KIMI, full_rank_gate=True), NARROW)],
}
"""Layers whose recurrence takes most, so that steps peak while heads are exchanged."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        [
            (name, {"cp": 2, "zero_stage": 1, "cp_kind": kind, "recompute": recompute})
            for name in EXCHANGED
            for kind, recompute in (("ulysses", "none"), ("ring", "full"))
        ],
        1,
        seconds=4,
    ),
    ids=str,
)
def test_exchanges_of_heads_are_in_the_peak(name: str, layout: dict[str, Any]) -> None:
    kinds = [*EXCHANGED[name], layer(wide(heads=2, kv_heads=2), NARROW)]
    order = [*range(len(kinds)), *reversed(range(len(kinds) - 1))]
    model = kind_model((kinds, order), hidden_size=512, vocab_size=1024)
    case = Experiment.canonical(model=model, seq_len=1024, micro_batch_size=2, global_batch_size=4, **layout)
    assert abs(estimate_memory(case).peak_bytes / total(alone(case, 0, fake=True)) - 1) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "layout"),
    sampled(
        [
            *(("none", {"cp": cp, "cp_kind": kind}) for cp in (2, 4) for kind in ("ring", "allgather")),
            ("none", {"cp": 2, "recompute": "selective"}),
            ("none", {"cp": 4, "precision": "fp32"}),
            *(("element", {"cp": 2, "cp_kind": kind}) for kind in ("ring", "allgather")),
        ],
        1,
        seconds=5,
    ),
    ids=str,
)
def test_exchanges_of_keys_are_in_the_peak(gate: str, layout: dict[str, Any]) -> None:
    """Of layers with little beside attention, with as many heads of keys as of queries: the first rank needs most."""
    mixer = wide(heads=8, kv_heads=8, head_dim=64, value_dim=64, gate=gate)
    kinds = [layer(mixer, None, norms=1) if gate == "none" else layer(mixer, NARROW)]
    model = kind_model((kinds, [0] * 6), hidden_size=512, vocab_size=1024)
    case = Experiment.canonical(model=model, seq_len=512, micro_batch_size=2, global_batch_size=4, **layout)
    assert abs(estimate_memory(case).peak_bytes / total(alone(case, 0, fake=True)) - 1) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        [
            (name, {"pp_schedule": schedule, **more})
            for name in ("mamba", "gated_delta", "kimi_delta")
            for schedule, more in (
                ("zero_bubble_v", {"cp": 2, "cp_kind": "ulysses"}),
                ("zero_bubble_v", {"recurrence": "fla"}),
                ("interleaved_zero_bubble", {}),
                ("dualpipe_v", {}),
            )
        ],
        2,
        seconds=6,
    ),
    ids=str,
)
def test_recurrences_are_in_the_peak_of_split_backwards(name: str, layout: dict[str, Any]) -> None:
    """Beside all that waits for the weight-gradient pass: in a pass of inputs alone, but not in a whole backward."""
    case = wide_case(name, rounds=4, pp=2, virtual_stages=2, **layout).replace(seq_len=1024)
    for at, stage in enumerate(estimate_memory(case).stages):
        traced = total(alone(case, rank_of(case, pp=at), fake=True))
        assert abs(stage.peak_bytes / traced - 1) < 0.0015
