"""Layouts of layers by kind that the engine refuses, each in one line that says what works."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import H200, LLAMA_8B
from tests.workloads.engine.kind_models import (
    BESIDE,
    CLAMPED,
    DENSE,
    GELU_EXPERTS,
    LATENT,
    ROPE,
    ROUTED,
    attention,
    gated_delta,
    kimi_delta,
    kind_model,
    latent,
    layer,
    mamba,
)
from workloads.rules.engine_kinds import lacking_kinds
from workloads.rules.layout_rules import lacking, violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

RING = {"cp": 2, "cp_kind": "ring"}


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("chunked", RING, "cp_kind=ring with the chunks or capped scores of parity_chunked (cp_kind=ulysses works)"),
        (
            "soft_cap",
            {"cp": 2, "cp_kind": "allgather", "seq_len": 32},
            "cp_kind=allgather with the chunks or capped scores of",
        ),
        (
            "sliding",
            RING,
            "a window of 5 tokens in parity_sliding, which reaches past a part of seq_len/(2*cp) = 3 tokens",
        ),
        ("sliding", {"attention": "math"}, "attention=math with the windows or capped scores of parity_sliding"),
        ("mamba", {"cp": 2, "cp_kind": "ulysses"}, None),
        ("kimi_delta", {"tp": 2, "recompute": "full"}, None),
        ("positions", RING, None),
        ("sinks", {"cp": 2, "cp_kind": "ulysses"}, None),
        ("sliding", {**RING, "seq_len": 16}, None),
    ],
)
def test_what_is_not_built_is_named(model: str, layout: dict[str, Any], message: str | None) -> None:
    e = Experiment.canonical(model=kind_model(model), global_batch_size=8, **{"seq_len": 12, **layout})
    found = lacking(e)
    assert len(found) == (message is not None)
    if message is not None:
        assert message in found[0]
        assert [violation.rule for violation in violations(e, H200)] == ["engine_support"]


@pytest.mark.parametrize(
    ("model", "layout", "divisors"),
    [
        ("mamba", {"cp": 2}, None),  # 8 heads in 2 groups
        ("mamba", {"cp": 4}, "cp=4 ranks exchange tokens of recurrent layers for whole heads and groups"),
        ("mamba", {"cp": 2, "tp": 2}, "does not divide the 1 of the 2 that all recurrent layers of parity_mamba share"),
        ("kimi_delta", {"cp": 2, "tp": 2}, None),  # 4 heads
        ("kimi_delta", {"cp": 3}, "each of tp=1 ranks has; cp may be one of 1, 2, 4"),
        ("gated_delta", {"cp": 4}, "does not divide the 2 of the 2"),  # 2 heads of keys
        ("gated_delta", {"cp": 2, "cp_kind": "allgather"}, None),
    ],
)
def test_ranks_of_context_have_whole_heads_and_groups(model: str, layout: dict[str, Any], divisors: str | None) -> None:
    e = Experiment.canonical(model=kind_model(model), global_batch_size=8, seq_len=48, **layout)
    found = violations(e, H200)
    assert [one.rule for one in found] == ([] if divisors is None else ["cp_recurrent_heads"])
    assert (divisors or "") in "".join(one.message for one in found)


@pytest.mark.parametrize("kind", ["ring", "allgather", "ulysses"])
def test_documents_of_split_sequences_need_all_keys(kind: str) -> None:
    documents = {"documents": "lognormal mean=500 sigma=1 seed=1", "compile": "block"}
    e = Experiment.canonical(model=LLAMA_8B, global_batch_size=8, seq_len=4096, cp=2, cp_kind=kind, **documents)
    found = ["cp_kind=ring with documents (cp_kind=allgather and ulysses work)"] if kind == "ring" else []
    assert lacking(e) == found
    assert [violation.rule for violation in violations(e, H200)] == ["engine_support"] * len(found)


def test_gates_of_heads_need_whole_tiles_in_fp8() -> None:
    wide = attention(heads=8, kv_heads=4, head_dim=32, value_dim=32, gate="head")
    model = kind_model(([layer(wide, {**DENSE, "width": 256})], [0, 0]), hidden_size=128)
    for precision, works in (("fp8_rowwise", False), ("bf16", True)):
        e = Experiment.canonical(model=model, global_batch_size=8, seq_len=128, precision=precision)
        rules = [violation.rule for violation in violations(e, H200)]
        assert rules == ([] if works else ["fp8_sizes"])


CPU = dataclasses.replace(H200, backend="cpu")


@pytest.mark.parametrize(
    ("kind", "fields", "cluster", "message"),
    [
        (gated_delta(key_dim=16, value_dim=16), {}, H200, None),
        (gated_delta(key_dim=16, value_dim=16), {"precision": "fp8_rowwise"}, H200, None),
        (gated_delta(), {"precision": "fp32"}, H200, "recurrence=fla has no fp32 kernels; use recurrence=torch"),
        (gated_delta(), {}, CPU, "recurrence=fla needs CUDA devices, cluster h200 has cpu"),
        (
            kimi_delta(head_dim=288),
            {},
            H200,
            "keys and states of at most 256 numbers, kinds has 288",
        ),
        (mamba(state=512), {}, H200, "kinds has 512; use recurrence=torch"),
    ],
)
def test_what_the_kernels_of_recurrences_do_not_take(
    kind: dict[str, Any], fields: dict[str, Any], cluster: ClusterSpec, message: str | None
) -> None:
    model = kind_model(([layer(kind), layer(attention())], [0, 1]))
    e = Experiment.canonical(model=model, global_batch_size=8, seq_len=128, recurrence="fla", **fields)
    found = [one.message for one in violations(e, cluster) if one.rule == "recurrence"]
    assert len(found) == (message is not None) and (message or "") in "".join(found)


def test_kernels_that_another_engine_has() -> None:
    model = kind_model(([layer(mamba(state=16)), layer(attention())], [0, 1]))
    e = Experiment.canonical(model=model, global_batch_size=8, seq_len=128, recurrence="mamba_ssm")
    for cluster in (H200, CPU):
        (found,) = [one.message for one in violations(e, cluster) if one.rule == "recurrence"]
        assert found.startswith("recurrence=mamba_ssm is what engine=transformers looks for, not ultrasweep; use ")
    theirs = Experiment.canonical(
        model=model, global_batch_size=8, seq_len=128, recurrence="mamba_ssm", engine="transformers"
    )
    assert not [one for one in violations(theirs, H200) if one.rule == "recurrence"]
    (found,) = [one.message for one in violations(theirs, CPU) if one.rule == "recurrence"]
    assert found.startswith("recurrence=mamba_ssm needs CUDA devices")


def test_layers_without_recurrences_have_no_choice_of_kernels() -> None:
    e = Experiment.canonical(model=kind_model("sliding"), global_batch_size=8, recurrence="fla")
    assert e.recurrence == "torch"


def test_projections_of_recurrent_layers_need_whole_tiles_in_fp8() -> None:
    """z and x [256], B and C [32], steps [H]: 576 columns and one for each head."""
    for heads, works in ((8, False), (16, True)):
        part = mamba(heads=heads, head_dim=256 // heads, groups=2, state=16)
        other = attention(heads=8, kv_heads=4, head_dim=32, value_dim=32)
        kinds = [layer(part, {**DENSE, "width": 256}), layer(other, {**DENSE, "width": 256})]
        model = kind_model((kinds, [0, 1]), hidden_size=128)
        e = Experiment.canonical(model=model, global_batch_size=8, seq_len=128, precision="fp8_rowwise")
        assert [violation.rule for violation in violations(e, H200)] == ([] if works else ["fp8_sizes"])


def test_latents_of_attention_need_whole_tiles_in_fp8() -> None:
    """Also of models whose layers are listed."""
    dense = {**DENSE, "width": 64}
    for rank, rotated, works in ((96, 32, True), (90, 38, False), (96, 40, False)):  # rotated: a part of the products
        mixer = latent(heads=8, kv_rank=rank, nope_dim=64, rope_dim=rotated, value_dim=64)
        kinds = [layer(kimi_delta(heads=16, head_dim=16), dense), layer(mixer, dense)]
        e = Experiment.canonical(
            model=kind_model((kinds, [0, 1]), hidden_size=64), global_batch_size=8, seq_len=128, precision="fp8_rowwise"
        )
        assert [violation.rule for violation in violations(e, H200)] == ([] if works else ["fp8_sizes"])


def test_latents_of_experts_need_whole_tiles_in_fp8() -> None:
    expert = {"kind": "dense", "width": 64, "activation": "silu"}
    for width, works in ((48, True), (40, False)):
        mlp = {**LATENT, "expert": expert, "shared": expert, "latent": width}
        model = kind_model(([layer(attention(heads=8, head_dim=32, value_dim=32), mlp)], [0, 0]), hidden_size=128)
        e = Experiment.canonical(model=model, global_batch_size=8, seq_len=128, precision="fp8_rowwise")
        assert [violation.rule for violation in violations(e, H200)] == ([] if works else ["fp8_sizes"])


def test_biases_of_experts_are_divided_as_their_columns() -> None:
    """Experts of 24 columns and a hidden size of 32 on three ranks."""
    for biased, rules in ((True, ["etp"]), (False, [])):
        kinds = [layer(attention(heads=6, kv_heads=3), {**CLAMPED, "expert": {**CLAMPED["expert"], "bias": biased}})]
        model = kind_model((kinds, [0, 0]), vocab_size=96)
        e = Experiment.canonical(model=model, global_batch_size=8, seq_len=12, tp=3, etp=3, sequence_parallel=False)
        found = violations(e, H200)
        assert [violation.rule for violation in found] == rules
        assert not biased or "does not divide the 32 outputs of experts" in found[0].message


def test_clamped_experts_need_their_limit() -> None:
    """Files that were written before the constants had fields do not say it."""
    expert = {name: value for name, value in CLAMPED["expert"].items() if name != "limit"}
    assert lacking_kinds(kind_model(([layer(attention(), {**CLAMPED, "expert": expert})], [0, 0]))) == (
        "clamped experts without a limit",
    )
    assert lacking_kinds(kind_model(([layer(attention(), GELU_EXPERTS, norms=4)], [0, 0]))) == (
        "norms of the outputs of experts",
    )


def test_latent_experts_run_without_norms_of_their_own() -> None:
    """A norm of the latent is Kimi K3's, whose place its file does not say."""
    for mlp, norms, lacks in (
        (LATENT, 2, None),
        ({**LATENT, "latent_norm": True}, 2, "a norm of the latent of experts"),
        ({**BESIDE, "latent": 16}, 7, "latent experts with norms of outputs"),
    ):
        found = lacking_kinds(kind_model(([layer(attention(), mlp, norms=norms)], [0, 0])))
        assert found == (() if lacks is None else (lacks,))


