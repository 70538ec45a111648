"""What layers with routed experts send in bf16 is what the closed form says (see `test_traffic`)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.parity import experts
from tests.workloads.engine.test_experts_parity import AUX, BIAS, FEW_RANKS, routed
from tests.workloads.engine.traffic_checks import check
from workloads.costs.shape.expert_loads import rows_from
from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.layers.routing import forced_choice
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import coordinates

IN_BF16 = [
    *(case.replace(precision="bf16") for case in FEW_RANKS[1::5] if case.capacity_factor is None),
    *(routed(dp=2, zero_stage=3, ep=ep, micro_batch_size=1, recompute="full", precision="bf16") for ep in (1, 2)),
    # A stage of one layer without embedding: FSDP gathers ahead what is still gathered.
    *(
        routed(experts(num_dense_layers=0), dp=2, ep=ep, zero_stage=3, pp=4, micro_batch_size=1, precision="bf16")
        for ep in (1, 2)
    ),
    routed(dp=2, ep=2, routing="skewed", routing_imbalance=3.0, micro_batch_size=2, precision="bf16"),
    routed(tp=2, etp=2, recompute="full", micro_batch_size=2, precision="bf16"),
    routed(AUX, cp=2, tp=2, etp=2, routing="learned", recompute="full", recompute_every=3, precision="bf16"),
    routed(BIAS, dp=2, tp=2, etp=1, ep=2, routing="learned", precision="bf16"),
    routed(experts(num_shared_experts=0), tp=2, etp=1, routing="learned", zero_stage=1, precision="bf16"),
    routed(dp=2, ep=2, routing="learned", capacity_factor=1.0, precision="bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sampled(
        IN_BF16,
        4,
        kinds=lambda case: [axis for axis in ("dp", "tp", "cp", "pp", "ep", "etp") if getattr(case, axis) > 1],
    ),
    ids=lambda c: c.id,
)
def test_every_rank_sends_what_the_closed_form_says(gloo_pool: Pool, case: Experiment) -> None:
    check(gloo_pool, case)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_the_engines_choice(seed: int) -> None:
    """Layouts at random; each rank's rows to every part of the experts, and all of its rows together."""
    draw = random.Random(seed)
    tp, cp, number = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([8, 12])
    imbalance = draw.choice([None, 1.25, 1.9])
    how: dict[str, Any] = {} if imbalance is None else {"routing": "skewed", "routing_imbalance": imbalance}
    case = routed(
        experts(num_experts=number, experts_per_token=draw.randint(1, 4)),
        seq_len=draw.choice([16, 48]),
        micro_batch_size=draw.choice([1, 2, 3]),
        global_batch_size=6,
        cp=cp,
        cp_kind=draw.choice(["ring", "ulysses"]),
        tp=tp,
        etp=draw.choice([1, tp]),
        **how,
    )
    moe = case.model.moe
    assert moe is not None
    for rank in range(case.world_size):
        position = coordinates(case, rank)
        tokens = local_positions(case.seq_len, cp, position["cp"], case.cp_kind).repeat(case.micro_batch_size)
        if case.etp == 1:
            tokens = tokens.view(tp, -1)[position["tp"]]
        counts = torch.bincount(forced_choice(tokens, moe, imbalance).flatten(), minlength=number)
        for size in (1, 4, number):
            parts = [range(first, first + size) for first in range(0, number, size)]
            assert [rows_from(case, rank, part) for part in parts] == counts.view(-1, size).sum(1).tolist()
