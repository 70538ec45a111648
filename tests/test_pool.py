"""The pool of processes: ranks that a machine stopped for long or killed get a second attempt, faults get none; what
ranks return arrives as it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.pool import Pool, RankDied, RankFailed, RankTimedOut


def _late_the_first_time(rank: int, started: Path) -> int:
    if rank == 1 and not started.exists():
        started.touch()
        time.sleep(60)
    return rank


def _rank(rank: int) -> int:
    return rank


def _late(rank: int) -> None:
    time.sleep(60)


def _killed_the_first_time(rank: int, started: Path) -> int:
    if rank == 1 and not started.exists():
        started.touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return rank


def _killed(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(rank: int, calls: Path) -> None:
    with calls.open("a") as file:
        file.write("called\n")
    raise ValueError("a fault")


@pytest.mark.slow
def test_ranks_that_time_out_start_once_more_and_say_where_they_stood(tmp_path: Path) -> None:
    pool = Pool(2)
    try:
        assert pool.run(_rank, 2) == [0, 1]  # the ranks are there before five seconds begin
        with pytest.warns(UserWarning, match=r"(?s)no answer within 5 s from ranks \[1\].*_late_the_first_time"):
            assert pool.run(_late_the_first_time, 2, tmp_path / "started", timeout_s=5) == [0, 1]
        with pytest.warns(UserWarning), pytest.raises(RankTimedOut, match=r"from ranks \[0\]"):
            pool.run(_late, 1, timeout_s=1)
    finally:
        pool.close()


@pytest.mark.slow
def test_ranks_that_die_start_once_more(tmp_path: Path) -> None:
    pool = Pool(2)
    try:
        with pytest.warns(UserWarning, match="rank 1 is gone, exit code -6"):
            assert pool.run(_killed_the_first_time, 2, tmp_path / "started") == [0, 1]
        with pytest.warns(UserWarning), pytest.raises(RankDied, match="exit code -9"):
            pool.run(_killed, 1)
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:ranks timed out or died")
def test_a_rank_that_is_done_at_once_waits_for_its_peers_to_connect() -> None:
    """Without that, one job of twenty-five needed its second attempt on two cores with six more processes."""
    pool = Pool(4)
    try:
        assert all(pool.run(_rank, 4) == [0, 1, 2, 3] for _ in range(15))
    finally:
        pool.close()


@pytest.mark.slow
def test_a_fault_is_not_tried_again(tmp_path: Path) -> None:
    pool = Pool(1)
    try:
        with pytest.raises(RankFailed, match="a fault"):
            pool.run(_raises, 1, tmp_path / "calls")
    finally:
        pool.close()
    assert (tmp_path / "calls").read_text() == "called\n"


def tensors(rank: int) -> dict[str, torch.Tensor]:
    values = torch.arange(6.0).view(2, 3)
    return {
        "turned": values.t(),
        "number": torch.tensor(0.1, dtype=torch.float64),
        "bf16": values.bfloat16(),
        "fp8": values.to(torch.float8_e4m3fn),
        "whether": values > 2,
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "weight": values.clone().requires_grad_(),
    }


@pytest.mark.slow
def test_tensors_come_back_as_they_are(gloo_pool: Pool) -> None:
    for found in gloo_pool.run(tensors, 2):
        for name, tensor in tensors(0).items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].double(), tensor.double()), name