def test_norms_over_heads_and_of_outputs_run_in_the_published_combinations() -> None:
    """Those of MiniMax-M2 and OLMo 2."""
    for mixer, mlp, options, lacks in (
        (attention(norm="all_heads"), ROUTED, {}, None),
        (attention(norm="all_heads"), DENSE, {"outputs_normed": True}, None),
        (
            attention(norm="all_heads", score_scale=1.0),
            DENSE,
            {},
            "a norm over all heads with scaled scores or normed values",
        ),
        (
            attention(),
            ROUTED,
            {"outputs_normed": True},
            "norms of outputs in place of inputs with experts or in layers of one part",
        ),
        (attention(), DENSE, {"outputs_normed": True, "norms": 4}, "norms of outputs in place of inputs beside others"),
    ):
        found = lacking_kinds(kind_model(([layer(mixer, mlp, **options)], [0, 0])))
        assert found == (() if lacks is None else (lacks,))


def test_values_larger_than_keys_are_not_run() -> None:
    model = kind_model(([layer(attention(value_dim=16))], [0, 0]))
    assert lacking_kinds(model) == ("values larger than keys",)


def test_norms_beside_experts_need_what_they_are_norms_of() -> None:
    alone = {name: value for name, value in BESIDE.items() if name != "shared"}
    for mlp, norms, lacks in (
        (alone, 7, "seven norms without a dense MLP beside experts, or with a gate of it"),
        ({**BESIDE, "shared_gate": True}, 7, "seven norms without a dense MLP beside experts, or with a gate of it"),
        (DENSE, 7, "seven norms without a dense MLP beside experts, or with a gate of it"),
        (BESIDE, 2, "scales of the router without seven norms"),
        (DENSE, 5, "sandwich norms (5 a layer)"),
        (BESIDE, 7, None),
    ):
        found = lacking_kinds(kind_model(([layer(attention(), mlp, norms=norms)], [0, 0])))
        assert found == (() if lacks is None else (lacks,))
    some = [layer(attention(), BESIDE, norms=7), layer(attention(), BESIDE)]
    assert "experts with norms of their own in some layers alone" in lacking_kinds(kind_model((some, [0, 1])))


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"shared_kv": True, "value_dim": 6}, "shared keys and values of two sizes"),
        ({"score_scale": 1.0, "rope": None}, "scaled scores of queries without norm and positions"),
        ({"score_scale": 1.0, "rope": None, "norm": "head"}, None),
        ({"shared_kv": True, "value_norm": True}, None),
        (
            {"rope": {**ROPE, "rotated": 0.5, "scaling": '{"rope_type": "proportional"}'}},
            "proportional rotary positions in a file of an earlier version, which lacks other fields (write it again)",
        ),
    ],
)
def test_keys_that_are_values_and_scaled_scores(changes: dict[str, Any], lacks: str | None) -> None:
    found = lacking_kinds(kind_model(([layer(attention(**changes))], [0, 0])))
    assert found == (() if lacks is None else (lacks,))
