"""What a rank saves, by part of a layer."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.costs.memory.saved_parts import saved_by_part
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.shape.partition import experiment_stages
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, MoESpec

MODEL = ModelSpec(
    name="mixed",
    num_layers=7,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    ffn_hidden_size=512,
    vocab_size=1024,
    moe=MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=128, num_dense_layers=3),
)


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "norm", "swiglu+experts", "selective+experts"])
def test_parts_add_up_to_what_a_rank_saves(recompute: str, compile: Any) -> None:
    e = Experiment.canonical(
        model=MODEL,
        tp=2,
        pp=2,
        recompute=recompute,
        recompute_every=2,
        compile=compile,
        global_batch_size=4,
        seq_len=512,
    )
    x = Shared.of(e)
    for held in experiment_stages(e):
        rank = Part.of(e, x, held)
        parts = saved_by_part(e, x, rank)
        assert sum(parts.values()) == rank.saved
        assert min(parts.values()) >= 0
        assert parts["stage output"] == (0 if rank.has_head else x.stream)
