"""Profiles of engines: which file describes which engine and version."""

from __future__ import annotations

from sweep.predicting.codebases import GENERAL, profile_of_engine, profiles_with, read_profiles
from workloads.predict.layouts import CODEBASE
from workloads.predict.parameters import OF_ENGINES, TIME, time_parameters
from workloads.predict.profiles import find_profile
from workloads.spec.experiment import ENGINES


def test_a_profile_follows_an_engine_and_its_version() -> None:
    local = profile_of_engine("megatron", "0.16.1+1 without Transformer Engine")
    fused = profile_of_engine("megatron", "0.19.2+1 with Transformer Engine 2.11")
    unknown = profile_of_engine("another", "1.0+1")
    assert local.time["loss"] > 3 * fused.time["loss"], "the fused loss passes over its logits fewer times"
    assert (local.name, unknown.name) == ("megatron 0.16.1+1 without Transformer Engine", "another 1.0+1")
    own = read_profiles()[CODEBASE].time
    assert {one.time["matmul"] for one in (local, fused, unknown)} == {own["matmul"]}, "all launch kernels of torch"


def test_the_longest_name_of_a_code_base_wins() -> None:
    profiles = read_profiles()
    found = {
        name: find_profile(name, profiles.values(), profiles[GENERAL]).name
        for name in (
            "NeMo 25.01-25.09",
            "NeMo AutoModel 0.2",
            "Megatron-Bridge",
            "Megatron-LM 0.14",
            "Megatron-DeepSpeed",
        )
    }
    assert list(found.values()) == ["nemo", "nemo_automodel", "nemo", "megatron", "megatron_deepspeed"]


def test_this_projects_engine_has_no_term_of_others() -> None:
    profiles = profiles_with(ENGINES.items())
    assert time_parameters(profiles[CODEBASE]).keys() == TIME.keys()
    others = [one for one in profiles.values() if " " in one.name]
    assert len(others) == len(ENGINES) - 1
    assert all(time_parameters(one).keys() == TIME.keys() | OF_ENGINES.keys() for one in others)
