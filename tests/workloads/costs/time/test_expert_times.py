"""Seconds of routed experts: products of few rows."""

from __future__ import annotations

import dataclasses

import pytest

from tests.workloads.costs.shapes import H200, MIXTRAL
from workloads.costs.time.expert_times import ExpertTimes
from workloads.costs.time.rank_times import Rates
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of

FAST_MEMORY = Rates(matmul=1e15, head=1e15, attention=1e15, memory=1e18)


def forward_s(seq_len: int, experts: int, ep: int = 1, rates: Rates = FAST_MEMORY) -> float:
    assert MIXTRAL.moe is not None
    moe = dataclasses.replace(MIXTRAL.moe, num_experts=experts)
    model = dataclasses.replace(MIXTRAL, name=f"{experts} experts", moe=moe)
    e = Experiment.canonical(model=model, dp=ep, ep=ep, seq_len=seq_len, global_batch_size=ep)
    mlp = layers_of(e.model).kinds[-1].mlp
    assert isinstance(mlp, RoutedMLP)
    return ExpertTimes.of(e, H200, rates, mlp).forward_s


@pytest.mark.parametrize(("seq_len", "experts", "ep"), [(4096, 8, 1), (1024, 128, 1), (1024, 128, 4)])
def test_every_expert_takes_one_more_tile_of_rows(seq_len: int, experts: int, ep: int) -> None:
    """By hand: two experts a token, three matrices of 4,096 x 14,336, 128 rows more of each expert of the rank."""
    rows = 2 * seq_len + 128 * experts // ep
    assert forward_s(seq_len, experts, ep) == pytest.approx(2 * rows * 3 * 4096 * 14336 / 1e15)


def test_few_rows_take_as_long_as_their_weights_are_read() -> None:
    slow = FAST_MEMORY._replace(memory=1e12)
    assert forward_s(16, 128, rates=slow) == pytest.approx(2 * 128 * 3 * 4096 * 14336 / 1e12)
