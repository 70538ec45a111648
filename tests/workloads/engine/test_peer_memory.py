"""Tokens exchanged through memory that ranks share: the same losses, gradients and traffic as with collectives.

On a CPU the ranks share files, and a copy is done when it returns; the order of rows, slots and barriers is that of
GPUs. On GPUs the parity tests of every layout with tp exchange so (`test_parity.py`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.planted.plant import Fault, planted
from tests.pool import Pool, RankFailed
from tests.sampling import sampled
from tests.workloads.engine.parity import check, experiment, experts, train_rank
from workloads.costs.shape.peer_memory import SLOTS, slot_bytes
from workloads.engine.collectives.communication import Axis
from workloads.engine.collectives.peer_memory import PeerMemory, gathered_product
from workloads.engine.training import build
from workloads.parity.training import RankTrace
from workloads.spec.experiment import Experiment

CASES = [
    experiment(tp=2, rounds=2),
    experiment(tp=4, num_kv_heads=4, rounds=1),
    experiment(tp=2, rounds=2, recompute="full"),
    experiment(tp=2, rounds=1, recompute="selective"),
    experiment(tp=2, latent=16, rounds=2, recompute="norm+mla_up", attention="math"),
    experiment(tp=2, dp=2, zero_stage=3, micro_batch_size=2),
    experiment(tp=2, cp=2, rounds=2),
    experiment(tp=2, pp=2, pp_schedule="1f1b", rounds=2),
    experiment(tp=2, pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, rounds=4),
    experiment(tp=2, ep=2, moe=experts(), rounds=2),
]


class Files:
    """Memory of a group in files, one a rank."""

    def __init__(self, folder: Path, axis: Axis, size: int) -> None:
        assert axis.group is not None
        self.group = axis.group
        ranks = dist.get_process_group_ranks(axis.group)
        self.memory = [
            torch.from_file(str(folder / f"{name}-{size}"), shared=True, size=size, dtype=torch.uint8) for name in ranks
        ]

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = int(torch.Size(sizes).numel())
        return self.memory[rank].view(dtype)[storage_offset : storage_offset + count].view(*sizes)

    def barrier(self, channel: int = 0) -> None:
        dist.barrier(self.group)


def files_of(folder: Path, axis: Axis, slot: int) -> PeerMemory:
    size = SLOTS * slot
    return PeerMemory(axis, torch.empty(size, dtype=torch.uint8), Files(folder, axis, size))


def train_with_files(rank: int, *arguments: Any, folder: Path) -> RankTrace:
    def opened(case: Experiment, axis: Axis, device: torch.device) -> PeerMemory:
        return files_of(folder, axis, slot_bytes(case))

    with patch.object(build, "open_peer_memory", opened):
        return train_rank(rank, *arguments)


@pytest.mark.parametrize("case", sampled(CASES, 3))
def test_shared_memory_equals_a_single_process(gloo_pool: Pool, tmp_path: Path, case: Experiment) -> None:
    assert slot_bytes(case) > 0
    check(
        gloo_pool, case, body=partial(train_with_files, folder=tmp_path), clip_at=0.3, counts=case.attention != "math"
    )


PEERS = "workloads.engine.collectives.peer_memory:"
FAULTS = [
    Fault(name=name, what=what, axis="tp", place=PEERS + place, old=old, new=new)
    for name, what, place, old, new in (
        (
            "rows_of_another",
            "rows are put where another rank's belong",
            "PeerMemory.gather",
            "axis.rank + step",
            "step",
        ),
        (
            "without_own_rows",
            "a whole copy lacks this rank's rows",
            "PeerMemory.gather",
            "full[axis.rank * len(x) : (axis.rank + 1) * len(x)].copy_(x)",
            "full[axis.rank * len(x) : (axis.rank + 1) * len(x)].zero_()",
        ),
        ("first_of_others", "a sum has one of the other ranks", "Sum.wait", "self._total.add_(other)", "pass"),
        ("not_summed", "a sum is this rank's part alone", "Sum.wait", "first, out", "0 * first, out"),
    )
]


def exchanges_with(rank: int, fault: Fault | None, folder: Path) -> None:
    with planted(fault):
        exchanges(rank, folder, True)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_of_an_exchange_is_found(gloo_pool: Pool, tmp_path: Path, fault: Fault) -> None:
    with pytest.raises(RankFailed, match="not close"):
        gloo_pool.run(exchanges_with, 3, fault, tmp_path)


def exchanges(rank: int, folder: Path, read: bool) -> tuple[Tensor, Tensor, Tensor]:
    axis = Axis("tp", dist.get_world_size(), rank, dist.group.WORLD)
    peers = files_of(folder, axis, 4 * 5 * 8 * axis.size)
    torch.manual_seed(rank)
    for _ in range(5):
        x, whole = torch.randn(4, 5, dtype=torch.float64), torch.randn(4 * axis.size, 3, dtype=torch.float64)
        matrix, other = torch.full((5, 2), 1.0 + rank).double(), torch.full((3, 5), 2.0 + rank).double()
        tokens = peers.gather(x)
        total = peers.summed_product(whole, other)
        product = gathered_product(tokens, matrix)
        expected = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(expected, x)
        full = torch.cat(expected)
        torch.testing.assert_close(tokens.wait(), full)
        torch.testing.assert_close(product, full @ matrix)
        rows = whole @ other
        dist.all_reduce(rows)
        if read:
            torch.testing.assert_close(total.wait(), rows.chunk(axis.size)[rank])
    return x, product, rows


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_and_sums_of_several_exchanges(gloo_pool: Pool, tmp_path: Path, ranks: int) -> None:
    assert len(gloo_pool.run(exchanges, ranks, tmp_path, True)) == ranks


def test_a_sum_must_be_read_before_the_next_exchange(gloo_pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="before the sum of the one before is read"):
        gloo_pool.run(exchanges, 2, tmp_path, False)
