"""Activations on the host: their words, and what they do not go with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.costs.shapes import DEEPSEEK_V3, H200, LLAMA_8B, QWEN3_30B
from workloads.rules.captured_steps import not_captured
from workloads.rules.layout_rules import layout_violations, violations
from workloads.spec.activations.offload import ALL, WORDS, canonical_offload, is_offload, kept_words, offloaded_words
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment, from_json, to_json


def case(**fields: Any) -> Experiment:
    usual: dict[str, Any] = {"model": LLAMA_8B, "global_batch_size": 8, "seq_len": 4096, "activation_offload": "all"}
    return Experiment.canonical(**{**usual, **fields})


def test_a_tensor_is_kept_recomputed_or_offloaded() -> None:
    assert kept_words("none") == WORDS
    assert kept_words("selective") == ("input", "qkv", "attention", "gate_up")
    assert kept_words("full") == ("input",)
    assert offloaded_words("none", "none") == ()
    assert offloaded_words(ALL, "norm+swiglu") == ("input", "qkv", "rope", "attention", "gate_up")
    assert offloaded_words("norm+attention", "full") == ()


def test_one_offload_has_one_text() -> None:
    assert case(activation_offload="attention+input").activation_offload == "input+attention"
    assert case(activation_offload="+".join(WORDS)).id == case().id
    assert case(activation_offload="input", recompute="full") == case(recompute="full")
    assert case(activation_offload="input", recompute="full/none", pp=2).activation_offload == "input"
    assert canonical_offload("attention+output", "none") == "attention+output"  # to be refused
    for text in ("", "input+", "attention+input", "input+input", "everything", None, 3):
        assert not is_offload(text)
        if isinstance(text, str) and text not in ("attention+input", "input+input"):
            with pytest.raises(
                InvalidExperiment, match=r"activation_offload=.* must be none, all, or some of input, norm"
            ):
                case(activation_offload=text)


def test_it_is_a_field_of_experiments() -> None:
    one = case(activation_offload="input+gate_up")
    assert "-offinput.gate_up-" in one.id
    assert from_json(to_json(one)) == one
    without = one.replace(activation_offload="none")
    assert "off" not in without.id.rsplit("-", 1)[0] and without.hash != one.hash


@pytest.mark.parametrize(
    ("fields", "rule", "told"),
    [
        ({"activation_offload": "norm", "recompute": "selective"}, "activation_offload_norm", "the tensors of norm"),
        ({"activation_offload": "rope", "recompute": "rope"}, "activation_offload_rope", "the tensors of rope"),
        ({"activation_offload": "swiglu", "recompute": "swiglu"}, "activation_offload_swiglu", "the tensors of swiglu"),
        ({"activation_offload": "attention", "recompute": "full"}, "activation_offload_full", "input of a layer alone"),
        (
            {"activation_offload": "attention", "recompute": "none/full", "pp": 2},
            "activation_offload_full",
            "input of a layer alone",
        ),
        ({"model": QWEN3_30B, "activation_offload": "gate_up"}, "activation_offload_mlp", "neither dense layers nor"),
        ({"recompute": "full", "recompute_every": 2}, "activation_offload_mixed", "recompute_every=2"),
        ({"recompute": "full:3"}, "activation_offload_mixed", "recompute=full:3"),
        ({"compile": "block"}, "activation_offload_compile", "use compile=none"),
        ({"precision": "fp8_rowwise"}, "activation_offload_precision", "use precision=bf16"),
        ({"attention": "math"}, "activation_offload_attention", "attention=math"),
        (
            {"pp": 2, "pp_schedule": "zero_bubble_v"},
            "activation_offload_schedule",
            "use 1f1b, interleaved_1f1b or gpipe",
        ),
        ({"cp": 2}, "activation_offload_cp", "use cp_kind=allgather"),
        ({"model": DEEPSEEK_V3}, "activation_offload_model", "has other layers"),
        ({"documents": "lognormal mean=500 sigma=1 seed=1"}, "activation_offload_documents", "use documents=null"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_go_with_is_refused_by_name(fields: dict[str, Any], rule: str, told: str) -> None:
    broken = {one.rule: one.message for one in layout_violations(case(**fields))}
    assert told in broken[rule] and "activation_offload=" in broken[rule]
    assert rule not in {one.rule for one in layout_violations(case(**fields).replace(activation_offload="none"))}


def test_what_no_other_choice_mends_is_said_first() -> None:
    """Another kind of context parallelism would not help latent attention."""
    first = layout_violations(case(model=DEEPSEEK_V3, cp=2))[0]
    assert first.rule == "activation_offload_model"


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 8, "zero_stage": 3, "global_batch_size": 8},
        {"tp": 2, "recompute": "selective"},
        {"cp": 2, "cp_kind": "allgather"},
        {"pp": 2, "recompute": "full/selective"},
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"model": QWEN3_30B, "ep": 2, "dp": 2, "zero_stage": 1},
        {"optimizer_offload": 0.5, "optimizer": "adamw", "precision": "fp16"},
    ],
    ids=str,
)
def test_what_it_goes_with_is_planned(fields: dict[str, Any]) -> None:
    assert layout_violations(case(**fields)) == []


def test_kernels_that_save_other_tensors_are_refused_on_gpus() -> None:
    """The words name what attention in 16 bits saves; on a CPU it saves the same in all precisions."""
    for precision in ("fp32", "fp64"):
        broken = {one.rule: one.message for one in violations(case(precision=precision), H200)}
        assert broken["activation_offload_kernels"].endswith("use precision=bf16 or fp16")
    rules = {one.rule for one in violations(case(), H200)} | {one.rule for one in layout_violations(case())}
    assert "activation_offload_kernels" not in rules


def test_steps_are_captured() -> None:
    assert not_captured(case(), "cuda") is None
