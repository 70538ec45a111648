"""Checks of an optimizer and of activations on the host whose copies are late, which no run on a CPU would show. As
those of `tests.planted.checks`."""

from __future__ import annotations

from unittest import mock

import torch

from tests.planted.plant import Fault, planted, with_fault
from tests.pool import Pool
from tests.workloads.engine.parity import experiment
from tests.workloads.engine.test_activation_offload import differences
from tests.workloads.engine.test_streamed_moments import shards, updated
from workloads.engine.training import streamed_moments
from workloads.engine.training.streamed_moments import StreamedAdamW


def late_copies(pool: Pool, fault: Fault | None) -> None:
    """Weights are the same whether copies are done when they are launched, or as late as somebody waits for them."""
    with mock.patch.object(streamed_moments, "PIECE", 3):
        expected = updated(late=False)
        with planted(fault):
            found = updated(late=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def share_of_host(pool: Pool, fault: Fault | None) -> None:
    """The host holds two numbers for each element of its share, to one element a shard."""
    elements = sum(shard.numel() for shard in shards())
    for share in (0.25, 1.0):
        with planted(fault):
            held = StreamedAdamW(shards(), share).host_bytes()
        assert abs(held - 2 * 8 * share * elements) <= 2 * 8 * len(shards()), held


def late_activations(pool: Pool, fault: Fault | None) -> None:
    """A step is the same whether activations wait on the host or on the device, with copies as late as they may be."""
    for case in (experiment(activation_offload="all"), experiment(pp=2, rounds=4, activation_offload="all")):
        for found, _ in pool.run(with_fault, case.world_size, fault, differences, case, "cpu", True, 1):
            assert found == []
