"""Exports of what waits in the memory of the host: an optimizer, and activations."""

from __future__ import annotations

import json
import re

import pytest

from sweep.engine_configs.export import engine_config
from tests.sweep.engine_configs.layouts import layout
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


def on_host(share: float, zero: int) -> Experiment:
    return layout("llama8b", dp=4, zero_stage=zero, optimizer_offload=share, global_batch_size=8)


def test_an_optimizer_on_the_host_is_exported_where_the_engine_has_one() -> None:
    flags = flags_of(engine_config(on_host(0.5, 1), "megatron").files["megatron_flags.txt"])
    assert flags["--optimizer-offload-fraction"] == "0.5"
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--use-distributed-optimizer"} <= set(flags)
    written = json.loads(engine_config(on_host(0.5, 3), "deepspeed").files["deepspeed.json"])
    assert written["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.5}
    whole = json.loads(engine_config(on_host(1.0, 1), "deepspeed").files["deepspeed.json"])
    assert whole["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    for engine in ("megatron", "deepspeed"):
        share, zero = (0.5, 1) if engine == "megatron" else (0.5, 3)
        assert any("master weights" in text for text in engine_config(on_host(share, zero), engine).warnings)


@pytest.mark.parametrize(
    ("engine", "share", "zero", "told"),
    [
        ("megatron", 1.0, 0, "it needs the distributed optimizer; zero_stage=1 would work"),
        ("megatron", 0.5, 3, "not known of Megatron-FSDP; zero_stage=1 would work"),
        ("deepspeed", 0.5, 1, "only ZeRO 3 can keep a part on the device; 1.0 would work, or zero_stage=3"),
        ("torchtitan", 0.5, 3, "no counterpart here; 0.0 would work"),
        ("nanotron", 1.0, 1, "no counterpart here; 0.0 would work"),
        ("transformers", 1.0, 3, "no counterpart here; 0.0 would work"),
    ],
)
def test_an_optimizer_on_the_host_is_refused_elsewhere(engine: str, share: float, zero: int, told: str) -> None:
    with pytest.raises(UnsupportedByEngine, match=rf"optimizer_offload={share} \({re.escape(told)}\)"):
        engine_config(on_host(share, zero), engine)


def flags_of(text: str) -> dict[str, str]:
    """Flags with their values; a flag without one has an empty text."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("--")]
    return {line[0]: line[1] if len(line) > 1 else "" for line in lines}


def with_activations_away(words: str, **fields: object) -> Experiment:
    return layout("llama8b", dp=2, global_batch_size=8, activation_offload=words, **fields)


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ("input", "attn_norm mlp_norm"),
        ("qkv+rope", "core_attn"),
        ("input+qkv+rope+attention", "attn_norm mlp_norm core_attn attn_proj"),
    ],
)
def test_activations_on_the_host_are_exported_by_their_modules(words: str, modules: str) -> None:
    flags = flags_of(engine_config(with_activations_away(words), "megatron").files["megatron_flags.txt"])
    assert "--fine-grained-activation-offloading" in flags
    assert flags["--offload-modules"] == modules


@pytest.mark.parametrize(
    ("engine", "words", "fields", "told"),
    [
        ("megatron", "all", {}, "no module there has norm and gate_up and swiglu"),
        ("megatron", "attention", {}, "its core_attn and attn_proj need qkv and rope together"),
        ("megatron", "qkv+attention", {}, "its core_attn and attn_proj need qkv and rope together"),
        ("megatron", "all", {"recompute": "full"}, "it offloads no input of fully recomputed layers"),
        ("megatron", "input", {"zero_stage": 3}, "not known of Megatron-FSDP"),
        *(
            (engine, "input", {}, "no counterpart here")
            for engine in ("torchtitan", "nanotron", "deepspeed", "transformers")
        ),
    ],
)
def test_other_activations_on_the_host_are_refused(
    engine: str, words: str, fields: dict[str, object], told: str
) -> None:
    with pytest.raises(UnsupportedByEngine, match=re.escape(f"activation_offload={words} ({told}")):
        engine_config(with_activations_away(words, **fields), engine)
