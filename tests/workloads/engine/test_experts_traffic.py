"""What layers with routed experts send, counted call by call, is what the closed form says (see `test_traffic`)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.workloads.engine.parity import experts
from tests.workloads.engine.test_experts_parity import AUX, BIAS, CASES, routed
from tests.workloads.engine.test_traffic import DEVICES_PER_NODE, Counted, count
from workloads.costs.shape.expert_loads import rows_from
from workloads.costs.traffic.sent import Traffic, step_traffic
from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.layers.routing import forced_choice
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import coordinates

Key = tuple[str, str, str | None]


def calls_of(traffic: Counted) -> dict[Key, int]:
    assert traffic is not None
    return {(one.axis, one.op, one.link): one.calls for one in traffic}


def bytes_of(traffic: Counted) -> dict[Key, int]:
    assert traffic is not None
    return {(one.axis, one.op, one.link): one.bytes for one in traffic}


def exchanged(every: Iterable[list[Traffic]]) -> int:
    return sum(one.bytes for traffic in every for one in traffic if one.axis == "ep")


def check(pool: Pool, case: Experiment) -> None:
    counted = pool.run(count, case.world_size, case)
    expected = [step_traffic(case, rank, DEVICES_PER_NODE) for rank in range(case.world_size)]
    exact = case.routing != "learned" or case.capacity_factor is not None
    for rank, ((traffic, problem), closed) in enumerate(zip(counted, expected, strict=True)):
        assert problem is None
        if exact:
            assert traffic == closed, f"rank {rank}"
        else:
            assert calls_of(traffic) == calls_of(closed), f"rank {rank}"
            of_experts = ("ep", "all_to_all")
            ours, theirs = ({k: v for k, v in bytes_of(t).items() if k[:2] != of_experts} for t in (traffic, closed))
            assert ours == theirs, f"rank {rank}"
    # What some ranks of a group receive more, others receive less.
    assert exchanged(traffic for traffic, _ in counted) == exchanged(
        closed for closed in expected if closed is not None
    )


MORE = [
    *(routed(dp=2, zero_stage=3, ep=ep, micro_batch_size=1, recompute="full", precision="bf16") for ep in (1, 2)),
    # A stage of one layer without embedding: FSDP gathers ahead what is still gathered.
    *(
        routed(experts(num_dense_layers=0), dp=2, ep=ep, zero_stage=3, pp=4, micro_batch_size=1, precision="bf16")
        for ep in (1, 2)
    ),
    routed(dp=2, ep=2, routing="skewed", routing_imbalance=3.0, micro_batch_size=2, precision="bf16"),
    routed(dp=2, tp=2, etp=1, ep=4, routing="skewed", routing_imbalance=2.0, zero_stage=3),
    routed(cp=2, tp=2, etp=1, ep=4, routing="skewed", routing_imbalance=2.0, cp_kind="ulysses", num_kv_heads=4),
    routed(tp=2, etp=2, recompute="full", micro_batch_size=2, precision="bf16"),
    routed(tp=2, etp=2, recompute="full", micro_batch_size=2, sequence_parallel=False, qk_norm=True),
    routed(AUX, cp=2, tp=2, etp=2, routing="learned", recompute="full", recompute_every=3, precision="bf16"),
    routed(BIAS, dp=2, tp=2, etp=1, ep=2, routing="learned", precision="bf16"),
    routed(experts(num_shared_experts=0), tp=2, etp=1, routing="learned", zero_stage=1, precision="bf16"),
    routed(dp=2, ep=2, routing="learned", capacity_factor=1.0, precision="bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.world_size > 1] + MORE, ids=lambda c: c.id)
def test_every_rank_sends_what_the_closed_form_says(gloo_pool: Pool, case: Experiment) -> None:
    check(gloo_pool, case)


@pytest.mark.parametrize("seed", range(40))
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
