"""What is known of the experts' loads after a step, and how often the host waited for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launchers.attempt.step_parts import routing_columns
from results.tables.schema import ATTEMPTS
from tests.pool import Pool
from tests.workloads.engine.parity import experts, model
from workloads.contract.protocol import RankResult, RoutingRecord
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.balance import routing_record
from workloads.engine.training.build import build, choose_attention
from workloads.measuring.step import _batches, run_step
from workloads.spec.experiment import Experiment

LAYERS, MICROBATCHES = 2, 3


def record(rank: int, layout: dict[str, Any]) -> RoutingRecord | None:
    """After two steps of a model with two layers of experts."""
    fields = {
        "model": model(num_layers=LAYERS, moe=experts(num_dense_layers=0)),
        "seq_len": 16,
        "precision": "fp32",
        "dp": 2,
        "ep": 2,
    }
    case = Experiment.canonical(**fields | {"global_batch_size": 2 * MICROBATCHES} | layout)
    choose_attention(case)
    built = build(case, make_groups(case, rank, torch.device("cpu")))
    for step in range(2):
        run_step(built, step, _batches(built, step), is_warmup=False)
        built.clock.finish()
    return routing_record(built.chunks, built.groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "waits"),
    [
        ({"routing": "learned"}, LAYERS * MICROBATCHES),
        ({"routing": "learned", "recompute": "full"}, 2 * LAYERS * MICROBATCHES),
        ({"routing": "learned", "recompute": "experts"}, LAYERS * MICROBATCHES),
        ({"routing": "learned", "capacity_factor": 1.0}, 0),
        ({"routing": "learned", "ep": 1}, 0),
        ({"routing": "balanced"}, 0),
        ({"routing": "skewed", "routing_imbalance": 2.0}, 0),
    ],
    ids=str,
)
def test_the_host_waits_for_learned_messages_only(gloo_pool: Pool, layout: dict[str, Any], waits: int) -> None:
    for found in gloo_pool.run(record, 2, layout):
        assert found.host_waits == waits
        assert 0 < found.load_entropy <= 1 <= found.expert_imbalance
        assert (found.expert_imbalance == 1.0) == (layout["routing"] == "balanced")


def test_columns_are_means_over_stages_and_null_where_one_is_not_known() -> None:
    def of(waits: float | None) -> RankResult:
        routing = RoutingRecord(
            expert_imbalance=1.5, rank_imbalance=1.25, load_entropy=0.5, dropped_share=0.0, host_waits=waits
        )
        return RankResult(rank=0, coordinates={}, steps=[], phase_started_at={}, routing=routing)

    columns = routing_columns({0: of(4.0), 1: of(2.0)})
    assert columns["host_waits"] == 3.0
    assert columns["expert_imbalance"] == 1.5
    assert set(columns) <= set(ATTEMPTS.names)
    assert routing_columns({0: of(4.0), 1: of(None)})["host_waits"] is None
    assert routing_columns({}) == {}
